"""Layers by memory and speed, room for sequences, what is said when a model does not fit, and `parallel: auto`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpupp.errors import CpuppError
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.command import make_commands
from cpupp.plan.facts import BandwidthFacts, CpuFacts, HostFacts
from cpupp.plan.plan import Plan, make_plan
from cpupp.plan.speed import RankSpeed, levelled
from cpupp.render_plan import conclusions, plan_data
from tests.unit import published
from tests.unit.factory import GIB, LLAMA_TINY, SMOLLM2, cluster, cpus, host, machines, model_folder, one_machine

LLAMA_70B = published.llama(published.LLAMA_70B)
GB = 10**9


def bandwidth(found: tuple[CpuFacts, ...], per_node: int, share: float = 1.0) -> tuple[BandwidthFacts, ...]:
    """Every NUMA node measured with all its cores."""
    return tuple(
        BandwidthFacts(
            numa=node,
            cpus=tuple(cpu.cpu for cpu in found if cpu.numa == node),
            bytes_per_s=per_node,
            cpu_share=share,
        )
        for node in sorted({cpu.numa for cpu in found})
    )


def server(name: str, number: int, *, memory: int, speed: int, **changes: Any) -> HostFacts:
    """A machine of 16 cores that holds Llama-3.1-70B's folder."""
    found = changes.pop("cpus", cpus(16))
    measured = bandwidth(found, speed * GB)
    return host(name, number, memory_total=memory * GIB, cpus=found, bandwidth=measured, model=LLAMA_70B, **changes)


def servers(*shapes: tuple[int, int]) -> dict[str, HostFacts]:
    """Hosts n0, n1, ...: (GiB of memory, GB/s)."""
    return {f"n{i}": server(f"n{i}", i + 1, memory=m, speed=s) for i, (m, s) in enumerate(shapes)}


def spec_of(facts: dict[str, HostFacts], **sections: Any) -> ClusterSpec:
    """A pipeline over these hosts, 8192 tokens."""
    args = {"max_model_len": 8192, "max_num_batched_tokens": 2048, **sections.pop("args", {})}
    parallel = {"pipeline": len(facts), **sections}
    return cluster(*facts, engine={"args": args}, **parallel)


def sizes(plan: Plan) -> list[int]:
    """Number of layers of each stage."""
    found = {rank.stage: rank.layers for rank in plan.ranks}
    return [layers[1] - layers[0] for layers in found.values() if layers is not None]


def test_equal_hosts_keep_vllms_split_where_no_other_is_much_faster() -> None:
    facts = servers(*[(96, 100)] * 4)
    plan = make_plan(spec_of(facts), facts)
    assert sizes(plan) == [20, 20, 20, 20]  # the head is 1.2 layers: 20, 20, 21, 19 would be 1 % faster
    assert plan.layers_reason.startswith("vLLM's even split")


def test_equal_hosts_leave_room_for_a_large_head_on_the_last_one() -> None:
    model = model_folder(SMOLLM2, layer=7_080_192)  # whose head is as large as 8 layers
    facts = machines("a", "b", bandwidth=bandwidth(cpus(4), 20 * GB), model=model)
    assert sizes(make_plan(cluster("a", "b", pipeline=2), facts)) == [17, 13]


def test_layers_follow_memory_bandwidth() -> None:
    facts = servers((256, 100), (256, 50), (256, 100))
    plan = make_plan(spec_of(facts), facts)
    times = [rank.time_ns or 0 for rank in plan.ranks]
    assert sizes(plan)[1] == pytest.approx(sizes(plan)[0] / 2, abs=1)
    assert max(times) / min(times) < 1.1
    even = make_plan(spec_of(facts, layers=[26, 27, 27]), facts)
    assert max(times) < 0.62 * max(rank.time_ns or 0 for rank in even.ranks)


def test_layers_follow_memory_where_hosts_have_unequal_ram() -> None:  # vllm #6824, #21061
    facts = servers((96, 100), (24, 100), (96, 100))
    plan = make_plan(spec_of(facts), facts)
    weights, kv = plan.ranks[1].weights or 0, plan.ranks[1].kv
    layer = 1_711_308_800
    assert weights + kv + 2 * GIB < 24 * GIB < weights + layer + kv + 2 * GIB
    assert sum(sizes(plan)) == 80
    (command, *_) = make_commands(plan)
    assert command.env["VLLM_PP_LAYER_PARTITION"] == ",".join(map(str, sizes(plan)))


