"""Models that nobody has here, from their published config.json: what the agent would say of their folders.

Shapes are those of the checkpoints; the tests count the parameters and compare them with the published numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpupp.plan.facts import LayerKindFacts, ModelFolderFacts, TensorFacts

ELEMENT = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
Shapes = Mapping[str, Sequence[int]]

LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_405B: dict[str, Any] = {
    **LLAMA_70B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
DEEPSEEK_R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
QWEN3_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def llama(config: Mapping[str, Any]) -> ModelFolderFacts:
    """A Llama: every layer alike, an untied head."""
    layer = {**_attention(config), **_mlp("mlp", config["hidden_size"], config["intermediate_size"])}
    return _folder(config, [(range(config["num_hidden_layers"]), _plain(layer))])


def qwen3_moe(config: Mapping[str, Any]) -> ModelFolderFacts:
    """Qwen3 MoE: experts in every layer, normalised queries and keys."""
    head, hidden = config["head_dim"], config["hidden_size"]
    layer = {**_attention(config), "self_attn.q_norm.weight": [head], "self_attn.k_norm.weight": [head]}
    layer["mlp.gate.weight"] = [config["num_experts"], hidden]
    tensors = _plain(layer) + _experts(config, config["num_experts"], "BF16")
    return _folder(config, [(range(config["num_hidden_layers"]), tensors)])


def deepseek(config: Mapping[str, Any]) -> ModelFolderFacts:
    """DeepSeek V3 and R1: latent attention, dense layers first, then MoE, in 8 bits; one layer more for speculation."""
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    first = config["first_k_dense_replace"]
    attention = _latent_attention(config)
    norms = {name: shape for name, shape in attention.items() if "norm" in name}
    matrices = {name: shape for name, shape in attention.items() if "norm" not in name}
    shared = _mlp("mlp.shared_experts", hidden, config["moe_intermediate_size"] * config["n_shared_experts"])
    gate = _plain({"mlp.gate.weight": [config["n_routed_experts"], hidden]})
    bias = _tensor("mlp.gate.e_score_correction_bias", [config["n_routed_experts"]], "F32")
    dense = _plain(norms) + _fp8({**matrices, **_mlp("mlp", hidden, config["intermediate_size"])})
    moe = _plain(norms) + _fp8({**matrices, **shared}) + gate + [bias]
    moe += _experts(config, config["n_routed_experts"], "F8_E4M3")
    table = [config["vocab_size"], hidden]
    mtp = {"embed_tokens.weight": table, "shared_head.head.weight": table, "eh_proj.weight": [hidden, 2 * hidden]}
    mtp |= {name: [hidden] for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    return _folder(
        config,
        [
            (range(first), dense),
            (range(first, num_layers), moe),
            (range(num_layers, num_layers + 1), moe + _plain(mtp)),
        ],
    )


def num_parameters(folder: ModelFolderFacts, layers: range) -> int:
    """Parameters of these layers and of all that is outside of layers; the scales of 8-bit weights are none."""
    total = sum(_elements(t) for t in folder.other_tensors)
    for kind in folder.layer_kinds:
        total += len(set(kind.layers) & set(layers)) * sum(_elements(t) for t in kind.tensors)
    return total


def _elements(tensor: TensorFacts) -> int:
    return 0 if tensor.name.endswith("_scale_inv") else tensor.size // ELEMENT[tensor.dtype]


def _attention(config: Mapping[str, Any]) -> dict[str, list[int]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    return {
        "self_attn.q_proj.weight": [heads * head, hidden],
        "self_attn.k_proj.weight": [config["num_key_value_heads"] * head, hidden],
        "self_attn.v_proj.weight": [config["num_key_value_heads"] * head, hidden],
        "self_attn.o_proj.weight": [hidden, heads * head],
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
    }


def _latent_attention(config: Mapping[str, Any]) -> dict[str, list[int]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    return {
        "self_attn.q_a_proj.weight": [queries, hidden],
        "self_attn.q_a_layernorm.weight": [queries],
        "self_attn.q_b_proj.weight": [heads * (nope + rope), queries],
        "self_attn.kv_a_proj_with_mqa.weight": [latent + rope, hidden],
        "self_attn.kv_a_layernorm.weight": [latent],
        "self_attn.kv_b_proj.weight": [heads * (nope + value), latent],
        "self_attn.o_proj.weight": [hidden, heads * value],
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
    }


def _mlp(name: str, hidden: int, inner: int) -> dict[str, list[int]]:
    return {
        f"{name}.gate_proj.weight": [inner, hidden],
        f"{name}.up_proj.weight": [inner, hidden],
        f"{name}.down_proj.weight": [hidden, inner],
    }


def _experts(config: Mapping[str, Any], num: int, dtype: str) -> list[TensorFacts]:
    shapes = _mlp("mlp.experts.*", config["hidden_size"], config["moe_intermediate_size"])
    one = _plain(shapes) if dtype == "BF16" else _fp8(shapes)
    return [TensorFacts(name=t.name, dtype=t.dtype, num=num, size=num * t.size) for t in one]


def _tensor(name: str, shape: Sequence[int], dtype: str) -> TensorFacts:
    size = ELEMENT[dtype]
    for length in shape:
        size *= length
    return TensorFacts(name=name, dtype=dtype, num=1, size=size)


def _plain(shapes: Shapes) -> list[TensorFacts]:
    return [_tensor(name, shape, "BF16") for name, shape in shapes.items()]


def _fp8(shapes: Shapes) -> list[TensorFacts]:
    """8-bit matrices with one scale for each block of 128 x 128."""
    found = []
    for name, shape in shapes.items():
        found.append(_tensor(name, shape, "F8_E4M3"))
        found.append(_tensor(f"{name}_scale_inv", [-(-length // 128) for length in shape], "F32"))
    return found


def _folder(config: Mapping[str, Any], kinds: Sequence[tuple[range, list[TensorFacts]]]) -> ModelFolderFacts:
    table = [config["vocab_size"], config["hidden_size"]]
    others = {"model.embed_tokens.weight": table, "model.norm.weight": table[1:], "lm_head.weight": table}
    layer_kinds = tuple(
        LayerKindFacts(stack="model.layers", layers=tuple(layers), tensors=tuple(sorted(tensors, key=lambda t: t.name)))
        for layers, tensors in kinds
    )
    other_tensors = tuple(sorted(_plain(others), key=lambda t: t.name))
    size = sum(len(kind.layers) * sum(t.size for t in kind.tensors) for kind in layer_kinds)
    return ModelFolderFacts(
        path="/models/published",
        config=dict(config),
        digest="d" * 64,
        layer_kinds=layer_kinds,
        other_tensors=other_tensors,
        files_bytes=size + sum(t.size for t in other_tensors),
        tokenizer=True,
        error="",
    )
