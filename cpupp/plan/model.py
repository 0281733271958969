"""ModelFacts: what the plan needs to know of a model, read from config.json and the safetensors headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cpupp.plan.facts import HostFacts, LayerKindFacts, ModelFolderFacts, TensorFacts

_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "auto": 2}
_EMBEDDING = re.compile(r"(?:embed_tokens|embed_positions|word_embeddings|tok_embeddings|\bwte|\bwpe|embed_in)\b")
_OTHER_TOWER = re.compile(r"vision|visual|audio|speech|image|encoder|mtp|projector|merger", re.IGNORECASE)
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
MOST_LAYERS = 10_000
MOST = 1 << 30
"""Of anything else that config.json counts. Beyond it the file is damaged; a list with one entry each fills memory."""
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Layers, heads and stored tensors.

    max_position: largest context of the model, None when config.json does not say; kv_elements: numbers that the KV
    cache keeps of one token in one layer, all heads; is_latent: they are one compressed vector (MLA); window: tokens
    that the sliding_layers keep; stateful_layers: those without a KV cache (linear attention); num_experts,
    active_experts: of one MoE layer and token, 1 and 1 without; widest: numbers that a token has inside a layer at
    most; kinds: the tensors of the decoder's layers (empty without headers; those of other towers and of layers for
    speculation are not in it); embedding, head: what the first and the last stage hold beside their layers, a tied
    head being the embedding once more; other: further tensors, on the first stage.
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
    kv_elements: int
    is_latent: bool
    window: int | None
    sliding_layers: tuple[int, ...]
    stateful_layers: tuple[int, ...]
    num_experts: int
    active_experts: int
    widest: int
    tied: bool
    kinds: tuple[LayerKindFacts, ...]
    embedding: tuple[TensorFacts, ...]
    head: tuple[TensorFacts, ...]
    other: tuple[TensorFacts, ...]

    @property
    def num_kv_shards(self) -> int:
        """Over how many TP ranks the KV cache can be split: a latent vector cannot."""
        return 1 if self.is_latent else self.num_kv_heads

    @property
    def stored_bytes(self) -> int:
        """Stored bytes of all that is loaded, each tensor once."""
        layers = sum(len(kind.layers) * sum(t.size for t in kind.tensors) for kind in self.kinds)
        return layers + sum(t.size for t in (*self.embedding, *self.head, *self.other))


def model_facts(folder: ModelFolderFacts) -> ModelFacts:
    """Read a model folder's facts. Raises ValueError, which says what is wrong, when config.json is no decoder's."""
    try:
        return _model_facts(folder)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _model_facts(folder: ModelFolderFacts) -> ModelFacts:
    config: Mapping[str, Any] = folder.config.get("text_config") or folder.config
    num_layers = _count(config, "num_hidden_layers", most=MOST_LAYERS)
    num_heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", num_heads)
    head_dim = _count(config, "head_dim", max(1, hidden // num_heads))
    latent = config.get("kv_lora_rank") is not None
    if latent:
        kv_elements = _count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim", 0)
    else:
        kv_elements = 2 * kv_heads * head_dim
    num_experts = _first(config, _EXPERTS)
    active = min(_first(config, _ACTIVE_EXPERTS), num_experts)
    window, sliding, stateful = _attention_kinds(config, num_layers)
    embedding, head, other = _outside(folder)
    return ModelFacts(
        architecture=str((folder.config.get("architectures") or ["?"])[0]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=_count(config, "vocab_size", 0),
        max_position=_count(config, "max_position_embeddings", 0) or None,
        dtype=_dtype(config, folder.config),
        kv_elements=kv_elements,
        is_latent=latent,
        window=window,
        sliding_layers=sliding,
        stateful_layers=stateful,
        num_experts=num_experts,
        active_experts=active,
        widest=_widest(config, active),
        tied=bool(config.get("tie_word_embeddings", folder.config.get("tie_word_embeddings", False))),
        kinds=_decoder(folder.layer_kinds, num_layers),
        embedding=embedding,
        head=head,
        other=other,
    )


def _count(config: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MOST) -> int:
    """A number of config.json; the default where it is missing or null, or 0 where 0 means that."""
    value = config.get(name)
    if value is None or (value == 0 and default is not None):
        if default is None:
            raise ValueError(f"it has no {name}")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or not 1 <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, which is no whole number from 1 to {most}")
    return int(value)


def readable_model(facts: Mapping[str, HostFacts]) -> ModelFacts | None:
    """The model as the first host that can read it sees it; None when nobody can."""
    for fact in facts.values():
        if not fact.model.error and fact.model.config:
            with suppress(ValueError):
                return model_facts(fact.model)
    return None


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; an unknown dtype counts as two."""
    return _DTYPE_BYTES.get(dtype.removeprefix("torch."), 2)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((_count(config, name) for name in names if config.get(name)), 1)