def test_the_plan_says_which_stage_sets_the_number_of_blocks() -> None:  # vllm #21061
    facts = servers((96, 100), (96, 100), (96, 100))
    spec = cluster(
        "n0",
        {"name": "n1", "engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": "2"}}},
        "n2",
        pipeline=3,
        engine={"args": {"max_model_len": 8192}},
    )
    plan = make_plan(spec, facts)
    assert plan.kv.limit == 1
    per_token = (sizes(plan)[1]) * 4096
    assert plan.kv.tokens == 2 * GIB // (per_token * 128) * 128
    assert plan.kv.sequences == plan.kv.tokens // 8192
    assert "as many as stage 1 holds" in conclusions(plan)[0]
    assert all(rank.kv_used <= 2 * GIB * sizes(plan)[rank.stage] / sizes(plan)[1] + 1 for rank in plan.ranks)


def test_a_numa_node_bounds_a_rank_as_a_host_does() -> None:  # vllm #15800
    wide = {f"n{i}": server(f"n{i}", i + 1, memory=100, speed=60, cpus=cpus(16, numa=2)) for i in range(2)}
    spec = cluster(
        *({"name": name, "slots": 2} for name in wide),
        pipeline=4,
        engine={"args": {"max_model_len": 4096, "max_num_batched_tokens": 2048}},
    )
    plan = make_plan(spec, wide)
    for rank in plan.ranks:
        assert (rank.weights or 0) + rank.kv + GIB < 50 * GIB
    small = {
        name: replace(fact, numa=(replace(fact.numa[0], memory_total=30 * GIB), fact.numa[1]))
        for name, fact in wide.items()
    }
    moved = make_plan(spec, small)
    assert all((moved.ranks[rank].weights or 0) + moved.ranks[rank].kv < 30 * GIB for rank in (0, 2))
    assert sizes(moved)[1] > sizes(plan)[1]


def test_two_entries_of_one_machine_share_its_memory_in_the_split() -> None:
    both = one_machine("n0", "n1", memory_total=80 * GIB, cpus=cpus(8), model=LLAMA_70B)
    facts = {**both, "n2": server("n2", 9, memory=160, speed=100)}
    plan = make_plan(spec_of(facts), facts)
    here = sum((rank.weights or 0) + rank.kv for rank in plan.ranks[:2])
    assert here < 77 * GIB
    assert sizes(plan)[2] > 30


@pytest.mark.parametrize("rate", [95, 87])
def test_noise_between_equal_hosts_moves_no_layer(rate: int) -> None:
    same = servers(*[(96, 100)] * 4)
    noisy = servers((96, 100), (96, rate), (96, 97), (96, 99))
    assert sizes(make_plan(spec_of(same), same)) == sizes(make_plan(spec_of(noisy), noisy))


def test_speeds_are_levelled() -> None:
    speeds = {i: RankSpeed(bytes_per_s=rate * GB, share=1.0) for i, rate in enumerate((100, 86, 84, 50, 12))}
    level = levelled(speeds, 2)
    found = [s.bytes_per_s / level[0].bytes_per_s for s in level.values()]
    assert found == pytest.approx([1.0, 1.0, 0.8, 0.5, 0.125], abs=0.001)


def test_ranks_on_the_same_cpu_model_are_equally_fast_unless_far_apart() -> None:
    def rates(*wanted: tuple[int, str]) -> list[int]:
        speeds = {i: RankSpeed(bytes_per_s=rate * GB, share=1.0, kind=kind) for i, (rate, kind) in enumerate(wanted)}
        return [speed.bytes_per_s for speed in levelled(speeds, 2).values()]

    assert len(set(rates((110, "epyc"), (75, "epyc"), (87, "epyc")))) == 1
    assert len(set(rates((110, ""), (75, "")))) == 2
    assert len(set(rates((110, "epyc"), (75, "xeon")))) == 2
    full, half = rates((100, "epyc"), (50, "epyc"))
    assert half == pytest.approx(full / 2, rel=0.01)


def test_noise_of_a_virtual_machine_moves_no_layer() -> None:
    def split(rate: int, model: str) -> list[int]:
        facts = servers(*[(96, 110)] * 3, (96, rate))
        facts = {name: replace(fact, cpu_model=model) for name, fact in facts.items()}
        return sizes(make_plan(spec_of(facts), facts))

    assert split(75, "epyc") == split(110, "epyc")
    assert split(75, "") != split(110, "")
    assert split(50, "epyc") != split(110, "epyc")


