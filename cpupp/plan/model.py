"""ModelFacts: what the plan needs to know of a model, read from config.json and the safetensors headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpupp.plan.facts import ModelFolderFacts

_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "auto": 2}


_EMBEDDING = re.compile(r"(?:embed_tokens|embed_positions|word_embeddings|tok_embeddings|\bwte|\bwpe|embed_in)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Layers, heads and sizes. Byte counts are of the stored weights; kv_bytes is per token and layer, all heads.

    max_position: largest context of the model, None when config.json does not say; num_kv_shards: over how many TP
    ranks the KV cache can be split (1 for latent attention); layer_bytes: stored bytes of each layer (empty when no
    headers were read); first_bytes, last_bytes: what the first and the last stage hold beside their layers (the
    embedding; norm and head, a tied head being the embedding once more); other_bytes: all of these, each once.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int | None
    dtype: str
    kv_bytes: int
    num_kv_shards: int
    layer_bytes: tuple[int, ...]
    first_bytes: int
    last_bytes: int
    other_bytes: int


def model_facts(folder: ModelFolderFacts) -> ModelFacts:
    """Read a model folder's facts. Raises KeyError or TypeError when config.json lacks what every decoder has."""
    config: Mapping[str, Any] = folder.config.get("text_config") or folder.config
    num_heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or hidden // num_heads)
    latent = "kv_lora_rank" in config
    dtype = str(config.get("dtype") or config.get("torch_dtype") or folder.config.get("torch_dtype") or "bfloat16")
    if latent:  # multi-head latent attention keeps one compressed vector a token
        kv_elements = int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
    else:
        kv_elements = 2 * kv_heads * head_dim
    embedding = sum(size for name, size in folder.other_bytes.items() if _EMBEDDING.search(name))
    rest = sum(folder.other_bytes.values()) - embedding
    tied = bool(config.get("tie_word_embeddings", folder.config.get("tie_word_embeddings", False)))
    return ModelFacts(
        architecture=str((folder.config.get("architectures") or ["?"])[0]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=int(config.get("vocab_size") or 0),
        max_position=config.get("max_position_embeddings"),
        dtype=dtype,
        kv_bytes=kv_elements * dtype_bytes(dtype),
        num_kv_shards=1 if latent else kv_heads,
        layer_bytes=folder.layer_bytes,
        first_bytes=embedding,
        last_bytes=rest + (embedding if tied else 0),
        other_bytes=embedding + rest,
    )


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; an unknown dtype counts as two."""
    return _DTYPE_BYTES.get(dtype.removeprefix("torch."), 2)
