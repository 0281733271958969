"""Scripted histories of runs: what the policy does with every kind of trouble."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from cpupp.errors import ExitCode
from cpupp.plan.events import (
    AnnounceReady,
    Ask,
    Asked,
    Begin,
    CheckHealth,
    Complete,
    Completed,
    Down,
    Event,
    Exited,
    Halted,
    Health,
    HostLost,
    Interrupted,
    KeeperLost,
    Logged,
    RankDied,
    Reported,
    StartFailed,
    StartNodes,
    StopAll,
    Suspended,
    Tick,
)
from cpupp.plan.failures import exit_text
from cpupp.plan.gang import status_of
from cpupp.plan.handoff import ErrorReport, GroupReport
from cpupp.plan.lifecycle import ANNOUNCE_GRACE, SETTLE
from cpupp.plan.runstate import RunState
from tests.unit.history import History, announcement


def test_ready_needs_announcements_health_and_a_completion() -> None:
    run = History()
    assert run.feed(Begin(at=0)) == (StartNodes(),)
    run.started().joined()
    assert run.feed(Tick(at=4)) == (CheckHealth(),)
    assert run.feed(Tick(at=4.1)) == ()  # one request at a time
    assert run.feed(Health(at=5, healthy=False)) == ()
    assert run.feed(Tick(at=5.1)) == ()
    run.feed(Logged(at=5.2, node_rank=0, line="INFO:     Application startup complete."))
    assert run.feed(Tick(at=5.2)) == (CheckHealth(),)
    assert run.feed(Health(at=7, healthy=True)) == (Complete(),)
    assert run.state.ready_at is None
    assert run.feed(Completed(at=8, error="")) == (AnnounceReady(),)
    assert run.state.stage == "ready"


def test_healthy_but_silent_rank_is_not_ready_and_then_fails() -> None:
    run = History().started()
    run.feed(Reported(at=3, node_rank=0, report=announcement(0)))
    assert run.feed(Health(at=4, healthy=True)) == ()
    run.feed(Tick(at=4 + ANNOUNCE_GRACE - 1))
    assert run.state.stage == "starting"
    run.feed(Health(at=5, healthy=True), Tick(at=4 + ANNOUNCE_GRACE), Tick(at=4 + ANNOUNCE_GRACE + SETTLE))
    assert run.codes() == ["INJECTION-MISSING"]
    failure = run.state.failures[0]
    assert failure.ranks == (1,)
    assert "rank 1 never announced its pp group [0, 1]" in failure.message
    assert "never loaded" in failure.message
    assert run.actions[-1] == StopAll(failed=True)


def test_weights_loaded_without_announcement_fails_before_health() -> None:
    run = History().started()
    run.feed(Logged(at=9, node_rank=0, line="Loading weights took 0.20 seconds"), Tick(at=9 + ANNOUNCE_GRACE))
    assert run.codes() == ["INJECTION-MISSING"]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (announcement(1, "shm"), "link 0->1: plan gloo, rank shm"),
        (replace(announcement(1), ranks=[0, 2]), "which the plan does not have"),
        (replace(announcement(1), backend="mixed"), "plan gloo, rank mixed"),
    ],
)
def test_an_announcement_that_differs_from_the_plan_fails(report: GroupReport, text: str) -> None:
    run = History().started()
    run.feed(Reported(at=3, node_rank=1, report=report), Tick(at=3 + SETTLE))
    assert run.codes() == ["INJECTION-MISMATCH"]
    assert text in run.state.failures[0].message
    assert run.state.exit_code == ExitCode.RANK_FAILED


def test_stock_needs_no_announcement() -> None:
    run = History(communicator="stock").started()
    assert run.feed(Health(at=4, healthy=True)) == (Complete(),)


def test_the_first_failure_is_the_cause_and_the_other_its_consequence() -> None:
    run = History().serving()
    run.feed(Exited(at=20.0, node_rank=0, code=1), Exited(at=20.9, node_rank=1, code=-9))
    tails = {0: ("work", "RuntimeError: Connection reset by peer [10.0.0.2]"), 1: ("loading",)}
    assert run.feed(Tick(at=20 + SETTLE, tails=tails)) == (StopAll(failed=True),)
    assert [(f.host, f.code) for f in run.state.failures] == [("b", "RANK-SIGNAL"), ("a", "RANK-EXIT")]
    assert run.state.failures[0].last_lines == ("loading",)
    assert "out of memory" in run.state.failures[0].message
    assert (run.state.outcome, run.state.exit_code) == ("failed", 1)


def test_an_exception_in_a_log_is_a_failure_though_nothing_exits() -> None:
    """vllm #23985: a rank raises, the others wait, /health stays 200."""
    run = History().serving()
    error = "(Worker_PP1 pid=7) ERROR 11-29 17:45:43 [multiproc_executor.py:1063] "
    run.feed(Logged(at=20, node_rank=1, line=error + "WorkerProc hit an exception."))
    run.feed(RankDied(at=20.5, node_rank=0, rank=0, pid=3))  # vLLM kills the head's worker for it
    tail = (error + "Traceback (most recent call last):", error + "ValueError: no such layer", error + "  more")
    assert run.feed(Tick(at=20 + SETTLE, tails={1: tail})) == (StopAll(failed=True),)
    assert run.codes() == ["RANK-EXCEPTION", "RANK-DIED"]
    assert run.state.failures[0].message == "a worker raised ValueError: no such layer"


