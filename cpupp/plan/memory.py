"""Layers over stages, and weights and KV cache per rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from cpupp.errors import CpuppError
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid
from cpupp.plan.model import ModelFacts, dtype_bytes

GIB = 1 << 30
KV_ENV = "VLLM_CPU_KVCACHE_SPACE"
MAX_DEFAULT_KV = 4 * GIB
NUM_DEFAULT_SEQUENCES = 64
DEFAULT_CONTEXT = 8192
RANK_OVERHEAD = 1 * GIB
"""Measured: a vLLM 0.32 worker of a small model holds about 0.9 GiB of libraries, buffers and arenas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of each rank. weights: None when no headers were read; kv: the KV cache, whole GiB (vLLM's unit).

    kv_one: KV cache of one sequence of full length on the widest stage, None when the model is unknown.
    """

    weights: dict[int, int | None]
    kv: int
    kv_one: int | None
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
        nothing: dict[int, int | None] = {s.rank: None for s in grid.seats}
        return MemoryPlan(weights=nothing, kv=MAX_DEFAULT_KV, kv_one=None, kv_reason="model unknown: vLLM's default")
    weights = {s.rank: _weights(s.stage, layers, model, grid, weight_scale(spec, model)) for s in grid.seats}
    context = context_length(spec, model)
    widest = max(last - first for first, last in layers)
    per_token = widest * kv_bytes_per_layer(spec, model, grid.tensor)
    one = context * per_token
    default = min(MAX_DEFAULT_KV, NUM_DEFAULT_SEQUENCES * one)
    kv = ceil(max(one, default, 1) / GIB) * GIB
    reason = f"{context} tokens * {per_token} bytes = {one / GIB:.2f} GiB a sequence on the widest stage"
    return MemoryPlan(weights=weights, kv=kv, kv_one=one, kv_reason=reason)


def context_length(spec: ClusterSpec, model: ModelFacts) -> int:
    """Tokens of the longest sequence: engine.args.max_model_len (also `32k`, as vLLM reads it), else the model's."""
    own = model.max_position or DEFAULT_CONTEXT
    value = engine_arg(spec, "max_model_len")
    if isinstance(value, int) and value > 0:
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", str(value))
    if match is None:  # auto, -1, or what vLLM itself will refuse
        return own
    return int(float(match[1]) * _UNITS[match[2]]) or own


_UNITS = {"": 1, "k": 1000, "K": 1 << 10, "m": 1000_000, "M": 1 << 20, "g": 1000_000_000, "G": 1 << 30}


def engine_arg(spec: ClusterSpec, name: str) -> object:
    """A vLLM argument of the file by its name with underscores, however it was spelled there; None when not given."""
    return next((v for key, v in spec.engine.args.items() if key.lstrip("-").replace("-", "_") == name), None)


def weight_scale(spec: ClusterSpec, model: ModelFacts) -> float:
    """Bytes in memory for each stored byte: `dtype` converts plain weights, and float32 is halved by default."""
    stored = dtype_bytes(model.dtype)
    wanted = str(engine_arg(spec, "dtype") or "auto")
    running = min(stored, 2) if wanted == "auto" else dtype_bytes(wanted)
    return running / stored if stored > 1 else 1.0


def kv_bytes_per_layer(spec: ClusterSpec, model: ModelFacts, tensor: int) -> int:
    """KV cache bytes of one token in one layer on one rank."""
    whole = model.kv_bytes * weight_scale(spec, model)
    if str(engine_arg(spec, "kv_cache_dtype") or "auto").startswith("fp8"):
        whole = model.kv_bytes / dtype_bytes(model.dtype)
    heads = ceil(model.num_kv_shards / tensor)  # fewer KV heads than ranks: each rank keeps a whole one
    return ceil(whole * heads / model.num_kv_shards)


def _weights(
    stage: int, layers: tuple[tuple[int, int], ...], model: ModelFacts, grid: Grid, scale: float
) -> int | None:
    if len(model.layer_bytes) != model.num_layers:
        return None
    first, last = layers[stage]
    total = sum(model.layer_bytes[first:last])
    if grid.pipeline == 1:
        total += model.other_bytes
    elif stage == 0:
        total += model.first_bytes
    elif stage == grid.pipeline - 1:
        total += model.last_bytes
    return ceil(total * scale / grid.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A piece of memory that ranks share: a machine, a cgroup or a NUMA node."""

    what: str
    limit: int
    ranks: tuple[int, ...]


def memory_errors(
    spec: ClusterSpec,
    grid: Grid,
    plan: MemoryPlan,
    kv: Mapping[str, int],
    cores: Mapping[int, tuple[int, ...]],
    facts: Mapping[str, HostFacts],
) -> list[CpuppError]:
    """Refuse what does not fit, with the whole sum: a machine, a cgroup, a NUMA node, a KV cache below one sequence.

    kv: bytes of KV cache a rank, by host (a host may set its own); cores: CPU numbers of each rank. Entries of one
    kernel (equal boot id) share its memory. vLLM binds a rank's memory to the NUMA nodes of its cores (vllm #15800).
    """
    hosts = {seat.rank: seat.host for seat in grid.seats}
    errors = [_too_much(place, hosts, plan, kv) for place in _places(grid, cores, facts)]
    found = [error for error in errors if error is not None]
    for host in spec.hosts:
        if plan.kv_one is not None and kv[host.name] < plan.kv_one:
            message = f"host {host.name}: KV cache({kv[host.name] / GIB:.0f} GiB) < one sequence: {plan.kv_reason}"
            hint = f"raise {KV_ENV}, or lower engine.args.max_model_len"
            found.append(CpuppError("PLAN-KV", message, hint=hint))
    return found


def _places(grid: Grid, cores: Mapping[int, tuple[int, ...]], facts: Mapping[str, HostFacts]) -> list[_Place]:
    machines: dict[str, list[str]] = {}
    for name, fact in facts.items():
        machines.setdefault(fact.boot_id, []).append(name)
    places = []
    for names in machines.values():
        ranks = tuple(seat.rank for seat in grid.seats if seat.host in names)
        where = f"host{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        places.append(_Place(what=f"{where}: memory", limit=facts[names[0]].memory_total, ranks=ranks))
        for name in names:
            limit = facts[name].memory_limit
            if limit is not None and limit < facts[name].memory_total:
                own = tuple(seat.rank for seat in grid.seats if seat.host == name)
                places.append(_Place(what=f"host {name}: cgroup memory limit", limit=limit, ranks=own))
        places += _numa_places(where, facts[names[0]], ranks, cores)
    return places


def _numa_places(
    where: str, fact: HostFacts, ranks: tuple[int, ...], cores: Mapping[int, tuple[int, ...]]
) -> list[_Place]:
    node_of = {cpu.cpu: cpu.numa for cpu in fact.cpus}
    places = []
    for numa in fact.numa:
        own = tuple(r for r in ranks if cores[r] and {node_of.get(cpu) for cpu in cores[r]} == {numa.node})
        if own and numa.memory_total < fact.memory_total:
            places.append(_Place(what=f"{where}: NUMA node {numa.node}", limit=numa.memory_total, ranks=own))
    return places


def _too_much(place: _Place, hosts: Mapping[int, str], plan: MemoryPlan, kv: Mapping[str, int]) -> CpuppError | None:
    known = [plan.weights[rank] for rank in place.ranks]
    weights = sum(size for size in known if size is not None)
    cache = sum(kv[hosts[rank]] for rank in place.ranks)
    runtime = len(place.ranks) * RANK_OVERHEAD
    need = weights + cache + runtime
    if need <= place.limit:
        return None
    parts = f"weights({weights / GIB:.1f}) + KV({cache / GIB:.0f}) + runtime({runtime / GIB:.0f})"
    num = f"{len(place.ranks)} rank{'s' if len(place.ranks) > 1 else ''}"
    return CpuppError(
        "PLAN-MEMORY",
        f"{place.what}({place.limit / GIB:.1f} GiB) < {parts} = {need / GIB:.1f} GiB of {num}",
        hint=f"lower engine.args.max_model_len or {KV_ENV}, or spread over more hosts",
    )