def _dtype(config: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    found = [c.get(name) for c in (config, outer) for name in ("dtype", "torch_dtype")]
    return str(next((name for name in found if name), "bfloat16"))


def _widest(config: Mapping[str, Any], active: int) -> int:
    """Numbers of one token between the two halves of the widest MLP, gate and up counted."""
    sizes = config.get("intermediate_size")
    if isinstance(sizes, list) and sizes:  # one of each layer
        config = {**config, "intermediate_size": max(sizes)}
    dense = _count(config, "intermediate_size", 4 * _count(config, "hidden_size"))
    experts = active * _count(config, "moe_intermediate_size", 0)
    return 3 * max(dense, experts)


def _attention_kinds(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
    """Return the window, the layers that have it, and those without a KV cache."""
    kinds = [str(kind) for kind in config.get("layer_types") or ()][:num_layers]
    stateful = tuple(i for i, kind in enumerate(kinds) if "linear" in kind or "mamba" in kind)
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    if not window or config.get("use_sliding_window") is False:
        return None, (), stateful
    pattern = config.get("sliding_window_pattern")
    if kinds:
        sliding = tuple(i for i, kind in enumerate(kinds) if "sliding" in kind or "chunked" in kind)
    elif isinstance(pattern, int) and pattern > 1:  # every pattern-th layer sees all
        sliding = tuple(i for i in range(num_layers) if (i + 1) % pattern)
    else:
        sliding = tuple(range(num_layers))
    return int(window), sliding, stateful


def _decoder(kinds: tuple[LayerKindFacts, ...], num_layers: int) -> tuple[LayerKindFacts, ...]:
    """The kinds of the decoder's own layers; layers beyond num_layers are for speculation (MTP) and not loaded."""
    stacks: dict[str, list[LayerKindFacts]] = {}
    for kind in kinds:
        own = tuple(number for number in kind.layers if number < num_layers)
        if own:
            stacks.setdefault(kind.stack, []).append(LayerKindFacts(stack=kind.stack, layers=own, tensors=kind.tensors))
    whole = [s for s in stacks if sum(len(kind.layers) for kind in stacks[s]) == num_layers]
    plain = [s for s in whole if not _OTHER_TOWER.search(s)] or whole

    def size(stack: str) -> int:
        return sum(len(kind.layers) * sum(t.size for t in kind.tensors) for kind in stacks[stack])

    return tuple(stacks[max(plain, key=size)]) if plain else ()


def _outside(
    folder: ModelFolderFacts,
) -> tuple[tuple[TensorFacts, ...], tuple[TensorFacts, ...], tuple[TensorFacts, ...]]:
    """Split what is not in the decoder's layers: embedding, norm and head, other towers."""
    embedding, head, other = [], [], []
    for tensor in folder.other_tensors:
        if _OTHER_TOWER.search(tensor.name):
            other.append(tensor)
        elif _EMBEDDING.search(tensor.name):
            embedding.append(tensor)
        else:
            head.append(tensor)
    for kind in folder.layer_kinds:
        if _OTHER_TOWER.search(kind.stack) and "mtp" not in kind.stack:
            num = len(kind.layers)
            other += [
                TensorFacts(name=f"{kind.stack}.*.{t.name}", dtype=t.dtype, num=num * t.num, size=num * t.size)
                for t in kind.tensors
            ]
    return tuple(embedding), tuple(head), tuple(other)