def test_an_exception_about_a_lost_peer_is_a_consequence() -> None:
    """A killed worker says nothing; the other one tells of the broken connection at once."""
    run = History().serving()
    error = "(Worker_PP0 pid=6) ERROR 11-29 17:45:43 [multiproc_executor.py:1063] "
    run.feed(Logged(at=20, node_rank=0, line=error + "WorkerProc hit an exception."))
    run.feed(RankDied(at=20.9, node_rank=1, rank=1, pid=4))
    tail = (error + "RuntimeError: [../gloo/pair.cc:547] Connection closed by peer [10.0.0.2]:4711",)
    run.feed(Tick(at=20 + SETTLE, tails={0: tail}))
    assert run.codes() == ["RANK-DIED", "RANK-EXCEPTION"]
    assert run.state.failures[0].host == "b"


def test_how_a_worker_ended_is_read_from_its_parents_words() -> None:
    """The keeper may find only that the worker is gone: its parent has fetched the exit code."""
    run = History().serving()
    run.feed(RankDied(at=20, node_rank=1, rank=1, pid=4))
    words = "ERROR 11-29 17:45:43 [x.py:316] Worker proc VllmWorker-0 died unexpectedly (exit code: -7), shutting down"
    run.feed(Tick(at=20 + SETTLE, tails={1: (words,)}))
    message = "worker process 4 is gone: a worker process killed by SIGBUS: bus error: /dev/shm is probably full"
    assert run.state.failures[0].message == message


@pytest.mark.parametrize("first", [True, False])
def test_a_killed_worker_is_the_failure_whoever_is_heard_of_first(first: bool) -> None:
    """Its parent tells why it ends, and may be gone before the keeper sees that the worker is."""
    run = History().serving()
    exited = Exited(at=20, node_rank=1, code=1)
    run.feed(*((exited, RankDied(at=20, node_rank=1, rank=1, pid=4)) if first else (exited,)))
    words = "ERROR 11-29 17:45:43 [x.py:316] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down"
    run.feed(Tick(at=20 + SETTLE, tails={1: (words,)}))
    (failure,) = run.state.failures
    assert (failure.code, failure.host, failure.ranks) == ("RANK-DIED", "b", (1,))
    assert failure.message.startswith("a worker process killed by SIGKILL: probably out of memory")
    assert failure.message.endswith("; its vLLM node exited with code 1")


def test_exit_code_zero_of_a_rank_is_a_failure() -> None:
    run = History().serving()
    run.feed(Exited(at=20, node_rank=1, code=0), Tick(at=20 + SETTLE))
    assert run.state.exit_code == ExitCode.RANK_FAILED
    assert "although nobody stopped it" in run.state.failures[0].message


def test_rank_error_report_names_the_step() -> None:
    run = History().started()
    report = ErrorReport(pid=3, where="identity", message="/dev/shm is read-only")
    run.feed(Reported(at=2, node_rank=1, report=report), Tick(at=2 + SETTLE))
    assert run.state.failures[0].message == "identity: /dev/shm is read-only"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (StartFailed(at=2, node_rank=1, message="no such file"), "RANK-START"),
        (HostLost(at=2, host="b", reason="connection lost"), "HOST-LOST"),
        (RankDied(at=2, node_rank=1, rank=1, pid=7), "RANK-DIED"),
        (Halted(at=2, node_rank=1, pid=7, name="VLLM::Worker"), "RANK-HALTED"),
        (KeeperLost(at=2, node_rank=1, message="the keeper of vLLM node 1 ended with -9"), "KEEPER-LOST"),
    ],
)
def test_trouble_stops_the_whole_gang(event: Event, code: str) -> None:
    run = History().started()
    run.feed(event)
    assert run.feed(Tick(at=2 + SETTLE / 2)) == () or run.state.stage == "failing"
    assert StopAll(failed=True) in run.feed(Tick(at=2 + SETTLE))
    assert run.codes() == [code]
    assert run.state.failures[0].host == "b"
    run.feed(Exited(at=5, node_rank=0, code=-15), Exited(at=5, node_rank=1, code=-15), Down(at=6))
    assert run.state.stage == "down"
    assert run.codes() == [code]


