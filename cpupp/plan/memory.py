"""Layers over stages, and weights and KV cache per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from cpupp.errors import CpuppError
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid
from cpupp.plan.model import ModelFacts

GIB = 1 << 30
MAX_DEFAULT_KV = 4 * GIB
NUM_DEFAULT_SEQUENCES = 64
DEFAULT_CONTEXT = 8192
RANK_OVERHEAD = 1 * GIB
"""Measured: a vLLM 0.32 worker of a small model holds about 0.9 GiB of libraries, buffers and arenas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of each rank. weights: None when no headers were read; kv: the KV cache, whole GiB (vLLM's unit)."""

    weights: dict[int, int | None]
    kv: int
    kv_reason: str


def partition_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Split layers as vLLM does by default (distributed/utils.py, get_pp_indices): the rest goes to middle stages."""
    sizes = [num_layers // num_stages] * num_stages
    for index in range(num_layers % num_stages):
        sizes[-(index + 2)] += 1
    return tuple(sizes)


def plan_layers(spec: ClusterSpec, num_layers: int | None) -> tuple[tuple[int, int], ...] | None:
    """Return [first, last) of each stage, or None when the layer count is unknown.

    Raises CpuppError PLAN-LAYERS when `parallel.layers` does not fit, with the equation.
    """
    stages, wanted = spec.parallel.pipeline, spec.parallel.layers
    if wanted is not None and len(wanted) != stages:
        raise CpuppError(
            "PLAN-LAYERS",
            f"parallel.layers has {len(wanted)} numbers, pipeline is {stages}",
            hint="give one number of layers for each stage, or leave parallel.layers out",
        )
    if wanted is not None and num_layers is not None and sum(wanted) != num_layers:
        equation = f"layers({' + '.join(map(str, wanted))} = {sum(wanted)}) != model({num_layers})"
        raise CpuppError("PLAN-LAYERS", equation, hint="make parallel.layers sum to the model's layer count")
    if wanted is None and num_layers is None:
        return None
    if num_layers is not None and num_layers < stages:
        raise CpuppError(
            "PLAN-LAYERS",
            f"layers({num_layers}) < pipeline({stages})",
            hint=f"use at most pipeline: {num_layers}",
        )
    sizes = tuple(wanted) if wanted is not None else partition_layers(num_layers or 0, stages)
    starts = [sum(sizes[:i]) for i in range(stages)]
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def plan_memory(
    spec: ClusterSpec,
    grid: Grid,
    layers: tuple[tuple[int, int], ...] | None,
    model: ModelFacts | None,
) -> MemoryPlan:
    """Size weights and KV cache. The KV cache is equal on all ranks: vLLM takes the smallest block count anyway."""
    if model is None or layers is None:
        return MemoryPlan(
            weights={s.rank: None for s in grid.seats}, kv=MAX_DEFAULT_KV, kv_reason="model unknown: vLLM's default"
        )
    weights = {s.rank: _weights(s.stage, layers, model, grid) for s in grid.seats}
    context = int(spec.engine.args.get("max_model_len") or model.max_position or DEFAULT_CONTEXT)
    widest = max(last - first for first, last in layers)
    per_token = ceil(widest * model.kv_bytes / min(grid.tensor, model.num_kv_heads))
    one = context * per_token
    default = min(MAX_DEFAULT_KV, NUM_DEFAULT_SEQUENCES * one)
    kv = ceil(max(one, default, 1) / GIB) * GIB
    reason = f"{context} tokens * {per_token} bytes = {one / GIB:.2f} GiB a sequence on the widest stage"
    return MemoryPlan(weights=weights, kv=kv, kv_reason=reason)


def _weights(stage: int, layers: tuple[tuple[int, int], ...], model: ModelFacts, grid: Grid) -> int | None:
    if len(model.layer_bytes) != model.num_layers:
        return None
    first, last = layers[stage]
    total = sum(model.layer_bytes[first:last])
    if stage in (0, grid.pipeline - 1):
        total += model.other_bytes
    return ceil(total / grid.tensor)


def memory_errors(
    spec: ClusterSpec, grid: Grid, plan: MemoryPlan, kv: Mapping[str, int], facts: Mapping[str, HostFacts]
) -> list[CpuppError]:
    """Refuse hosts whose ranks need more memory than the machine has, with the whole sum.

    kv: bytes of KV cache a rank, by host (a host may set its own).
    """
    errors = []
    for host in spec.hosts:
        fact = facts.get(host.name)
        if fact is None:
            continue
        ranks = [s.rank for s in grid.seats if s.host == host.name]
        known = [plan.weights[r] for r in ranks]
        weights = sum(w for w in known if w is not None)
        need = weights + len(ranks) * (kv[host.name] + RANK_OVERHEAD)
        limit = min(fact.memory_total, fact.memory_limit or fact.memory_total)
        if need > limit:
            parts = f"weights({weights / GIB:.1f}) + {len(ranks)} * (KV({kv[host.name] / GIB:.0f}) + runtime(1))"
            errors.append(
                CpuppError(
                    "PLAN-MEMORY",
                    f"host {host.name}: {parts} = {need / GIB:.1f} GiB > memory({limit / GIB:.1f} GiB)",
                    hint="lower engine.args.max_model_len or VLLM_CPU_KVCACHE_SPACE, or spread over more hosts",
                )
            )
    return errors
