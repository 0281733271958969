"""What stock vLLM would do with a group, by version, names and memory; and how the groups read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpupp.plan import link_costs
from cpupp.plan.backend import plan_groups
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import make_grid
from cpupp.plan.group_detail import GroupDetail, group_details
from cpupp.plan.stock_choice import StockChoice
from cpupp.render import Page
from cpupp.render_groups import add_groups, groups_data
from tests.unit.factory import cluster, engine, host, machines, one_machine

ROOT = Path(__file__).parents[2]
PORT = {"env": {"VLLM_PORT": "5000"}}


def details(spec: ClusterSpec, facts: dict[str, HostFacts]) -> tuple[GroupDetail, ...]:
    """The groups in detail."""
    return group_details(spec, make_grid(spec), facts)


def here(spec: ClusterSpec, facts: dict[str, HostFacts]) -> StockChoice:
    """What the installed vLLM would do with the first group."""
    choice = details(spec, facts)[0].stock[0]
    assert choice.here
    return choice


def of(version: str, **facts: HostFacts) -> dict[str, HostFacts]:
    """Two machines with this vLLM."""
    return {**machines("a", "b", engine=engine(vllm=version)), **facts}


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("0.32.0", ["vllm_dist_<uuid-of-node-0>-pp:0-[0-1]-cpushm", "vllm_dist_<uuid-of-node-1>-pp:0-[0-1]-cpushm"]),
        ("0.27.1", ["<port-of-node-0>-pp:0-[0-1]-cpushm", "<port-of-node-1>-pp:0-[0-1]-cpushm"]),
    ],
)
def test_names_over_two_machines_differ(version: str, names: list[str]) -> None:
    choice = here(cluster("a", "b", pipeline=2), of(version))
    assert [name.name for name in choice.names] == names
    assert (choice.agree, choice.backend, choice.outcome) == (False, "gloo", "right")


def test_one_port_everywhere_makes_old_names_agree_over_two_machines() -> None:
    spec = cluster("a", "b", tensor=2, engine=PORT)
    choice = here(spec, of("0.27.1"))
    assert [name.name for name in choice.names] == ["5000-tp:0-[0-1]-cpushm"] * 2
    assert (choice.backend, choice.outcome) == ("shm", "fails")
    assert "vllm #33628" in choice.sources
    assert here(spec, of("0.32.0")).outcome == "right"


def test_a_port_of_the_hosts_own_environment_counts_and_two_ports_do_not_agree() -> None:
    spec = cluster("a", "b", tensor=2)
    own = [host(n, i, environment={"VLLM_PORT": p}, engine=engine(vllm="0.20.0")) for n, i, p in (("a", 1, "7"),)]
    same = {"a": own[0], "b": host("b", 2, environment={"VLLM_PORT": "7"}, engine=engine(vllm="0.20.0"))}
    other = {"a": own[0], "b": host("b", 2, environment={"VLLM_PORT": "8"}, engine=engine(vllm="0.20.0"))}
    assert here(spec, same).outcome == "fails"
    assert here(spec, other).outcome == "right"


def test_an_old_pipeline_over_gloo_fails_at_the_first_request() -> None:
    choice = here(cluster("a", "b", pipeline=2), of("0.19.1"))
    assert (choice.outcome, choice.sources) == ("fails", ("vllm #37933", "vllm #40150"))
    assert here(cluster("a", "b", tensor=2), of("0.19.1")).outcome == "right"


def test_one_remote_rank_takes_all_to_gloo() -> None:
    spec = cluster({"name": "a", "slots": 2}, {"name": "b", "slots": 1}, pipeline=3)
    choice = here(spec, machines("a", "b"))
    assert (choice.outcome, choice.why) == ("slow", "one remote rank takes the whole group to gloo")


def test_two_nodes_of_one_machine_do_not_meet() -> None:
    spec = cluster({"name": "a", "local": True}, {"name": "b", "local": True}, pipeline=2)
    detail = details(spec, one_machine("a", "b"))[0]
    assert detail.memories == (("a", "b"),)
    assert detail.stock[0].outcome == "slow"
    assert "30 to 33" in detail.cost


def test_one_node_shares_memory_up_to_eight_ranks() -> None:
    assert here(cluster({"name": "a", "slots": 8}, tensor=8), machines("a")).outcome == "right"
    assert here(cluster({"name": "a", "slots": 9}, tensor=9), machines("a")).outcome == "fails"


def test_a_build_without_operations_waits_for_nobody_when_all_lack_them_and_hangs_when_one_does() -> None:
    spec = cluster("a", "b", tensor=2)
    none = {name: host(name, number, isa=("avx2",)) for number, name in enumerate(("a", "b"), 1)}
    assert here(spec, none).outcome == "right"
    assert here(spec, {**machines("a"), "b": none["b"]}).outcome == "hangs"
    alone = here(cluster({"name": "a", "slots": 2}, tensor=2), {"a": host("a", isa=("avx2",))})
    assert (alone.agree, alone.backend, alone.outcome) == (True, "gloo", "slow")


def test_the_trap_is_told_of_versions_that_have_it() -> None:
    stock = details(cluster("a", "b", pipeline=2), of("0.32.0"))[0].stock
    assert [(choice.versions, bool(choice.trap)) for choice in stock] == [
        ("0.28 to 0.32", False),
        ("0.20 to 0.27", True),
        ("0.18 to 0.19", True),
    ]


def test_without_facts_nothing_is_proved() -> None:
    (proof,) = details(cluster("a", "b", pipeline=2), {})[0].proofs
    assert (proof.boot_id, proof.device, proof.nonce, proof.shared) == (None, None, None, False)


def test_one_kernel_with_two_shm_is_not_one_memory() -> None:
    facts = {"a": host("a", 1), "b": host("b", 2, boot_id="boot-1")}
    (proof,) = details(cluster("a", "b", pipeline=2), facts)[0].proofs
    assert (proof.boot_id, proof.device, proof.nonce, proof.shared) == (True, False, False, False)


def test_groups_that_are_alike_are_told_once() -> None:
    spec = cluster(*({"name": f"h{n}", "slots": 2} for n in range(16)), pipeline=16, tensor=2)
    facts = machines(*(f"h{n}" for n in range(16)))
    page = Page(80)
    groups = plan_groups(spec, make_grid(spec), facts)
    add_groups(page, groups, details(spec, facts))
    text = page.text()
    assert "tp0  ranks 0, 1  backend shm  (so are 15 more groups: tp1 to tp15)" in text
    assert "pp0  ranks 0 to 30 in steps of 2  backend gloo  (so is pp1)" in text
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 40
    data = groups_data(groups, details(spec, facts))
    assert len(data) == 18
    assert data[16]["memory"]["shared_by"] == [[f"h{n}"] for n in range(16)]
    assert data[16]["stock"][0]["outcome"] == "right"


def test_costs_are_those_of_the_benchmarks() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    for words in (
        f"{link_costs.HOP_SHM} us",
        f"{link_costs.HOP_SHM_STOCK} us",
        f"| 16 KiB | {link_costs.HOP_GLOO} | {link_costs.HOP_GLOO_STOCK} (x",
        f"| 8 KiB | {link_costs.REDUCE_GLOO} | {link_costs.REDUCE_GLOO_STOCK} (x",
    ):
        assert words in text, words