def test_a_quota_of_half_a_core_makes_a_stage_half_as_fast() -> None:
    full = host("a", 1, cpus=cpus(1), bandwidth=bandwidth(cpus(1), 10 * GB))
    half = host("b", 2, cpus=cpus(1), cpu_quota=0.5, bandwidth=bandwidth(cpus(1), 5 * GB, 0.5))
    plan = make_plan(cluster("a", "b", pipeline=2, layers=[4, 4]), {"a": full, "b": half})
    head = 32000 * 512 * 2 + 1024
    layer = 6 << 20
    assert plan.ranks[1].time_ns == pytest.approx(2 * (4 * layer / 10 + head / 10 + 4 * 500_000), rel=0.01)


def test_a_busy_moment_does_not_count_as_a_slow_host() -> None:
    quiet = host("a", 1, bandwidth=bandwidth(cpus(4), 40 * GB))
    busy = host("b", 2, bandwidth=bandwidth(cpus(4), 20 * GB, 0.5))
    plan = make_plan(cluster("a", "b", pipeline=2, layers=[4, 4]), {"a": quiet, "b": busy})
    free = host("b", 2, bandwidth=bandwidth(cpus(4), 40 * GB))
    other = make_plan(cluster("a", "b", pipeline=2, layers=[4, 4]), {"a": quiet, "b": free})
    assert plan.ranks[1].time_ns == other.ranks[1].time_ns


def test_the_prediction_adds_stages_and_links() -> None:
    facts = servers(*[(96, 100)] * 2)
    plan = make_plan(spec_of(facts), facts)
    made = plan.prediction
    assert made is not None
    assert made.hops == (70_000,)
    assert made.token_ns == sum(made.stages) + 70_000
    read = 69.5e9 * 2
    assert made.tokens_per_s == pytest.approx(1 / (read / 100e9 + 80 * 0.0005), rel=0.01)
    data = plan_data(plan, ())
    assert data["prediction"]["slowest_stage"] == made.slowest
    assert data["ranks"][0]["time_ms"] == round(made.stages[0] / 1e6, 3)


def test_without_a_measurement_there_is_a_split_but_no_prediction() -> None:
    facts = {name: replace(fact, bandwidth=()) for name, fact in servers(*[(96, 100)] * 4).items()}
    plan = make_plan(spec_of(facts), facts)
    assert sizes(plan) == [20, 20, 20, 20]
    assert plan.prediction is None
    assert "as if all ranks were equally fast" in plan.layers_reason


def refusal(spec: ClusterSpec, facts: dict[str, HostFacts]) -> CpuppError:
    """The first error of a plan that does not fit."""
    with pytest.raises(CpuppError) as caught:
        make_plan(spec, facts)
    first: CpuppError = getattr(caught.value, "errors", [caught.value])[0]
    return first


def test_what_does_not_fit_says_by_how_much() -> None:
    facts = servers((64, 100), (64, 100))
    error = refusal(spec_of(facts), facts)
    assert error.code == "PLAN-MEMORY"
    assert str(error).startswith("host n0: memory(64.0 GiB) < weights(")
    assert str(error).endswith(" GiB short")


def test_the_number_of_tokens_that_would_fit_is_the_largest() -> None:
    facts = servers((80, 100), (80, 100))
    hint = refusal(spec_of(facts, args={"max_model_len": 131072}), facts).hint
    tokens = int(hint.partition("max_model_len ")[2].split()[0])
    make_plan(spec_of(facts, args={"max_model_len": tokens}), facts)
    refusal(spec_of(facts, args={"max_model_len": tokens + 128}), facts)


def test_the_number_of_hosts_that_would_fit_is_the_smallest() -> None:
    facts = servers((32, 100), (32, 100))
    hint = refusal(spec_of(facts), facts).hint
    assert "more hosts like n1 (pipeline: " in hint
    num = int(hint.partition("pipeline: ")[2].partition(")")[0])
    enough, short = servers(*[(32, 100)] * num), servers(*[(32, 100)] * (num - 1))
    make_plan(spec_of(enough), enough)
    refusal(spec_of(short), short)


def test_hosts_that_share_a_machine_are_not_told_to_be_more() -> None:
    facts = servers((32, 100), (32, 100))
    facts["n1"] = replace(facts["n1"], boot_id=facts["n0"].boot_id)
    hint = refusal(spec_of(facts), facts).hint
    assert "like n1" not in hint


def test_no_more_tokens_are_advised_than_the_model_takes() -> None:
    facts = servers((90, 100), (90, 100))
    hint = refusal(spec_of(facts, args={"max_model_len": 1 << 22}), facts).hint
    assert int(hint.partition("max_model_len ")[2].split()[0]) <= 131072


