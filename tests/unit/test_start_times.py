"""Where the time of a start went: by milestone, with the host that was last; kept and shown."""

from __future__ import annotations

import json

from cpupp.plan.events import Begin, Completed, Health, Logged, Reported, Spawned
from cpupp.plan.handoff import PluginReport
from cpupp.plan.start_times import read_start, start_data, start_steps, start_text
from tests.unit.history import History, announcement


def history() -> History:
    """A start in which now the one host is last and now the other."""
    run = History()
    plugin = PluginReport(pid=1, vllm="0.32.0", mode="links")
    run.feed(Begin(at=11), Spawned(at=11.5, node_rank=1, pid=2), Spawned(at=12, node_rank=0, pid=1))
    run.feed(Reported(at=20, node_rank=0, report=plugin), Reported(at=24, node_rank=1, report=plugin))
    run.feed(*[Reported(at=25 + node, node_rank=node, report=announcement(node)) for node in (0, 1)])
    run.feed(*[Logged(at=29 - node, node_rank=node, line="Loading weights took 0.2 s") for node in (0, 1)])
    assert start_steps(run.state, 10) == ()
    run.feed(Health(at=40, healthy=True), Completed(at=42, error=""))
    return run


def test_each_milestone_has_its_seconds_and_who_was_last() -> None:
    steps = start_steps(history().state, 10)
    assert [(s.milestone, s.seconds, s.last, s.at) for s in steps] == [
        ("spawned", 2.0, "a", (2.0, 1.5)),
        ("imported", 12.0, "b", (10.0, 14.0)),
        ("joined", 2.0, "b", (15.0, 16.0)),
        ("loaded", 3.0, "a", (19.0, 18.0)),
        ("warmed up", 11.0, "a", (30.0, 30.0)),
        ("ready", 2.0, "a", (32.0, 32.0)),
    ]
    assert start_text(steps) == (
        "spawned 2.0 s (a), imported 12.0 s (b), joined 2.0 s (b), loaded 3.0 s (a), warmed up 11.0 s (a), ready 2.0 s"
    )


def test_what_a_record_holds_is_read_as_far_as_it_goes() -> None:
    steps = start_steps(history().state, 10)
    assert read_start(json.loads(json.dumps(start_data(steps)))) == steps
    assert read_start([{"milestone": "x", "seconds": "soon"}, 7, {"seconds": float("nan")}]) == ()
    assert read_start(None) == ()