def test_time_out_names_the_rank_that_never_joined_first() -> None:
    run = History(timeout=60).started()
    run.feed(
        Logged(at=3, node_rank=0, line="Starting to load model m"),
        Reported(at=3, node_rank=0, report=announcement(0)),
        Tick(at=59.9),
    )
    assert run.state.stage == "starting"
    assert StopAll(failed=True) in run.feed(Tick(at=60))
    first = run.state.failures[0]
    assert (first.host, first.code) == ("b", "NOT-READY")
    assert "started, importing" in first.message
    assert run.state.exit_code == ExitCode.NOT_READY


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("ready", [False, True])
def test_signals_stop_in_order_and_the_second_insists(signum: int, code: int, ready: bool) -> None:
    run = History().serving() if ready else History().started()
    assert run.feed(Interrupted(at=9, signum=signum)) == (StopAll(),)
    assert run.feed(Interrupted(at=10, signum=signum)) == (StopAll(now=True),)
    run.feed(Exited(at=10, node_rank=0, code=-15), Down(at=11))
    assert (run.state.stage, run.state.outcome, run.state.exit_code) == ("down", "interrupted", code)
    assert run.state.nodes[0].phase == "stopped"  # it did what it was told: no failure
    assert run.state.failures == ()


def test_ask_ends_the_run_with_success() -> None:
    run = History(ask=True).started().joined()
    run.feed(Health(at=4, healthy=True))
    assert run.feed(Completed(at=5, error="")) == (AnnounceReady(), Ask())
    assert run.feed(Asked(at=6, error="")) == (StopAll(),)
    assert (run.state.outcome, run.state.exit_code) == ("ok", 0)


def test_unanswered_question_and_failed_completion_are_failures() -> None:
    run = History(ask=True).started().joined()
    run.feed(Health(at=4, healthy=True), Completed(at=5, error=""), Asked(at=6, error="HTTP 500"), Tick(at=6 + SETTLE))
    assert run.codes() == ["ASK-FAILED"]
    run = History().started().joined()
    run.feed(Health(at=4, healthy=True), Completed(at=5, error="HTTP 500"), Tick(at=5 + SETTLE))
    assert run.codes() == ["READY-COMPLETION"]


def test_late_and_repeated_events_change_nothing() -> None:
    run = History().serving()
    before = run.state
    run.feed(Health(at=9, healthy=True), Completed(at=9, error=""), Asked(at=9, error=""), Down(at=9))
    assert run.state == before


def test_a_launcher_that_was_stopped_is_the_cause_of_what_the_agents_did() -> None:
    run = History().serving()
    run.feed(Suspended(at=60, seconds=31.4))
    run.feed(Exited(at=60.1, node_rank=1, code=-15, stopped=True), HostLost(at=60.2, host="b", reason="agent ended"))
    run.feed(Tick(at=60.1 + SETTLE))
    assert run.codes() == ["LAUNCHER-STOPPED", "HOST-LOST", "RANK-STOPPED"]
    assert "the launcher was stopped for 31 s" in run.state.failures[0].message


def test_a_failure_long_after_the_launcher_was_stopped_is_its_own() -> None:
    run = History().serving()
    run.feed(Suspended(at=60, seconds=8), Exited(at=90, node_rank=1, code=-9), Tick(at=90 + SETTLE))
    assert run.codes() == ["RANK-SIGNAL"]


def test_what_an_agent_ended_is_a_consequence_of_the_agents_end() -> None:
    run = History().serving()
    run.feed(Exited(at=60, node_rank=1, code=-15, stopped=True), HostLost(at=60.2, host="b", reason="signal 15"))
    run.feed(Tick(at=60 + SETTLE))
    assert [(f.code, f.message) for f in run.state.failures] == [
        ("HOST-LOST", "signal 15"),
        ("RANK-STOPPED", "ended by its agent"),
    ]


def test_a_keeper_that_died_is_named_not_the_memory() -> None:
    run = History().serving()
    run.feed(KeeperLost(at=20, node_rank=1, message="the keeper ended with -9"), Exited(at=20, node_rank=1, code=-9))
    run.feed(Tick(at=20 + SETTLE))
    assert run.codes() == ["KEEPER-LOST", "RANK-SIGNAL"]


def test_the_first_sign_of_failure_is_degraded_at_once() -> None:
    run = History().serving()
    assert status_of(run.state) == RunState.READY
    run.feed(Exited(at=20, node_rank=1, code=3))
    assert status_of(run.state) == RunState.DEGRADED
    run.feed(Tick(at=20 + SETTLE))
    assert status_of(run.state) == RunState.STOPPING
    run.feed(Down(at=25))
    assert status_of(run.state) == RunState.FAILED


def test_the_kernels_word_is_the_reason_where_it_is_known() -> None:
    why = "the kernel ended it, out of memory: Killed process 7 (vllm)"
    assert exit_text(-9, why) == f"killed by SIGKILL: {why}"
    assert exit_text(-9) == "killed by SIGKILL: probably out of memory (see `dmesg` on that host)"
    run = History().serving()
    run.feed(RankDied(at=20, node_rank=1, rank=1, pid=7, code=-9, why=why), Tick(at=20 + SETTLE))
    assert run.state.failures[0].message == f"worker process 7 killed by SIGKILL: {why}"


def test_exit_text_names_signals() -> None:
    assert exit_text(-4) == "killed by SIGILL: illegal instruction: this build of vLLM does not fit the CPU"
    assert exit_text(-7).startswith("killed by SIGBUS: bus error")
    assert exit_text(-77) == "killed by signal 77"
    assert exit_text(3) == "exited with code 3"
