"""Field cases of groups and backends: memory is proved, never guessed from names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpupp.errors import CpuppError
from cpupp.plan.backend import GroupPlan, memory_domains, plan_groups
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts, ShmFacts
from cpupp.plan.grid import make_grid
from cpupp.plan.plan import make_plan
from tests.unit.factory import cluster, host, machines, one_machine


def groups(spec: ClusterSpec, facts: dict[str, HostFacts]) -> dict[str, GroupPlan]:
    """The groups of a plan by name."""
    return {group.name: group for group in plan_groups(spec, make_grid(spec), facts)}


def transports(group: GroupPlan) -> dict[tuple[int, int], str]:
    """Transport of every ordered pair."""
    return {(link.src, link.dst): link.transport for link in group.links}


PAIR = cluster("a", "b", pipeline=2)


def test_two_machines_talk_by_gloo() -> None:
    group = groups(PAIR, machines("a", "b"))["pp0"]
    assert group.backend == "gloo"
    assert group.reason == "a and b are two machines (boot ids differ)"
    assert transports(group) == {(0, 1): "gloo", (1, 0): "gloo"}


def test_equal_hostnames_prove_nothing() -> None:  # ROCm/mori #74
    assert groups(PAIR, machines("a", "b", hostname="node"))["pp0"].backend == "gloo"


def test_two_entries_that_are_one_machine_share_memory_and_the_plan_says_so() -> None:
    plan = make_plan(PAIR, one_machine("a", "b"))
    assert plan.groups[0].backend == "shm"
    assert plan.groups[0].reason == "a and b are one machine (boot id, /dev/shm device, nonce read)"
    assert plan.machines == (("a", "b"),)
    assert "a and b are one machine: its cores and memory are divided" in plan.warnings


def test_one_kernel_with_two_devices_of_dev_shm() -> None:  # docker --network host, and our test hosts
    facts = one_machine("a", "b")
    facts["b"] = replace(facts["b"], shm=replace(facts["b"].shm, device=0x99))
    group = groups(PAIR, facts)["pp0"]
    assert group.backend == "gloo"
    assert group.reason == "a and b run one kernel but have their own /dev/shm (devices 0x21 and 0x99)"


def test_a_nonce_that_was_not_seen_is_no_proof() -> None:  # equal device numbers in two mount namespaces
    facts = {name: host(name, 1) for name in ("a", "b")}
    group = groups(PAIR, facts)["pp0"]
    assert group.backend == "gloo"
    assert group.reason == "a and b could not read each other's nonce in /dev/shm"


def test_a_nonce_seen_one_way_is_no_proof() -> None:
    facts = {"a": host("a", 1, shm_seen=("a", "b")), "b": host("b", 1, shm_seen=("b",))}
    assert groups(PAIR, facts)["pp0"].backend == "gloo"


def test_containers_with_different_hostnames_and_one_memory() -> None:  # --ipc=host
    facts = one_machine("a", "b")
    facts["b"] = replace(facts["b"], hostname="other")
    assert groups(PAIR, facts)["pp0"].backend == "shm"


def test_unwritable_shm_makes_gloo_even_on_one_host() -> None:
    spec = cluster({"name": "a", "slots": 2}, pipeline=2)
    facts = {"a": host("a", shm=ShmFacts(device=1, size=0, free=0, writable=False))}
    assert groups(spec, facts)["pp0"].reason == "/dev/shm of a is not writable"


def test_pipeline_four_on_two_hosts_of_two_slots_is_mixed() -> None:  # vllm #29447
    spec = cluster({"name": "a", "slots": 2}, {"name": "b", "slots": 2}, pipeline=4)
    group = groups(spec, machines("a", "b"))["pp0"]
    assert group.backend == "mixed"
    by_pair = transports(group)
    assert {pair for pair, transport in by_pair.items() if transport == "shm"} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert len(by_pair) == 12
    assert group.reason == "4 of 12 links share memory; the others: a and b are two machines (boot ids differ)"


def test_the_fallback_communicator_has_one_backend_a_group() -> None:
    spec = cluster(
        {"name": "a", "slots": 2}, {"name": "b", "slots": 2}, pipeline=4, engine={"communicator": "fallback"}
    )
    group = groups(spec, machines("a", "b"))["pp0"]
    assert group.backend == "gloo"
    assert set(transports(group).values()) == {"gloo"}


def test_tensor_four_over_two_hosts_warns_with_the_cost() -> None:  # vllm #27239
    spec = cluster({"name": "a", "slots": 2}, {"name": "b", "slots": 2}, tensor=4)
    plan = make_plan(spec, machines("a", "b"))
    assert plan.groups[0].backend == "mixed"
    (warning,) = [text for text in plan.warnings if "tp0" in text]
    assert warning == (
        "group tp0 spans a, b: two all-reduces a layer cross the network for every token; "
        "tensor inside hosts and pipeline across is faster"
    )


def test_nine_ranks_of_one_machine_share_memory() -> None:
    """vLLM's own SHM manager holds eight; the links of cpupp have no such limit."""
    spec = cluster({"name": "a", "slots": 9}, pipeline=9)
    assert groups(spec, machines("a"))["pp0"].backend == "shm"


def test_another_architecture_takes_the_whole_group_to_gloo() -> None:
    spec = cluster({"name": "a", "slots": 2}, {"name": "b", "slots": 2}, pipeline=4)
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], arch="aarch64")
    group = groups(spec, facts)["pp0"]
    assert group.backend == "gloo"
    assert group.links[0].reason == "host b is aarch64, shared-memory links need x86_64"


def test_gloo_can_be_forced() -> None:
    spec = cluster({"name": "a", "slots": 2}, pipeline=2, network={"backend": "gloo"})
    assert groups(spec, machines("a"))["pp0"].reason == "network.backend is gloo"


def test_shm_can_be_demanded_and_is_refused_where_it_cannot_be() -> None:
    spec = cluster("a", "b", pipeline=2, network={"backend": "shm"})
    assert make_plan(spec, one_machine("a", "b")).groups[0].backend == "shm"
    with pytest.raises(CpuppError, match=r"network\.backend is shm, but group pp0 cannot: a and b are two machines"):
        make_plan(spec, machines("a", "b"))


def test_without_facts_the_way_in_decides_and_the_reason_says_assumed() -> None:
    here = cluster({"name": "a", "local": True}, {"name": "b", "local": True}, pipeline=2)
    assert groups(here, {})["pp0"].reason == "a and b are both this machine (assumed one machine)"
    assert groups(PAIR, {})["pp0"].reason == "a and b assumed to be two machines"
    same = cluster({"name": "a", "ssh": "me@x"}, {"name": "b", "ssh": "me@x"}, pipeline=2)
    assert groups(same, {})["pp0"].backend == "shm"


def test_memory_domains_keep_the_files_order() -> None:
    spec = cluster("a", "b", "c", pipeline=3)
    facts = {**one_machine("a", "c"), "b": host("b", 2)}
    assert memory_domains(spec, ("a", "b", "c"), facts) == (("a", "c"), ("b",))


def test_both_directions_of_a_pair_have_one_reason() -> None:
    for facts in ({}, machines("a", "b")):
        assert len({link.reason for link in groups(PAIR, facts)["pp0"].links}) == 1
