"""How many tokens a second the memory of the hosts allows: bytes read for a token over measured bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpupp.plan.grid import Grid
from cpupp.plan.model import ModelFacts
from cpupp.plan.speed import RankSpeed
from cpupp.plan.weights import RankWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReads:
    """What a decode step reads on one rank.

    weights: bytes, once a step, whatever its batch; of experts those of one token. kv: bytes of one token of context,
    for each sequence; window_kv: the same in layers that look back `window` tokens only. bytes_per_s: what the rank can
    read, as its host measured.
    """

    stage: int
    weights: int
    kv: int
    window_kv: int = 0
    window: int = 0
    bytes_per_s: int


def rank_reads(
    grid: Grid,
    layers: Sequence[tuple[int, int]],
    weights: RankWeights | None,
    kv: Sequence[int],
    model: ModelFacts,
    speeds: Mapping[int, RankSpeed] | None,
) -> dict[int, RankReads]:
    """What each rank reads; empty when the model's sizes or a host's bandwidth are unknown. kv: bytes by layer."""
    if weights is None or speeds is None:
        return {}
    found = {}
    sliding = set(model.sliding_layers if model.window else ())
    for seat in grid.seats:
        first, last = layers[seat.stage]
        head = weights.head if seat.stage == grid.pipeline - 1 else 0
        found[seat.rank] = RankReads(
            stage=seat.stage,
            weights=sum(weights.read[first:last]) + head,
            kv=sum(kv[layer] for layer in range(first, last) if layer not in sliding),
            window_kv=sum(kv[layer] for layer in range(first, last) if layer in sliding),
            window=model.window or 0,
            bytes_per_s=speeds[seat.rank].bytes_per_s,
        )
    return found


def read_reads(data: Any) -> tuple[RankReads, ...]:
    """The reads of all ranks as a run's `plan.json` has them; empty when one is missing."""
    try:
        return tuple(
            RankReads(
                stage=int(each["stage"]),
                weights=int(each["weights"]),
                kv=int(each["kv"]),
                window_kv=int(each.get("window_kv", 0)),
                window=int(each.get("window", 0)),
                bytes_per_s=int(each["bytes_per_s"]),
            )
            for each in [rank["reads"] for rank in data["plan"]["ranks"]]
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return ()


def roofline(reads: Sequence[RankReads], sequences: int, context: float) -> float | None:
    """Tokens a second that no engine can exceed with these bytes; None when nothing is known.

    sequences: at a time; context: tokens of each, on average. The sequences may be cut into as many batches as there
    are stages, which the stages then work on side by side: the best number of batches counts. Arithmetic, links,
    sampling and the engine are free here.
    """
    if not reads or sequences < 1:
        return None
    stages = sorted({each.stage for each in reads})

    def seconds(stage: int, batch: float) -> float:
        mine = [each for each in reads if each.stage == stage]
        return max((each.weights + batch * cached(each)) / max(1, each.bytes_per_s) for each in mine)

    def cached(each: RankReads) -> float:
        return context * each.kv + min(context, each.window) * each.window_kv

    best = 0.0
    for batches in range(1, min(len(stages), sequences) + 1):
        times = [seconds(stage, sequences / batches) for stage in stages]
        best = max(best, sequences / max(sum(times), batches * max(times), 1e-12))
    return best
