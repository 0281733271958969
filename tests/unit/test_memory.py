"""Layers, weights and KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.plan.memory import context_length
from cpupp.plan.model import model_facts
from cpupp.plan.placement import even_split
from cpupp.plan.plan import Plan, make_plan
from cpupp.plan.weights import kv_bytes_per_layer, rank_weights, running_bytes
from tests.unit.factory import (
    GIB,
    LLAMA_70B,
    LLAMA_TINY,
    SMOLLM2,
    cluster,
    cpus,
    host,
    machines,
    model_folder,
    one_machine,
)


def layers(plan: Plan) -> list[tuple[int, int] | None]:
    """Layers of each rank."""
    return [rank.layers for rank in plan.ranks]


@pytest.mark.parametrize(
    ("num", "stages", "sizes"),
    [(30, 2, (15, 15)), (30, 4, (7, 8, 8, 7)), (32, 3, (11, 11, 10)), (7, 3, (2, 3, 2)), (5, 4, (1, 1, 2, 1))],
)
def test_the_even_split_is_vllms(num: int, stages: int, sizes: tuple[int, ...]) -> None:
    assert even_split(num, stages) == sizes


@given(st.integers(1, 200), st.integers(1, 16))
def test_every_layer_has_one_stage(num: int, stages: int) -> None:
    sizes = even_split(num, stages)
    assert (len(sizes), sum(sizes)) == (stages, num)
    assert max(sizes) - min(sizes) <= 1


def test_layers_of_the_file_are_taken() -> None:
    plan = make_plan(cluster("a", "b", pipeline=2, layers=[3, 5]), machines("a", "b"))
    assert layers(plan) == [(0, 3), (3, 8)]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [([3, 3], r"layers\(3 \+ 3 = 6\) != model\(8\)"), ([1, 2, 5], "parallel.layers has 3 numbers, pipeline is 2")],
)
def test_layers_that_do_not_fit(wanted: list[int], text: str) -> None:
    with pytest.raises(CpuppError, match=text):
        make_plan(cluster("a", "b", pipeline=2, layers=wanted), machines("a", "b"))


def test_more_stages_than_layers() -> None:
    spec = cluster({"name": "a", "slots": 9}, pipeline=9)
    with pytest.raises(CpuppError, match=r"layers\(8\) < pipeline\(9\)"):
        make_plan(spec, machines("a", cpus=cpus(16)))


def test_offline_without_a_layer_count_layers_are_unknown() -> None:
    assert layers(make_plan(cluster("a", "b", pipeline=2), {})) == [None, None]


def test_embedding_and_head_are_counted_where_they_are() -> None:
    plan = make_plan(cluster("a", "b", pipeline=2, layers=[4, 4]), machines("a", "b"))
    embedding, norm, half = 32000 * 512 * 2, 512 * 2, 4 * (6 << 20)
    assert [rank.weights for rank in plan.ranks] == [half + embedding, half + norm + embedding]


def test_a_tied_head_is_the_embedding_once_more() -> None:
    folder = model_folder(SMOLLM2)
    embedding = 49152 * 576 * 2
    found = rank_weights(cluster("a"), model_facts(folder), 1)
    assert found is not None
    assert (found.first, found.last, found.single) == (embedding, embedding + 576 * 2, embedding + 576 * 2)
    assert found.head == found.last


def test_tensor_ranks_share_the_weights() -> None:
    plan = make_plan(cluster({"name": "a", "slots": 2}, tensor=2), machines("a"))
    whole = 8 * (6 << 20) + 2 * 32000 * 512 * 2 + 512 * 2
    norm = 512 * 2  # every rank has it
    assert [rank.weights for rank in plan.ranks] == [(whole + norm) // 2] * 2


def test_the_kv_cache_holds_one_sequence_of_full_length() -> None:  # vllm #29233
    config = {**LLAMA_TINY, "max_position_embeddings": 1 << 20}
    facts = machines("a", "b", model=model_folder(config))
    plan = make_plan(cluster("a", "b", pipeline=2, layers=[4, 4]), facts)
    one = (1 << 20) * 4 * 2 * 4 * 64 * 2
    assert one == 4 * GIB
    assert {rank.kv for rank in plan.ranks} == {4 * GIB}
    assert plan.kv.reason == "1048576 tokens * 4096 bytes = 4.00 GiB a sequence on the widest stage"


@pytest.mark.parametrize(
    ("value", "tokens"),
    [(512, 512), ("512", 512), ("1k", 1000), ("1K", 1024), ("1.5K", 1536), ("auto", 2048), (-1, 2048), (None, 2048)],
)
def test_max_model_len_as_vllm_reads_it(value: object, tokens: int) -> None:
    spec = cluster("a", engine={"args": {"max-model-len": value}})
    assert context_length(spec, model_facts(model_folder())) == tokens


@pytest.mark.parametrize(
    ("stored", "args", "running"),
    [
        ("bfloat16", {}, 2),
        ("bfloat16", {"dtype": "float32"}, 4),
        ("float32", {}, 2),
        ("float32", {"dtype": "float32"}, 4),
        ("float32", {"dtype": "bfloat16"}, 2),
    ],
)
def test_dtype_scales_the_weights(stored: str, args: dict[str, str], running: int) -> None:
    model = model_facts(model_folder({**LLAMA_TINY, "dtype": stored}))
    spec = cluster("a", engine={"args": args})
    assert running_bytes(spec, model) == running
    found = rank_weights(spec, model, 1)
    assert found is not None
    assert found.layers == ((6 << 20) * running // (4 if stored == "float32" else 2),) * 8


def test_kv_heads_are_split_as_far_as_they_go() -> None:
    model = model_facts(model_folder(LLAMA_70B))
    spec = cluster("a")
    assert kv_bytes_per_layer(spec, model, 1) == 2 * 8 * 128 * 2
    assert kv_bytes_per_layer(spec, model, 8) == 2 * 128 * 2
    assert kv_bytes_per_layer(spec, model, 16) == 2 * 128 * 2  # fewer heads than ranks: each keeps a whole one
    half = cluster("a", engine={"args": {"kv_cache_dtype": "fp8_e5m2"}})
    assert kv_bytes_per_layer(half, model, 1) == 2 * 8 * 128


def test_latent_attention_keeps_one_vector_on_every_rank() -> None:
    config = {**LLAMA_TINY, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = model_facts(model_folder(config))
    assert kv_bytes_per_layer(cluster("a"), model, 4) == (512 + 64) * 2


BIG = model_folder(LLAMA_70B, layer=GIB)


def test_what_does_not_fit_is_refused_with_the_sum() -> None:
    spec = cluster("a", engine={"args": {"max_model_len": 8192}})
    with pytest.raises(CpuppError) as caught:
        make_plan(spec, machines("a", model=BIG))
    parts = "weights(83.9) + KV(3.0) + runtime(5.6) + engine and links(1.0)"
    assert str(caught.value) == f"host a: memory(64.0 GiB) < {parts} = 93.5 GiB of 1 rank: 29.5 GiB short"
    assert caught.value.hint.startswith("any one of these would fit: 1 more host like a (pipeline: 2); 8 bits")


def test_two_entries_of_one_machine_cannot_each_have_all_of_it() -> None:
    spec = cluster("a", "b", pipeline=2, engine={"args": {"max_model_len": 8192}})
    make_plan(spec, machines("a", "b", model=BIG))
    with pytest.raises(CpuppError, match=r"hosts a and b: memory\(64\.0 GiB\) < .* of 2 ranks"):
        make_plan(spec, one_machine("a", "b", model=BIG))


def test_a_rank_beyond_its_numa_node_is_refused() -> None:  # vllm #15800
    spec = cluster({"name": "a", "slots": 2}, tensor=2, engine={"args": {"max_model_len": 8192}})
    facts = {"a": host("a", model=BIG, memory_total=100 * GIB, cpus=cpus(8, numa=2))}
    make_plan(spec, facts)
    small = tuple(replace(node, memory_total=40 * GIB) for node in facts["a"].numa)
    with pytest.raises(CpuppErrors, match=r"host a: NUMA node 0\(40\.0 GiB\) < weights\(42\.0\)"):
        make_plan(spec, {"a": replace(facts["a"], numa=small)})


def test_the_cgroups_limit_counts() -> None:
    with pytest.raises(CpuppError, match=r"host a: cgroup memory limit\(1\.0 GiB\)"):
        make_plan(cluster("a"), machines("a", memory_limit=GIB))


def test_a_kv_cache_below_one_sequence_is_refused() -> None:
    config = {**LLAMA_TINY, "max_position_embeddings": 1 << 20}
    spec = cluster("a", engine={"env": {"VLLM_CPU_KVCACHE_SPACE": "2"}})
    with pytest.raises(CpuppError, match=r"host a: KV cache\(2 GiB\) < one sequence: 1048576 tokens"):
        make_plan(spec, machines("a", model=model_folder(config)))


def test_a_host_may_set_its_own_kv_cache_and_the_plan_says_what_that_means() -> None:
    spec = cluster("a", {"name": "b", "engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": "2"}}}, pipeline=2)
    plan = make_plan(spec, machines("a", "b"))
    assert [rank.kv for rank in plan.ranks] == [GIB, 2 * GIB]
    assert any("smallest number of blocks" in text for text in plan.warnings)
