"""Where linear layers hold their weights a second time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpupp.plan.model import model_facts
from cpupp.plan.plan import Plan, make_plan
from cpupp.plan.tiles import NEEDED_ISA
from cpupp.plan.weights import rank_weights
from cpupp.render_plan import plan_data, plan_page
from tests.unit.factory import (
    GIB,
    LLAMA_TINY,
    SMOLLM2,
    cluster,
    cpus,
    host,
    machines,
    model_folder,
    numa_node,
    one_machine,
)

AMX = tuple(sorted({"avx2", "avx512f", *NEEDED_ISA}))


def tiles(plan: Plan) -> list[int]:
    """Bytes on each rank."""
    return [rank.tiles for rank in plan.ranks]


def planned(facts: dict[str, Any], **engine: Any) -> Plan:
    """A pipeline over the hosts of the facts."""
    return make_plan(cluster(*facts, pipeline=len(facts), engine=engine), facts)


def test_layers_and_head_are_held_twice_on_amx() -> None:
    folder = model_folder(SMOLLM2)
    plan = planned(machines("a", "b", isa=AMX, model=folder))
    sizes = rank_weights(cluster("a", "b", pipeline=2), model_facts(folder), 1)
    assert sizes is not None
    of_layers = [sum(sizes.layers[slice(*rank.layers)]) for rank in plan.ranks if rank.layers]
    assert tiles(plan) == [of_layers[0], of_layers[1] + sizes.head]
    assert "held a second time" in plan_page(plan, ()).text()
    assert [rank["tiles_bytes"] for rank in plan_data(plan, ())["ranks"]] == tiles(plan)


@pytest.mark.parametrize(
    ("isa", "config", "engine"),
    [
        (("avx2", "avx512f", "avx512_bf16"), {}, {}),
        (AMX, {"dtype": "float16"}, {}),
        (AMX, {}, {"args": {"dtype": "float32"}}),
        (AMX, {}, {"args": {"dtype": "half"}}),
        (AMX, {}, {"tiled_weights": "off"}),
        (AMX, {}, {"tiled_weights": False}),  # YAML's bare off
        (AMX, {}, {"communicator": "stock"}),
    ],
)
def test_elsewhere_once(isa: tuple[str, ...], config: dict[str, Any], engine: dict[str, Any]) -> None:
    plan = planned(machines("a", "b", isa=isa, model=model_folder({**LLAMA_TINY, **config})), **engine)
    assert tiles(plan) == [0, 0]
    assert "second time" not in plan_page(plan, ()).text()


def test_each_host_by_its_own_cpu_and_memory() -> None:
    folder = model_folder(layer=GIB)
    facts = {
        "a": host("a", 1, isa=AMX, model=folder),
        "b": host("b", 2, isa=AMX, model=folder, memory_total=8 * GIB),
        "c": host("c", 3, model=folder),
    }
    plan = make_plan(cluster(*facts, pipeline=3, layers=[2, 3, 3]), facts)
    assert tiles(plan) == [2 * GIB, 0, 0]
    assert "held a second time on a: at most 2 GiB a rank" in plan_page(plan, ()).text()


def test_memory_that_others_use_is_not_filled_with_copies() -> None:
    folder = model_folder(layer=GIB)
    busy = machines("a", "b", isa=AMX, model=folder)
    busy["b"] = host("b", 2, isa=AMX, model=folder, memory_available=10 * GIB)
    assert [size > 0 for size in tiles(planned(busy))] == [True, False]


def test_a_vllm_node_tiles_all_its_ranks_or_none() -> None:
    folder = model_folder(layer=GIB)
    facts = {"a": host("a", 1, isa=AMX, model=folder, numa=(numa_node(0, 12), numa_node(1, 128)), cpus=cpus(4, numa=2))}

    def of(first: int) -> list[bool]:
        facts["a"] = replace(facts["a"], numa=(numa_node(0, first), numa_node(1, 128)))
        return [size > 0 for size in tiles(make_plan(cluster({"name": "a", "slots": 2}, tensor=2), facts))]

    assert of(128) == [True, True]
    assert of(8) == [False, False]


def test_hosts_of_one_machine_share_its_room() -> None:
    folder = model_folder(layer=GIB)

    def of(memory: int) -> list[bool]:
        facts = one_machine("a", "b", isa=AMX, model=folder, memory_total=memory * GIB)
        return [size > 0 for size in tiles(planned(facts))]

    assert of(256) == [True, True]
    assert of(20) == [False, False]
