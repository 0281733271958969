"""Cores of every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import make_grid
from cpupp.plan.threads import CorePlan, plan_cores
from tests.unit.factory import cluster, cpus, host, machines, one_machine


def cores(spec: ClusterSpec, facts: dict[str, HostFacts]) -> CorePlan:
    """The core plan of a spec."""
    return plan_cores(spec, make_grid(spec), facts)


def test_two_ranks_on_one_numa_node_get_their_own_cores() -> None:  # vllm #35789
    plan = cores(cluster({"name": "a", "slots": 2}, pipeline=2), machines("a", cpus=cpus(8)))
    assert plan.cores == {0: (0, 1, 2), 1: (4, 5, 6, 7)}


def test_one_core_is_left_for_the_engine_on_the_head() -> None:  # vllm #25818
    plan = cores(cluster("a", "b", pipeline=2), machines("a", "b", cpus=cpus(4)))
    assert plan.cores == {0: (0, 1, 2), 1: (0, 1, 2, 3)}
    assert plan.reserved == (3,)


def test_one_core_only_is_shared_and_the_plan_says_so() -> None:
    plan = cores(cluster("a"), machines("a", cpus=cpus(1)))
    assert plan.cores == {0: (0,)}
    assert plan.warnings == ("a: no core left for API server and engine, they share a core with rank 0",)


def test_hyperthreads_count_once() -> None:
    assert cores(cluster("a"), machines("a", cpus=cpus(2, smt=2))).cores == {0: (0,)}


def test_two_entries_of_one_machine_divide_its_cores() -> None:
    plan = cores(cluster("a", "b", pipeline=2), one_machine("a", "b", cpus=cpus(4)))
    assert plan.cores == {0: (0,), 1: (2, 3)}
    assert plan.warnings[0] == "a and b share their CPUs (one kernel): 4 cores divided over 2 ranks"


def test_entries_of_one_kernel_with_their_own_cores_divide_nothing() -> None:
    facts = {"a": host("a", 1, cpus=cpus(1)), "b": host("b", 1, cpus=cpus(1, first=1))}
    assert cores(cluster("a", "b", pipeline=2), facts).cores == {0: (0,), 1: (1,)}


def test_cores_that_overlap_in_part_go_only_where_they_are_allowed() -> None:
    facts = one_machine("a", "b", cpus=cpus(6))
    spec = cluster({"name": "a", "cores": [0, 1, 2, 3]}, {"name": "b", "cores": [3, 4, 5]}, pipeline=2)
    plan = cores(spec, facts)
    assert plan.cores == {0: (0, 1), 1: (3, 4, 5)}


def test_ranks_stay_inside_numa_nodes() -> None:
    spec = cluster({"name": "a", "slots": 3}, pipeline=3)
    plan = cores(spec, machines("a", cpus=cpus(8, numa=2)))
    assert plan.cores == {0: (0,), 1: (2, 3), 2: (4, 5, 6, 7)}


def test_fewer_ranks_than_nodes_take_whole_nodes() -> None:
    spec = cluster({"name": "a", "slots": 2}, pipeline=2)
    plan = cores(spec, machines("a", cpus=cpus(8, numa=4)))
    assert plan.cores == {0: (0, 1, 2), 1: (4, 5, 6, 7)}


def test_a_cgroup_quota_limits_the_cores() -> None:
    assert cores(cluster("a", "b", pipeline=2), machines("a", "b", cpus=cpus(8), cpu_quota=2.0)).cores[1] == (0, 1)


def test_more_ranks_than_cores_are_planned_and_named() -> None:
    plan = cores(cluster({"name": "a", "slots": 3}, pipeline=3), machines("a", cpus=cpus(2)))
    assert plan.cores == {0: (0,), 1: (1,), 2: (0,)}
    assert "a: 3 ranks on 2 cores: ranks share cores and will be slow" in plan.warnings


def test_hosts_nobody_asked_get_no_cores() -> None:
    assert cores(cluster("a", "b", pipeline=2), {"a": host("a")}).cores[1] == ()


@given(st.integers(1, 6), st.integers(1, 24), st.integers(1, 4), st.integers(1, 2))
def test_no_core_is_given_twice_and_none_is_invented(slots: int, num: int, numa: int, smt: int) -> None:
    facts = machines("a", cpus=cpus(num, numa=min(numa, num), smt=smt))
    plan = cores(cluster({"name": "a", "slots": slots}, pipeline=slots), facts)
    given_out = [cpu for share in plan.cores.values() for cpu in share]
    assert set(given_out) <= {c.cpu for c in facts["a"].cpus}
    assert all(plan.cores.values())
    if num >= slots:
        assert len(given_out) == len(set(given_out))
        assert len(given_out) + len(plan.reserved) == num
