"""Scripted histories of runs: what the policy does with every kind of trouble."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from cpupp.errors import ExitCode
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.events import (
    Action,
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
    Health,
    HostLost,
    Interrupted,
    Logged,
    RankDied,
    Reported,
    Spawned,
    StartFailed,
    StartNodes,
    StopAll,
    Tick,
)
from cpupp.plan.failures import exit_text
from cpupp.plan.handoff import ErrorReport, GroupReport, PluginReport
from cpupp.plan.lifecycle import ANNOUNCE_GRACE, SETTLE, State, initial_state, step
from cpupp.plan.plan import Plan, make_plan


def pair(communicator: str = "links") -> Plan:
    """A plan of two hosts, pipeline 2, made without facts."""
    return make_plan(
        ClusterSpec.model_validate(
            {
                "name": "pair",
                "model": {"path": "m", "num_layers": 4},
                "parallel": {"pipeline": 2},
                "engine": {"communicator": communicator},
                "hosts": [{"name": "a", "ssh": "a"}, {"name": "b", "ssh": "b"}],
            }
        ),
        {},
    )


def announcement(rank: int, transport: str = "gloo") -> GroupReport:
    """What rank `rank` of the pair says of its pipeline group."""
    links = [[0, 1, transport], [1, 0, transport]]
    return GroupReport(rank=rank, pid=100 + rank, kind="pp", ranks=[0, 1], backend=transport, links=links, reason="r")


class History:
    """A run under test: feed events, keep every action."""

    def __init__(self, *, ask: bool = False, timeout: float = 600.0, communicator: str = "links") -> None:
        self.state: State = initial_state(pair(communicator), timeout=timeout, ask=ask, now=0.0)
        self.actions: list[Action] = []

    def feed(self, *events: Event) -> tuple[Action, ...]:
        """Feed events, return the actions of these."""
        before = len(self.actions)
        for event in events:
            self.state, actions = step(self.state, event)
            self.actions.extend(actions)
        return tuple(self.actions[before:])

    def started(self) -> History:
        """Both vLLM nodes run."""
        self.feed(Begin(at=0), Spawned(at=1, node_rank=0, pid=10), Spawned(at=1, node_rank=1, pid=11))
        return self

    def joined(self) -> History:
        """Both ranks announced what the plan says."""
        for node in (0, 1):
            self.feed(Reported(at=2, node_rank=node, report=PluginReport(pid=1, vllm="0.32.0", mode="links")))
            self.feed(Reported(at=3, node_rank=node, report=announcement(node)))
        return self

    def serving(self) -> History:
        """The model serves."""
        self.started().joined().feed(Health(at=4, healthy=True), Completed(at=5, error=""))
        assert self.state.stage == "ready"
        return self

    def codes(self) -> list[str]:
        """Codes of the failures, first the one that is named first."""
        return [failure.code for failure in self.state.failures]


def test_ready_needs_announcements_health_and_a_completion() -> None:
    run = History()
    assert run.feed(Begin(at=0)) == (StartNodes(),)
    run.started().joined()
    assert run.feed(Tick(at=4)) == (CheckHealth(),)
    assert run.feed(Tick(at=4.1)) == ()  # one request at a time
    assert run.feed(Health(at=5, healthy=False)) == ()
    assert run.feed(Tick(at=6)) == (CheckHealth(),)
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
    assert run.actions[-1] == StopAll()


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
    assert run.feed(Tick(at=20 + SETTLE, tails=tails)) == (StopAll(),)
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
    assert run.feed(Tick(at=20 + SETTLE, tails={1: tail})) == (StopAll(),)
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
    ],
)
def test_trouble_stops_the_whole_gang(event: Event, code: str) -> None:
    run = History().started()
    run.feed(event)
    assert run.feed(Tick(at=2 + SETTLE / 2)) == () or run.state.stage == "failing"
    assert StopAll() in run.feed(Tick(at=2 + SETTLE))
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
    assert StopAll() in run.feed(Tick(at=60))
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


def test_exit_text_names_signals() -> None:
    assert exit_text(-4) == "killed by SIGILL: illegal instruction: this build of vLLM does not fit the CPU"
    assert exit_text(-7).startswith("killed by SIGBUS: bus error")
    assert exit_text(-77) == "killed by signal 77"
    assert exit_text(3) == "exited with code 3"
