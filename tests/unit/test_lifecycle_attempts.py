"""Scripted histories of starts that are late, of gangs that come again, and of runs that are left to their agents."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from cpupp.errors import ExitCode
from cpupp.plan.events import (
    AnnounceReady,
    AnnounceRestart,
    Begin,
    Completed,
    Detach,
    Detached,
    Down,
    Event,
    Exited,
    Health,
    HostAway,
    HostLost,
    Interrupted,
    Logged,
    Reconnect,
    Reconnected,
    Reported,
    Spawned,
    StopAll,
    Tick,
)
from cpupp.plan.gang import status_of
from cpupp.plan.handoff import ErrorReport, PluginReport
from cpupp.plan.lifecycle import SETTLE
from cpupp.plan.milestones import DEADLINES, MILESTONES
from cpupp.plan.runstate import RunState
from tests.unit.history import History, announcement, pair


def milestone(run: History) -> str:
    """What all vLLM nodes have reached."""
    return MILESTONES[run.state.milestone]


def test_the_gang_passes_milestones_together() -> None:
    run = History()
    run.feed(Begin(at=0), Spawned(at=1, node_rank=0, pid=10))
    assert milestone(run) == "connected"
    run.feed(Spawned(at=2, node_rank=1, pid=11))
    assert (milestone(run), run.state.milestone_at) == ("spawned", 2)
    plugin = PluginReport(pid=1, vllm="0.32.0", mode="links")
    run.feed(*(Reported(at=3, node_rank=node, report=plugin) for node in (0, 1)))
    assert milestone(run) == "imported"
    run.feed(*(Reported(at=4, node_rank=node, report=announcement(node)) for node in (0, 1)))
    assert milestone(run) == "joined"
    run.feed(*(Logged(at=5, node_rank=node, line="Loading weights took 0.20 seconds") for node in (0, 1)))
    assert milestone(run) == "loaded"
    run.feed(Logged(at=6, node_rank=0, line="Starting vLLM API server 0 on http://0.0.0.0:8000"))
    assert milestone(run) == "warmed up"  # the head could not serve if the others were not
    run.feed(Health(at=7, healthy=True), Completed(at=8, error=""))
    assert (milestone(run), run.state.milestone_at) == ("ready", 8)


def test_every_key_of_the_deadlines_ends_with_a_milestone() -> None:
    assert tuple(pair().deadlines) == DEADLINES
    assert len(DEADLINES) == len(MILESTONES)


LONG = dict.fromkeys(DEADLINES, 1000)


@pytest.mark.parametrize(
    ("key", "lines", "host", "words"),
    [
        ("spawn", [], "a", "not spawned within 30 s; last seen: waiting"),
        ("import", ["spawned"], "b", "not imported within 30 s; last seen: started, importing"),
        ("join", ["spawned", "plugin"], "b", "not joined within 30 s; last seen: started, importing"),
        ("load", ["spawned", "joined"], "b", "not loaded within 30 s; last seen: joined its groups"),
        ("warm-up", ["spawned", "joined", "loaded"], "b", "not warmed up within 30 s; last seen: weights loaded"),
    ],
)
def test_a_deadline_names_who_is_behind_and_the_phase(key: str, lines: list[str], host: str, words: str) -> None:
    run = History(deadlines={**LONG, key.replace("-", "_"): 30})
    run.feed(Begin(at=0))
    if "spawned" in lines:
        run.feed(Spawned(at=1, node_rank=0, pid=10), Spawned(at=1, node_rank=1, pid=11))
    ahead = Logged(at=2, node_rank=0, line="Starting to load model m")
    if "plugin" in lines:
        plugin = PluginReport(pid=1, vllm="0.32.0", mode="links")
        run.feed(*(Reported(at=2, node_rank=node, report=plugin) for node in (0, 1)))
    if "joined" in lines:
        run.joined()
        ahead = Logged(at=4, node_rank=0, line="Warming up model for the compilation")
    if "loaded" in lines:
        run.feed(*(Logged(at=5, node_rank=node, line="Loading weights took 0.20 seconds") for node in (0, 1)))
        ahead = Logged(at=6, node_rank=0, line="Warming up done.")
    run.feed(*([ahead] if lines else []))
    since = run.state.milestone_at
    run.state = replace(run.state, loaded_since=None)  # the announcements have a rule of their own
    run.feed(Tick(at=since + 29))
    assert run.codes() == []
    assert run.feed(Tick(at=since + 30, tails={0: ("of a",), 1: ("of b",)})) == (StopAll(failed=True),)
    first = run.state.failures[0]
    assert (first.host, first.code, first.message) == (host, f"DEADLINE-{key.upper()}", words)
    assert first.last_lines == (f"of {host}",)
    assert first.hint == f"raise deadlines.{key.replace('-', '_')} if it was still making progress"
    assert run.state.exit_code == ExitCode.NOT_READY


def test_an_api_that_never_answers_is_named_by_its_deadline() -> None:
    run = History(deadlines={**LONG, "answer": 30}).started().joined()
    run.feed(Logged(at=5, node_rank=0, line="Starting vLLM API server 0"), Tick(at=34.9))
    assert run.codes() == []
    run.feed(Tick(at=35))
    assert [(failure.code, failure.host) for failure in run.state.failures] == [("DEADLINE-ANSWER", "a")]


def test_no_timeout_means_no_end_but_the_deadlines() -> None:
    run = History(deadlines={**LONG, "import": 10_000_000}).started()
    run.feed(Tick(at=1_000_000))
    assert run.state.stage == "starting"


AGAIN = {"policy": "on-failure", "max": 2, "backoff": 10}


def test_a_failure_is_final_where_nothing_else_is_written() -> None:
    run = History().serving()
    assert run.failed(20) == ()
    assert (run.state.stage, run.state.exit_code) == ("down", 1)
    assert [attempt.number for attempt in run.state.attempts] == [1]


def test_the_whole_gang_comes_again_and_the_wait_doubles() -> None:
    run = History(restart=AGAIN).serving()
    assert run.failed(20) == (AnnounceRestart(wait=10),)
    assert status_of(run.state) == RunState.RESTARTING
    assert run.feed(Tick(at=34.9)) == ()
    run.restarted(35)
    assert (run.state.attempt, run.state.failures, run.state.announced) == (2, (), frozenset())
    assert {node.phase for node in run.state.nodes} == {"waiting"}
    run.serving()
    assert run.failed(60) == (AnnounceRestart(wait=20),)
    run.restarted(90).serving()
    assert run.failed(100) == ()
    assert run.state.not_restarted == "not restarted again: it was 2 times (restart.max)"
    assert [attempt.number for attempt in run.state.attempts] == [1, 2, 3]
    assert [attempt.failures[0].code for attempt in run.state.attempts] == ["RANK-EXIT"] * 3


def test_the_same_failure_twice_before_ready_is_not_tried_again() -> None:
    run = History(restart=AGAIN).started()
    event = ErrorReport(pid=3, where="load", message="no tensor at 0x7f3a10 for layer 12")
    run.failed(10, Reported(at=10, node_rank=1, report=event))
    run.restarted(25).started()
    event = ErrorReport(pid=77, where="load", message="no tensor at 0x7e0010 for layer 12")
    assert run.failed(40, Reported(at=40, node_rank=1, report=event)) == ()
    assert run.state.not_restarted == "not restarted again: attempts 1 and 2 failed alike before they were ready"


@pytest.mark.parametrize(
    "second",
    [
        Exited(at=40, node_rank=0, code=3),
        Exited(at=40, node_rank=1, code=-9),
        Reported(at=40, node_rank=1, report=ErrorReport(pid=3, where="load", message="no tensor")),
    ],
)
def test_another_failure_before_ready_is_tried_again(second: Event) -> None:
    run = History(restart=AGAIN).started()
    run.failed(10)
    run.restarted(25).started()
    assert run.failed(40, second) == (AnnounceRestart(wait=20),)


def test_a_host_that_is_away_is_tried_again_until_the_policy_ends() -> None:
    run = History(restart=AGAIN).serving()
    run.failed(20, HostLost(at=20, host="b", reason="no sign of life for 20 s"))
    for at, actions in ((35, (AnnounceRestart(wait=20),)), (70, ())):
        assert run.feed(Tick(at=at)) == (Reconnect(),)
        assert run.failed(at + 1, HostAway(at=at + 1, host="b", reason="No route to host")) == actions
    assert [attempt.failures[0].code for attempt in run.state.attempts] == ["HOST-LOST", "HOST-AWAY", "HOST-AWAY"]


def test_a_passed_deadline_is_tried_again_a_passed_timeout_is_not() -> None:
    run = History(restart=AGAIN, deadlines={**LONG, "import": 30}).started()
    run.feed(Tick(at=31))
    assert run.feed(Down(at=32)) == (AnnounceRestart(wait=10),)
    run = History(restart=AGAIN, timeout=30).started()
    run.feed(Tick(at=31))
    assert run.feed(Down(at=32)) == ()
    assert (run.state.not_restarted, run.state.exit_code) == ("not restarted: the time of --timeout is over", 6)


def test_an_interrupt_between_two_attempts_ends_the_run() -> None:
    for reconnecting in (False, True):
        run = History(restart=AGAIN).serving()
        run.failed(20)
        if reconnecting:
            run.feed(Tick(at=35))
        assert run.feed(Interrupted(at=36, signum=signal.SIGINT)) == (StopAll(),)
        assert run.feed(Reconnected(at=37)) == ()
        run.feed(Down(at=38))
        assert (run.state.stage, run.state.outcome, run.state.exit_code) == ("down", "interrupted", 130)
        assert run.state.failures == ()
        assert run.state.attempts[0].failures[0].code == "RANK-EXIT"


def test_an_interrupt_on_the_way_down_allows_no_further_attempt() -> None:
    run = History(restart=AGAIN).serving()
    run.feed(Exited(at=20, node_rank=1, code=3), Tick(at=20 + SETTLE))
    assert run.feed(Interrupted(at=22, signum=signal.SIGINT)) == (StopAll(now=True),)
    assert run.feed(Down(at=23)) == ()
    assert (run.state.stage, run.state.exit_code) == ("down", 1)


def test_a_detached_run_goes_on() -> None:
    run = History(detach=True).started().joined()
    run.feed(Health(at=4, healthy=True))
    assert run.feed(Completed(at=5, error="")) == (AnnounceReady(), Detach())
    assert run.feed(Detached(at=6, error="")) == ()
    assert (run.state.stage, run.state.outcome, run.state.exit_code) == ("down", "detached", 0)
    assert status_of(run.state) == RunState.READY


def test_a_host_that_will_not_go_on_alone_ends_the_run() -> None:
    run = History(detach=True).started().joined()
    run.feed(Health(at=4, healthy=True), Completed(at=5, error=""), Detached(at=6, error="host b: no node runs"))
    assert StopAll(failed=True) in run.feed(Tick(at=6 + SETTLE))
    assert (run.codes(), run.state.exit_code) == (["DETACH-FAILED"], 1)
