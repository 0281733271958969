"""What a rank holds and reads: bytes of each layer, of embedding and head, of one token in the KV cache.

Sizes are those of the stored tensors, divided as vLLM's layers are over a tensor group, in the dtype that runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.everywhere import embedding_is_everywhere, head_is_everywhere
from cpupp.plan.facts import TensorFacts
from cpupp.plan.model import ModelFacts, dtype_bytes

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_KEPT = re.compile(r"scale|zero|e_score_correction")  # stay as they are stored
_EXPERTS = re.compile(r"(?:^|\.)experts\.")
_KEYS_OR_VALUES = re.compile(r"(?:^|\.)[kv]_proj\.")
_EVERY_RANK = re.compile(r"norm|(?:^|\.)ln_|q_a_proj|kv_a_proj|\.gate\.|router|embed_positions|\bwpe")
_UP_FROM_LATENT = re.compile(r"(?:^|\.)kv_b_proj\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Bytes on one rank of a tensor group. layers: held, of each layer; read: passed through for one token, of each.

    first, middle, last: held beside the layers, by stages of the pipeline; single: the same where one stage is all;
    head: read for one token by the last stage; table: the embedding of tokens.
    """

    layers: tuple[int, ...]
    read: tuple[int, ...]
    first: int
    middle: int
    last: int
    single: int
    head: int
    table: int


def rank_weights(spec: ClusterSpec, model: ModelFacts, tensor: int) -> RankWeights | None:
    """Return the sizes, or None when no headers were read."""
    if not model.kinds:
        return None
    held, read = [0] * model.num_layers, [0] * model.num_layers
    for kind in model.kinds:
        sizes = [(_share(t, spec, model, tensor), t.name) for t in kind.tensors]
        passed = sum(ceil(size * model.active_experts / model.num_experts) for size, n in sizes if _EXPERTS.search(n))
        passed += sum(size for size, name in sizes if not _EXPERTS.search(name))
        total = sum(size for size, _ in sizes) + sum(_absorbed(t, spec, model, tensor) for t in kind.tensors)
        for layer in kind.layers:
            held[layer], read[layer] = total, passed

    def sum_of(tensors: Iterable[TensorFacts]) -> int:
        return sum(_share(t, spec, model, tensor) for t in tensors)

    embedding, other, head = sum_of(model.embedding), sum_of(model.other), sum_of(model.head)
    table = [t for t in model.embedding if "position" not in t.name and "wpe" not in t.name]
    stored_head = tuple(t for t in model.head if not _EVERY_RANK.search(t.name))
    again = sum_of(table) if model.tied or not stored_head else 0
    spare = sum_of(stored_head) if model.tied else 0  # some files store the tied head too; it is not loaded
    last = head - spare + again
    in_all = embedding if embedding_is_everywhere(model.architecture) else 0
    heads = sum_of(stored_head) - spare if head_is_everywhere(model.architecture) else 0
    return RankWeights(
        layers=tuple(held),
        read=tuple(read),
        first=embedding + other + heads,
        middle=in_all + heads,
        last=last + (0 if again else in_all),
        single=embedding + other + head - spare,
        head=last,
        table=sum_of(table),
    )


def is_plain(model: ModelFacts) -> bool:
    """Whether most bytes of the layers are plain floating-point weights, not quantized ones."""
    sizes = [(len(kind.layers) * t.size, t.dtype in _FLOATS) for kind in model.kinds for t in kind.tensors]
    return 2 * sum(size for size, plain in sizes if plain) > sum(size for size, _ in sizes)


def _share(tensor: TensorFacts, spec: ClusterSpec, model: ModelFacts, ranks: int) -> int:
    """Bytes of a tensor on one of `ranks` ranks."""
    size = tensor.size
    if tensor.dtype in _FLOATS and not _KEPT.search(tensor.name):
        size = size // _FLOATS[tensor.dtype] * running_bytes(spec, model)
    if ranks == 1 or _EVERY_RANK.search(tensor.name):
        return size
    if _KEYS_OR_VALUES.search(tensor.name):
        return ceil(size / min(ranks, model.num_kv_heads))
    return ceil(size / ranks)


def _absorbed(tensor: TensorFacts, spec: ClusterSpec, model: ModelFacts, ranks: int) -> int:
    """Latent attention keeps its up-projection once more, in the dtype that runs (vLLM's W_UK_T and W_UV)."""
    if not _UP_FROM_LATENT.search(tensor.name):
        return 0
    elements = tensor.size // _FLOATS.get(tensor.dtype, 1)
    return ceil(elements * running_bytes(spec, model) / ranks)


def engine_arg(spec: ClusterSpec, name: str) -> object:
    """A vLLM argument of the file by its name with underscores, however it was spelled there; None when not given."""
    return next((v for key, v in spec.engine.args.items() if key.lstrip("-").replace("-", "_") == name), None)


def is_compiled(spec: ClusterSpec) -> bool:
    """Whether vLLM compiles the model by torch.compile, which needs a C++ compiler on the host."""
    eager, config = engine_arg(spec, "enforce_eager"), engine_arg(spec, "compilation_config")
    levels = [engine_arg(spec, name) for name in ("O", "optimization_level")]
    if isinstance(config, Mapping) and "mode" in config:
        levels.append(config["mode"] or 0)
    return not (eager and str(eager).lower() != "false") and not any(str(n) in ("0", "NONE") for n in levels)


def running_bytes(spec: ClusterSpec, model: ModelFacts) -> int:
    """Bytes of a plain weight and of an activation in memory: `dtype`; float32 is halved by default (as vLLM does)."""
    wanted = str(engine_arg(spec, "dtype") or "auto")
    return max(2, min(dtype_bytes(model.dtype), 2) if wanted == "auto" else dtype_bytes(wanted))


def kv_bytes_per_layer(spec: ClusterSpec, model: ModelFacts, tensor: int) -> int:
    """KV cache bytes of one token in one layer on one rank."""
    small = str(engine_arg(spec, "kv_cache_dtype") or "auto").startswith("fp8")
    whole = model.kv_elements * (1 if small else running_bytes(spec, model))
    heads = ceil(model.num_kv_shards / tensor)  # fewer KV heads than ranks: each rank keeps a whole one
    return ceil(whole * heads / model.num_kv_shards)
