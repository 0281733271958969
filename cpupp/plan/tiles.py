"""Where linear layers may hold their weights a second time, as AMX tiles for decode steps (rank/tiled_linear.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.memory import Place, sizes_in
from cpupp.plan.model import ModelFacts
from cpupp.plan.weights import RankWeights, engine_arg, is_plain, running_bytes

FULL = 0.9
"""Of a place's memory: what tiles may fill it to."""
NEEDED_ISA = frozenset(("amx_tile", "amx_bf16", "avx512_bf16"))


def can_tile(spec: ClusterSpec, model: ModelFacts) -> bool:
    """Whether the file allows it and the model runs in bfloat16."""
    wanted = str(engine_arg(spec, "dtype") or "auto")
    dtype = model.dtype if wanted == "auto" else wanted
    plain = is_plain(model) and running_bytes(spec, model) == 2 and dtype not in ("float16", "half")
    return spec.engine.tiled_weights == "auto" and spec.engine.communicator != "stock" and plain


def has_tiles(facts: HostFacts | None) -> bool:
    """Whether the host's CPU has them."""
    return facts is not None and set(facts.isa) >= NEEDED_ISA


def tile_bytes(weights: RankWeights, layers: tuple[int, int], *, is_last: bool) -> int:
    """Bytes of the second copy on a rank, at most. layers: [first, last)."""
    return sum(weights.layers[slice(*layers)]) + (weights.head if is_last else 0)


def with_room(
    copies: Mapping[int, int],
    places: Sequence[Place],
    weights: Mapping[int, int | None],
    kv: Mapping[int, int],
    runtime: Mapping[int, int],
    free: Mapping[str, int],
) -> dict[int, int]:
    """Those of `copies` (bytes by rank) for which there is memory wherever the rank is. Others: bytes of each rank.

    free: bytes by host that nobody uses now.
    """
    allowed = dict(copies)
    for place in places:
        need = sum(sizes_in(place, weights, kv, runtime).values()) + sum(copies.get(rank, 0) for rank in place.ranks)
        if need > FULL * min(place.limit, *(free[host] for host in place.hosts)):
            allowed = {rank: size for rank, size in allowed.items() if rank not in place.ranks}
    known = {rank for place in places for rank in place.ranks}
    return {rank: size for rank, size in allowed.items() if rank in known}