def test_fast_memory_is_not_rounded_away() -> None:
    facts = servers((900, 400), (900, 400), (900, 310), (900, 310))
    first, *_, last = sizes(make_plan(spec_of(facts), facts))
    assert first > last


def test_smaller_weights_are_named_where_they_would_do() -> None:
    facts = servers((64, 100), (64, 100))
    assert "8 bits a weight" in refusal(spec_of(facts), facts).hint
    facts = servers((32, 100), (32, 100))
    assert "4 bits a weight" in refusal(spec_of(facts), facts).hint


def test_the_largest_context_is_what_the_memory_would_hold() -> None:
    facts = servers((80, 100), (80, 100))
    plan = make_plan(spec_of(facts), facts)
    most = plan.kv.largest_context
    assert most is not None
    assert 8192 < most < 131072
    layers = sizes(plan)
    make_plan(spec_of(facts, layers=layers, args={"max_model_len": most}), facts)
    refusal(spec_of(facts, layers=layers, args={"max_model_len": most + 128}), facts)


def test_the_default_kv_cache_shrinks_before_a_plan_is_refused() -> None:
    roomy, tight = machines("a"), machines("a", memory_total=5 * GIB)
    assert make_plan(cluster("a"), roomy).ranks[0].kv == GIB
    config = {**LLAMA_TINY, "max_position_embeddings": 32768}
    wide = make_plan(cluster("a"), machines("a", model=model_folder(config)))
    assert wide.ranks[0].kv == 4 * GIB
    tight = machines("a", memory_total=5 * GIB, model=model_folder(config))
    assert GIB <= make_plan(cluster("a"), tight).ranks[0].kv < 4 * GIB


def auto(*hosts: dict[str, Any]) -> ClusterSpec:
    """A file with `parallel: auto`."""
    return ClusterSpec.model_validate(
        {"name": "t", "model": {"path": "m"}, "parallel": "auto", "hosts": [{"ssh": h["name"], **h} for h in hosts]}
    )


def chosen(plan: Plan) -> tuple[int, int]:
    """Pipeline and tensor."""
    return plan.pipeline, plan.tensor


def test_auto_puts_tensor_inside_hosts_and_pipeline_across() -> None:
    plan = make_plan(auto({"name": "a", "slots": 2}, {"name": "b", "slots": 2}), machines("a", "b", cpus=cpus(8)))
    assert chosen(plan) == (2, 2)
    assert plan.parallel_reason == "tensor 2 inside hosts, pipeline across"
    assert all(len({plan.ranks[r].host for r in g.ranks}) == 1 for g in plan.groups if g.kind == "tp")


@pytest.mark.parametrize(
    ("slots", "heads", "sizes", "reason"),
    [
        ((1, 1), 8, (2, 1), "no tensor split: one rank a host"),
        ((2, 3), 8, (5, 1), "no tensor split: slots(2, 3) have no common divisor"),
        ((2, 4), 8, (3, 2), "tensor 2 inside hosts, pipeline across"),
        ((2, 2), 9, (4, 1), "no tensor split: 9 heads (3 KV) cannot be split over 2 ranks of a host"),
        ((4, 4), 6, (4, 2), "tensor 2: 6 heads (2 KV) cannot be split over 4 ranks of a host"),
    ],
)
def test_auto_says_why_not(slots: tuple[int, int], heads: int, sizes: tuple[int, int], reason: str) -> None:
    config = {**LLAMA_TINY, "num_attention_heads": heads, "num_key_value_heads": {8: 4, 9: 3, 6: 2}[heads]}
    config["hidden_size"] = heads * 64
    facts = machines("a", "b", cpus=cpus(8), model=model_folder(config))
    plan = make_plan(auto({"name": "a", "slots": slots[0]}, {"name": "b", "slots": slots[1]}), facts)
    assert chosen(plan) == sizes
    assert plan.parallel_reason == reason


def test_auto_without_facts_takes_all_slots_of_a_host() -> None:
    plan = make_plan(auto({"name": "a", "slots": 2}, {"name": "b", "slots": 2}), {})
    assert chosen(plan) == (2, 2)
    assert plan.parallel_reason.endswith("the model's heads are unknown")


def test_auto_shows_numa_nodes_that_one_slot_leaves_idle() -> None:
    plan = make_plan(auto({"name": "a"}, {"name": "b"}), machines("a", "b", cpus=cpus(8, numa=2)))
    assert plan.parallel_reason.endswith("every host has 2 NUMA nodes: slots: 2 would give tensor 2 inside them")
