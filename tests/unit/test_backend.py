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


def test_another_architecture_that_shares_memory_with_nobody_hinders_nobody() -> None:
    """As the ranks decide: the x86-64 ranks of host a share memory, the one on b has nobody to share with."""
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], arch="aarch64")
    (group,) = groups(cluster({"name": "a", "slots": 2}, "b", pipeline=3), facts).values()
    assert [(k.src, k.dst) for k in group.links if k.transport == "shm"] == [(0, 1), (1, 0)]
    assert group.backend == "mixed"


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


MIB = 1 << 20
TWO_SLOTS = {"name": "a", "slots": 2}


def shm(free: int, size: int = 64) -> ShmFacts:
    """A /dev/shm of these MiB."""
    return ShmFacts(device=0x21, size=size * MIB, free=free * MIB, writable=True)


@pytest.mark.parametrize(("free", "backend"), [(32, "shm"), (31, "gloo")])
def test_links_need_room_in_dev_shm_beside_the_queues_of_vllm(free: int, backend: str) -> None:
    """Two rings of 8 MiB, and 16 MiB that stay free."""
    spec = cluster(TWO_SLOTS, pipeline=2)
    plan = make_plan(spec, {"a": host("a", shm=shm(free))})
    assert plan.groups[0].backend == backend
    assert bool(plan.hosts[0].no_shm) == (backend == "gloo")


def test_no_room_takes_the_group_to_gloo_and_the_plan_says_so() -> None:
    plan = make_plan(cluster(TWO_SLOTS, pipeline=2), {"a": host("a", shm=shm(8))})
    reason = "/dev/shm of a has 8 MiB free, its links need 16 MiB, vLLM's queues 16 MiB"
    assert plan.groups[0].reason == plan.hosts[0].no_shm == reason
    assert [text for text in plan.warnings if "/dev/shm" in text] == [
        f"{reason}: its groups are gloo, which is slower; sudo mount -o remount,size=1g /dev/shm "
        "(until the next reboot; in docker: --shm-size=1g); look for leftovers first"
    ]


def test_room_for_links_but_perhaps_not_for_the_queues_is_a_warning() -> None:
    plan = make_plan(cluster(TWO_SLOTS, pipeline=2), {"a": host("a", shm=shm(60))})
    assert plan.groups[0].backend == "shm"
    assert [text for text in plan.warnings if "/dev/shm" in text] == [
        "/dev/shm of a has 60 MiB free, links and vLLM's queues may need 80 MiB: ranks die of SIGBUS when it is full; "
        "sudo mount -o remount,size=1g /dev/shm (until the next reboot; in docker: --shm-size=1g); "
        "look for leftovers first"
    ]


def test_the_rings_and_boards_of_all_groups_count() -> None:
    """Two TP groups of two boards each, two PP groups of two rings each: 4 x 4 + 4 x 8 MiB."""
    spec = cluster({"name": "a", "slots": 4}, pipeline=2, tensor=2)
    plan = make_plan(spec, {"a": host("a", shm=shm(63))})
    assert {group.backend for group in plan.groups} == {"gloo"}
    assert "its links need 48 MiB" in plan.hosts[0].no_shm
    assert {g.backend for g in make_plan(spec, {"a": host("a", shm=shm(64))}).groups} == {"shm"}


def test_rings_to_others_than_the_next_stage_are_small() -> None:
    """Of three stages, each of the three ranks has 8 MiB to the next and 1 MiB to the one before: 27 MiB."""
    spec = cluster({"name": "a", "slots": 3}, pipeline=3)
    assert "its links need 27 MiB" in make_plan(spec, {"a": host("a", shm=shm(8))}).hosts[0].no_shm


def test_entries_that_are_one_machine_share_the_room() -> None:
    spec = cluster({"name": "a", "slots": 2}, {"name": "b", "slots": 2}, pipeline=2, tensor=2)
    for free, backend in ((63, "gloo"), (64, "shm")):
        plan = make_plan(spec, one_machine("a", "b", shm=shm(free)))
        assert {group.backend for group in plan.groups} == {backend}
    plan = make_plan(spec, one_machine("a", "b", shm=shm(63)))
    reason = "/dev/shm of a and b has 63 MiB free, its links need 48 MiB, vLLM's queues 16 MiB"
    assert [entry.no_shm for entry in plan.hosts] == [reason] * 2
    assert sum(reason in text for text in plan.warnings) == 1
    apart = machines("a", "b")
    apart = {name: replace(fact, shm=replace(fact.shm, free=63 * MIB)) for name, fact in apart.items()}
    assert [group.backend for group in make_plan(spec, apart).groups] == ["shm", "shm", "gloo", "gloo"]


def test_no_room_on_one_host_spares_groups_that_share_nothing_there() -> None:
    spec = cluster({"name": "a", "slots": 2}, {"name": "b", "slots": 2}, pipeline=2, tensor=2)
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], shm=replace(facts["b"].shm, free=MIB))
    plan = make_plan(spec, facts)
    assert {group.name: group.backend for group in plan.groups} == {
        "tp0": "shm",
        "tp1": "gloo",
        "pp0": "gloo",
        "pp1": "gloo",
    }
    assert [bool(entry.no_shm) for entry in plan.hosts] == [False, True]


def test_no_room_on_one_host_takes_a_group_over_both_to_gloo() -> None:
    spec = cluster({"name": "a", "slots": 2}, {"name": "b", "slots": 2}, pipeline=4)
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], shm=replace(facts["b"].shm, free=MIB))
    group = groups(spec, facts)["pp0"]
    assert group.backend == "gloo"
    assert {link.reason for link in group.links} == {
        "a and b are two machines (boot ids differ)",
        "/dev/shm of b has 1 MiB free, its links need 9 MiB, vLLM's queues 16 MiB",
    }


def test_a_rank_that_shares_with_nobody_needs_no_room() -> None:
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], shm=replace(facts["b"].shm, free=MIB))
    spec = cluster(TWO_SLOTS, "b", pipeline=3)
    assert groups(spec, facts)["pp0"].backend == "mixed"
    assert make_plan(spec, facts).hosts[1].no_shm == ""


def test_shm_is_refused_where_there_is_no_room() -> None:
    spec = cluster(TWO_SLOTS, pipeline=2, network={"backend": "shm"})
    with pytest.raises(CpuppError, match="group pp0 cannot: /dev/shm of a has 8 MiB free") as caught:
        make_plan(spec, {"a": host("a", shm=shm(8))})
    assert caught.value.hint.startswith("use `backend: auto`, or sudo mount -o remount,size=1g /dev/shm")


def test_a_dev_shm_without_a_limit_has_room() -> None:
    plan = make_plan(cluster(TWO_SLOTS, pipeline=2), {"a": host("a", shm=shm(0, size=0))})
    assert plan.groups[0].backend == "shm"
    assert not [text for text in plan.warnings if "/dev/shm" in text]


def test_stock_vllm_decides_by_itself_so_the_plan_only_warns() -> None:
    spec = cluster(TWO_SLOTS, tensor=2, engine={"communicator": "stock"})
    plan = make_plan(spec, {"a": host("a", shm=shm(8))})
    assert (plan.groups[0].backend, plan.hosts[0].no_shm) == ("shm", "")
    assert any("/dev/shm of a has 8 MiB free" in text for text in plan.warnings)


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
