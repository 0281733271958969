"""What a rank is told at its start, by launch and by bench comm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpupp.launch.bench_comm import BenchOptions, BenchRun
from cpupp.launch.start import Start
from cpupp.plan.bench_comm import bench_commands
from cpupp.plan.command import make_commands
from cpupp.plan.handoff import HANDOFF_ENV, RankHandoff
from cpupp.plan.plan import Plan, make_plan
from tests.unit.factory import cluster, cpus, machines

MIB = 1 << 20


class Silent:
    """A session that nobody asks."""

    on_event: Callable[[str, dict[str, Any]], None]

    def request(self, op: str, *, timeout: float = 0.0, **params: Any) -> Any:
        """Not asked."""
        raise AssertionError(op)

    def detach(self, timeout_s: float = 0.0, **params: Any) -> None:
        """Not asked."""
        raise AssertionError


def no_room_on_b() -> Plan:
    """Two slots on each of two machines; the /dev/shm of b is full."""
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], shm=replace(facts["b"].shm, free=MIB))
    return make_plan(cluster(*({"name": n, "slots": 2} for n in "ab"), pipeline=2, tensor=2), facts)


def told(request: Mapping[str, Any]) -> tuple[str, bool]:
    """Host and `no_shm` of the handoff in a start request."""
    handoff = RankHandoff.decode(request["site_env"][HANDOFF_ENV])
    return handoff.host, handoff.no_shm


def test_launch_tells_ranks_that_there_is_no_room() -> None:
    plan = no_room_on_b()
    commands = make_commands(plan)
    start = Start(plan=plan, commands=commands, run="r", attempt=1, created=0.0)
    assert [told(start.request(command)) for command in commands] == [("a", False), ("b", True)]


@pytest.mark.parametrize(("cores", "shared"), [(1, [True, False]), (2, [False, False])])
def test_launch_tells_the_head_that_the_engine_has_no_core(cores: int, shared: list[bool]) -> None:
    plan = make_plan(cluster("a", "b", pipeline=2), machines("a", "b", cpus=cpus(cores)))
    start = Start(plan=plan, commands=make_commands(plan), run="r", attempt=1, created=0.0)
    sent = [start.request(command)["site_env"][HANDOFF_ENV] for command in start.commands]
    assert [RankHandoff.decode(text).shares_cores for text in sent] == shared


def test_two_readers_of_one_queue_keep_their_spin() -> None:
    plan = make_plan(cluster({"name": "a", "slots": 2}, pipeline=2), machines("a", cpus=cpus(2)))
    start = Start(plan=plan, commands=make_commands(plan), run="r", attempt=1, created=0.0)
    (sent,) = [start.request(command)["site_env"][HANDOFF_ENV] for command in start.commands]
    assert not RankHandoff.decode(sent).shares_cores


def test_bench_comm_tells_ranks_that_there_is_no_room(tmp_path: Path) -> None:
    plan = no_room_on_b()
    commands = bench_commands(plan, make_commands(plan), quick=True)
    sessions = {host.name: Silent() for host in plan.hosts}
    run = BenchRun(plan, commands, sessions, BenchOptions(run="r", folder=tmp_path), print)
    found = [told(run._start_params(command)) for command in commands]
    assert found == [("a", False), ("a", False), ("b", True), ("b", True)]
    run.record.close()
