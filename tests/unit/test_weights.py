"""What a rank holds and reads of models of all kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpupp.plan.facts import LayerKindFacts, ModelFolderFacts
from cpupp.plan.grid import make_grid
from cpupp.plan.memory import memory_needs, sequence_bytes
from cpupp.plan.model import ModelFacts, model_facts
from cpupp.plan.weights import RankWeights, kv_bytes_per_layer, rank_weights
from tests.unit import published
from tests.unit.factory import GIB, LLAMA_TINY, cluster, model_folder, tensor

LLAMA_70B = published.llama(published.LLAMA_70B)
LLAMA_405B = published.llama(published.LLAMA_405B)
DEEPSEEK_R1 = published.deepseek(published.DEEPSEEK_R1)
QWEN3_235B = published.qwen3_moe(published.QWEN3_235B)


def weights(model: ModelFacts, tensor: int = 1) -> RankWeights:
    """Sizes on one rank."""
    found = rank_weights(cluster("a"), model, tensor)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("folder", "num_layers", "billions"),
    [
        (LLAMA_70B, 80, 70.55),
        (LLAMA_405B, 126, 405.85),
        (DEEPSEEK_R1, 61, 671.03),
        (DEEPSEEK_R1, 62, 684.49),  # with the layer for speculation
        (QWEN3_235B, 94, 235.09),
    ],
)
def test_the_invented_headers_have_the_published_number_of_parameters(
    folder: ModelFolderFacts, num_layers: int, billions: float
) -> None:
    assert round(published.num_parameters(folder, range(num_layers)) / 1e9, 2) == billions


def test_deepseeks_files_have_the_published_size() -> None:
    assert round(DEEPSEEK_R1.files_bytes / 1e9, 1) == 688.6


@pytest.mark.parametrize(
    ("folder", "billions_read"),
    [(LLAMA_70B, 69.5), (LLAMA_405B, 403.75), (QWEN3_235B, 21.57)],  # active parameters without the embedding
)
def test_one_token_reads_the_active_parameters(folder: ModelFolderFacts, billions_read: float) -> None:
    found = weights(model_facts(folder))
    assert (sum(found.read) + found.head) / 2 / 1e9 == pytest.approx(billions_read, rel=0.002)


def test_deepseek_reads_8_of_256_experts() -> None:
    found = weights(model_facts(DEEPSEEK_R1))
    assert len(found.layers) == 61
    assert found.read[0] == found.layers[0] - 512 * 128 * 256 * 2  # all of it but the copy of the up-projection
    assert found.read[3] == pytest.approx(found.read[0], rel=0.01)  # 9 experts of 2048 are as wide as one MLP of 18432
    assert found.layers[3] > 18 * found.layers[0]
    assert (sum(found.read) + found.head) / 1e9 == pytest.approx(37.5, rel=0.02)  # 37 billion active, mostly 8 bits


def test_the_layer_for_speculation_is_not_counted() -> None:
    model = model_facts(DEEPSEEK_R1)
    assert model.stored_bytes / 1e9 == pytest.approx(688.59 - 15.4, abs=0.3)
    assert sum(len(kind.layers) for kind in model.kinds) == 61


def test_latent_attention_keeps_its_up_projection_once_more() -> None:
    found = weights(model_facts(DEEPSEEK_R1))
    stored = sum(t.size for t in DEEPSEEK_R1.layer_kinds[0].tensors)
    assert found.layers[0] - stored == 512 * 128 * 256 * 2  # stored in 8 bits, kept in 16


def test_what_a_tensor_group_shares_and_what_each_rank_has() -> None:
    model = model_facts(LLAMA_70B)
    one, two, sixteen = weights(model), weights(model, 2), weights(model, 16)
    norms = 2 * 8192 * 2
    assert two.layers[0] == (one.layers[0] - norms) // 2 + norms
    keys = 2 * 1024 * 8192 * 2  # 8 heads: 16 ranks keep one each, so every head is there twice
    assert sixteen.layers[0] == (one.layers[0] - norms - keys) // 16 + norms + keys // 8


def test_latent_projections_are_on_every_rank() -> None:
    model = model_facts(DEEPSEEK_R1)
    per_rank = 16 * weights(model, 16).layers[0] - weights(model).layers[0]
    down = (1536 + 576) * 7168 + ((12 + 5) * 56) * 4  # with their scales
    norms = (2 * 7168 + 1536 + 512) * 2
    assert per_rank == pytest.approx(15 * (down + norms), abs=16 * 40)


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        (published.LLAMA_70B, 2 * 8 * 128 * 2),
        (published.LLAMA_405B, 2 * 8 * 128 * 2),
        (published.DEEPSEEK_R1, (512 + 64) * 2),
        (published.QWEN3_235B, 2 * 4 * 128 * 2),
    ],
)
def test_kv_bytes_of_a_token(config: dict[str, object], per_token: int) -> None:
    folder = replace(LLAMA_70B, config=config)
    assert kv_bytes_per_layer(cluster("a"), model_facts(folder), 1) == per_token


def quantized() -> ModelFolderFacts:
    """An AWQ layer as files have it: packed integers, zeros and scales."""
    tensors = (
        tensor("mlp.down_proj.qweight", 4 << 20, "I32"),
        tensor("mlp.down_proj.qzeros", 32 << 10, "I32"),
        tensor("mlp.down_proj.scales", 128 << 10, "F16"),
        tensor("input_layernorm.weight", 1024, "F16"),
    )
    kind = LayerKindFacts(stack="model.layers", layers=tuple(range(8)), tensors=tensors)
    return replace(model_folder({**LLAMA_TINY, "dtype": "float16"}), layer_kinds=(kind,))


def test_quantized_weights_are_as_large_as_they_are_stored() -> None:
    model = model_facts(quantized())
    stored = (4 << 20) + (32 << 10) + (128 << 10)
    assert weights(model).layers[0] == stored + 1024
    wide = rank_weights(cluster("a", engine={"args": {"dtype": "float32"}}), model, 1)
    assert wide is not None
    assert wide.layers[0] == stored + 2048  # only plain tensors are converted


def test_other_towers_are_on_the_first_stage_and_not_among_the_layers() -> None:
    folder = model_folder()
    tower = LayerKindFacts(
        stack="vision_tower.encoder.layers", layers=tuple(range(24)), tensors=(tensor("mlp.fc1.weight", GIB // 24),)
    )
    nested = {"architectures": ["LlavaForConditionalGeneration"], "text_config": folder.config}
    both = replace(folder, config=nested, layer_kinds=(*folder.layer_kinds, tower))
    plain, found = weights(model_facts(folder)), weights(model_facts(both))
    assert found.layers == plain.layers
    assert found.first == plain.first + 24 * (GIB // 24)
    assert found.last == plain.last


def test_a_tied_head_that_is_stored_too_is_counted_once() -> None:
    folder = model_folder({**LLAMA_TINY, "tie_word_embeddings": False})
    tied = replace(folder, config={**folder.config, "tie_word_embeddings": True})
    assert weights(model_facts(tied)).last == weights(model_facts(folder)).last
    assert weights(model_facts(tied)).single < weights(model_facts(folder)).single


@pytest.mark.parametrize(
    ("more", "sliding"),
    [
        ({}, ()),
        ({"sliding_window": 512}, tuple(range(8))),
        ({"sliding_window": 512, "use_sliding_window": False}, ()),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, (0, 1, 2, 4, 5, 6)),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 4}, (0, 2, 4, 6)),
    ],
)
def test_layers_with_a_window_keep_no_more_than_it(more: dict[str, object], sliding: tuple[int, ...]) -> None:
    model = model_facts(model_folder({**LLAMA_TINY, "max_position_embeddings": 65536, **more}))
    assert model.sliding_layers == sliding
    spec = cluster("a")
    found = sequence_bytes(spec, make_grid(spec), model, 65536)
    token = 2 * 4 * 64 * 2
    assert found == tuple((512 + 2048 if i in sliding else 65536) * token for i in range(8))


def test_layers_of_linear_attention_have_no_kv_cache() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    model = model_facts(model_folder({**LLAMA_TINY, "layer_types": kinds}))
    spec = cluster("a")
    needs = memory_needs(spec, make_grid(spec), model)
    assert [layer for layer, size in enumerate(needs.per_token) if size] == [3, 7]


def test_some_models_hold_embedding_and_head_on_every_stage() -> None:
    table = 151936 * 4096 * 2
    found = weights(model_facts(QWEN3_235B))
    assert (found.first, found.middle, found.last) == (2 * table, 2 * table, 2 * table + 4096 * 2)
    assert found.head == table + 4096 * 2  # read once all the same
    assert weights(model_facts(LLAMA_70B)).middle == 0


def test_a_folder_without_headers_has_no_sizes() -> None:
    model = model_facts(model_folder(layer_kinds=(), other_tensors=()))
    assert rank_weights(cluster("a"), model, 1) is None
