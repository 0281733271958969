"""Layers over stages, and the memory and time of every rank that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from cpupp.errors import CpuppError
from cpupp.plan.backend import GroupPlan
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.fit import Fit, remedies
from cpupp.plan.grid import Grid
from cpupp.plan.memory import (
    KV_ENV,
    MemoryNeeds,
    Place,
    block_tokens,
    memory_needs,
    memory_places,
    partition_rooms,
    sequence_bytes,
    too_much,
)
from cpupp.plan.model import ModelFacts
from cpupp.plan.partition import FEMTO, GIB, Problem, StageCost, solve, stage_memory, stage_times
from cpupp.plan.roofline import RankReads, rank_reads
from cpupp.plan.shm_room import ShmRoom
from cpupp.plan.speed import ASSUMED_BYTES_PER_S, ENGINE_NS, LAYER_NS, RankSpeed, hop_ns, levelled, rank_speeds
from cpupp.plan.speed import reduce_ns as reduces_of
from cpupp.plan.threads import CorePlan
from cpupp.plan.tiles import can_tile, has_tiles, tile_bytes, with_room
from cpupp.plan.weights import RankWeights, is_plain

MAX_DEFAULT_KV = 4 * GIB
NUM_DEFAULT_SEQUENCES = 64
WORTH_IT = 1.05
"""How many times as fast the slowest stage must become for another split than vLLM's even one."""
Layers = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The KV cache. one: bytes of one sequence of full length on a rank of each stage; allowed: what each rank may take
    (whole GiB); used: what it will take, as vLLM makes equally many blocks everywhere; limit: the stage that sets them.

    tokens, sequences: what fits, all sequences together; largest_context: the longest that the memory would hold with
    these layers, None when the memory is unknown. All of them None when the model is unknown.
    """

    allowed: dict[int, int]
    used: dict[int, int]
    one: tuple[int, ...] | None
    limit: int | None
    tokens: int | None
    sequences: int | None
    largest_context: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time of one token at batch 1, in nanoseconds, without a KV cache to read.

    stages: of each stage, its all-reduces included; reduces: those alone, of all stages; hops: of each step to the next
    stage. The costs of links, of a layer beside its bytes, and of the engine are assumed constants (plan/speed.py).
    """

    stages: tuple[int, ...]
    reduces: int
    hops: tuple[int, ...]

    @property
    def token_ns(self) -> int:
        """One token through all stages."""
        return sum(self.stages) + sum(self.hops)

    @property
    def tokens_per_s(self) -> float:
        """Of one sequence."""
        return 1e9 / self.token_ns

    @property
    def link_share(self) -> float:
        """The part of a token's time that links take."""
        return (self.reduces + sum(self.hops)) / self.token_ns

    @property
    def slowest(self) -> int:
        """The stage that limits many sequences at once."""
        return self.stages.index(max(self.stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """layers: [first, last) of each stage, None when unknown; how: who chose them; weights: bytes of each rank, None
    when no headers were read; prediction: None when no host was measured; reads: by rank, empty then; tiles: bytes that
    each rank holds beside for its decode steps, of those that do (plan/tiles.py); errors: what does not fit, with the
    sums."""

    layers: Layers | None
    how: str
    weights: dict[int, int | None]
    kv: KvPlan
    prediction: Prediction | None
    errors: tuple[CpuppError, ...]
    reads: Mapping[int, RankReads] = field(default_factory=dict)
    tiles: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What all steps below need. speeds: None when unknown; own_kv: KV cache that the file sets, by host."""

    spec: ClusterSpec
    grid: Grid
    model: ModelFacts
    needs: MemoryNeeds
    places: list[Place]
    speeds: dict[int, RankSpeed] | None
    engine_alone: bool
    reduces: tuple[int, ...]
    hops: tuple[int, ...]
    own_kv: Mapping[str, int]


def place(
    spec: ClusterSpec,
    grid: Grid,
    model: ModelFacts | None,
    cores: CorePlan,
    groups: tuple[GroupPlan, ...],
    rooms: tuple[ShmRoom, ...],
    facts: Mapping[str, HostFacts],
    own_kv: Mapping[str, int],
) -> Placement:
    """Give every stage its layers and every rank its memory. own_kv: bytes by host, where the file sets them.

    Raises CpuppError PLAN-LAYERS when `parallel.layers` does not fit the model, with the equation.
    """
    num_layers = model.num_layers if model else spec.model.num_layers
    check_layers(spec, num_layers)
    if model is None:
        layers = _even(spec, num_layers)
        nothing: dict[int, int | None] = {s.rank: None for s in grid.seats}
        return Placement(layers=layers, how="", weights=nothing, kv=_unknown(grid, own_kv), prediction=None, errors=())
    case = _Case(
        spec=spec,
        grid=grid,
        model=model,
        needs=memory_needs(spec, grid, model),
        places=memory_places(grid, cores.cores, facts, rooms),
        speeds=rank_speeds(grid, cores, facts),
        engine_alone=bool(cores.reserved) or not cores.cores[0],
        reduces=reduces_of(grid, groups),
        hops=hop_ns(grid, groups),
        own_kv=own_kv,
    )
    sizes, how = _choose(case)
    layers = _spans(sizes)
    weights = {s.rank: _weights(case.needs.weights, layers, s.stage) for s in grid.seats}
    kv = _plan_kv(case, layers, weights)
    return Placement(
        layers=layers,
        how=how,
        weights=weights,
        kv=kv,
        prediction=_predict(case, sizes),
        errors=tuple(_errors(case, layers, weights, kv)),
        reads=rank_reads(grid, layers, case.needs.weights, case.needs.per_token, model, case.speeds),
        tiles=_tiles(case, layers, weights, kv, facts),
    )


def check_layers(spec: ClusterSpec, num_layers: int | None) -> None:
    """Refuse `parallel.layers` that do not fit the model or the pipeline, and a pipeline longer than the model."""
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
    if num_layers is not None and num_layers < stages:
        raise CpuppError(
            "PLAN-LAYERS",
            f"layers({num_layers}) < pipeline({stages})",
            hint=f"use at most pipeline: {num_layers}",
        )


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Split layers as vLLM does by default (distributed/utils.py, get_pp_indices): the rest goes to middle stages."""
    sizes = [num_layers // num_stages] * num_stages
    for index in range(num_layers % num_stages):
        sizes[-(index + 2)] += 1
    return tuple(sizes)


def _even(spec: ClusterSpec, num_layers: int | None) -> Layers | None:
    wanted = spec.parallel.layers
    if wanted is None and num_layers is None:
        return None
    sizes = tuple(wanted) if wanted is not None else even_split(num_layers or 0, spec.parallel.pipeline)
    return _spans(sizes)


def _spans(sizes: tuple[int, ...]) -> Layers:
    return tuple((sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes)))


def _choose(case: _Case) -> tuple[tuple[int, ...], str]:
    """Return the number of layers of each stage, and who chose them."""
    wanted = case.spec.parallel.layers
    even = even_split(case.model.num_layers, case.grid.pipeline)
    if wanted is not None:
        return tuple(wanted), "of the cluster file"
    if case.grid.pipeline == 1:
        return even, ""
    problem = _problem(case)
    if problem is None:
        return even, "vLLM's even split: no safetensors headers to read sizes from"
    by = "measured memory bandwidth" if case.speeds else "sizes, as if all ranks were equally fast"
    found = solve(problem)
    if found is None:
        return solve(replace(problem, rooms=())) or even, "no split fits the memory"
    if _is_as_good(problem, even, found):
        return even, f"vLLM's even split: no other is {WORTH_IT - 1:.0%} faster, by {by}"
    coarse = _problem(case, steps=1)
    steady = solve(coarse) if coarse else None
    if steady is not None and _is_as_good(problem, steady, found):
        found = steady
    return found, f"the slowest stage is as fast as it can be, by {by}"


def _is_as_good(problem: Problem, steady: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Whether the steadier split fits and is about as fast: the other would change with the noise of measurements."""
    memory = stage_memory(problem, steady)
    fit = all(sum(memory[s] * n for s, n in room.num_ranks.items()) <= room.limit for room in problem.rooms)
    return fit and max(stage_times(problem, steady)) <= WORTH_IT * max(stage_times(problem, found))


def _problem(case: _Case, steps: int = 2) -> Problem | None:
    """What the partition solves, in speeds coarse enough to give the same answer tomorrow (steps: see `levelled`)."""
    weights = case.needs.weights
    if weights is None:
        return None
    return Problem(
        read=weights.read,
        held=weights.layers,
        kv=case.needs.sequence,
        stages=_stage_costs(case, weights, levelled(case.speeds, steps) if case.speeds else None),
        rooms=partition_rooms(case.grid, case.places),
    )


def _stage_costs(case: _Case, weights: RankWeights, speeds: Mapping[int, RankSpeed] | None) -> tuple[StageCost, ...]:
    """The slowest rank of each stage, in the partition's units."""
    costs = []
    for stage in range(case.grid.pipeline):
        ranks = [seat.rank for seat in case.grid.seats if seat.stage == stage]
        rate = float(min(speeds[rank].bytes_per_s for rank in ranks) if speeds else ASSUMED_BYTES_PER_S)
        share = min(speeds[rank].share for rank in ranks) if speeds else 1.0
        per_byte = max(1, round(1e15 / rate))
        extra = weights.head * per_byte // FEMTO if stage == case.grid.pipeline - 1 else 0
        if stage == 0 and speeds and not case.engine_alone:
            extra += round(ENGINE_NS / share)
        per_layer = round(LAYER_NS / share) + case.reduces[stage]
        fixed = case.needs.runtime[stage] + _beside(weights, stage, case.grid.pipeline)
        costs.append(StageCost(per_byte=per_byte, per_layer=per_layer, extra=extra, fixed=fixed))
    return tuple(costs)


def _beside(weights: RankWeights, stage: int, num_stages: int) -> int:
    """Bytes of weights that a rank holds beside its layers."""
    if num_stages == 1:
        return weights.single
    return weights.first if stage == 0 else weights.last if stage == num_stages - 1 else weights.middle


def _weights(weights: RankWeights | None, layers: Layers, stage: int) -> int | None:
    if weights is None:
        return None
    first, last = layers[stage]
    return sum(weights.layers[first:last]) + _beside(weights, stage, len(layers))


def _predict(case: _Case, sizes: tuple[int, ...]) -> Prediction | None:
    weights = case.needs.weights
    if weights is None or case.speeds is None:
        return None
    problem = Problem(
        read=weights.read,
        held=weights.layers,
        kv=case.needs.sequence,
        stages=_stage_costs(case, weights, case.speeds),
        rooms=(),
    )
    reduces = sum(size * cost for size, cost in zip(sizes, case.reduces, strict=True))
    return Prediction(stages=stage_times(problem, sizes), reduces=reduces, hops=case.hops)


def _unknown(grid: Grid, own_kv: Mapping[str, int]) -> KvPlan:
    allowed = {seat.rank: own_kv.get(seat.host, MAX_DEFAULT_KV) for seat in grid.seats}
    return KvPlan(
        allowed=allowed,
        used=allowed,
        one=None,
        limit=None,
        tokens=None,
        sequences=None,
        largest_context=None,
        reason="model unknown: vLLM's default",
    )


def _plan_kv(case: _Case, layers: Layers, weights: Mapping[int, int | None]) -> KvPlan:
    """At least one sequence of full length; up to 64 or 4 GiB on the widest stage, as far as the memory goes."""
    needs, grid = case.needs, case.grid
    one = _of_stages(needs.sequence, layers)
    widest = max(one)
    want = max(widest, min(MAX_DEFAULT_KV, NUM_DEFAULT_SEQUENCES * widest), 1)
    while not _holds(case, _allowed(case, one, want), weights) and want > widest:
        want = max(widest, want - GIB)
    allowed = _allowed(case, one, want)
    caching = [seat for seat in grid.seats if one[seat.stage]] or list(grid.seats)
    limit = min(caching, key=lambda seat: allowed[seat.rank] / max(1, one[seat.stage]))
    best, least = allowed[limit.rank], max(1, one[limit.stage])
    tokens = _of_stages(needs.per_token, layers)
    block = block_tokens(case.spec, case.model)
    sequences = best // least
    return KvPlan(
        allowed=allowed,
        used={seat.rank: min(allowed[seat.rank], one[seat.stage] * best // least) for seat in grid.seats},
        one=one,
        limit=limit.stage,
        tokens=sequences * needs.context
        if case.model.sliding_layers or not tokens[limit.stage]
        else best // (tokens[limit.stage] * block) * block,
        sequences=sequences,
        largest_context=_largest_context(case, layers, weights),
        reason=f"{needs.context} tokens * {max(tokens)} bytes = {widest / GIB:.2f} GiB a sequence on the widest stage",
    )


def _of_stages(values: tuple[int, ...], layers: Layers) -> tuple[int, ...]:
    return tuple(sum(values[first:last]) for first, last in layers)


def _allowed(case: _Case, one: tuple[int, ...], want: int) -> dict[int, int]:
    """Whole GiB of each rank, when the widest stage wants so many bytes; a vLLM node has one value for its ranks."""
    widest = max(1, *one)
    share = {s.rank: max(1, ceil(want * one[s.stage] / widest / GIB)) * GIB for s in case.grid.seats}
    nodes: dict[int, int] = {}
    for seat in case.grid.seats:
        nodes[seat.node_rank] = max(nodes.get(seat.node_rank, 0), share[seat.rank])
    return {s.rank: case.own_kv.get(s.host, nodes[s.node_rank]) for s in case.grid.seats}


def _holds(case: _Case, kv: Mapping[int, int], weights: Mapping[int, int | None]) -> bool:
    runtime = _runtime(case)
    return not any(too_much(place, weights, kv, runtime, "") for place in case.places)


def _tiles(
    case: _Case, layers: Layers, weights: Mapping[int, int | None], kv: KvPlan, facts: Mapping[str, HostFacts]
) -> dict[int, int]:
    sizes = case.needs.weights
    if sizes is None or not can_tile(case.spec, case.model):
        return {}
    copies = {
        seat.rank: tile_bytes(sizes, layers[seat.stage], is_last=seat.stage == case.grid.pipeline - 1)
        for seat in case.grid.seats
        if has_tiles(facts.get(seat.host))
    }
    free = {seat.host: facts[seat.host].memory_available for seat in case.grid.seats if seat.host in facts}
    allowed = with_room(copies, case.places, weights, kv.used, _runtime(case), free)
    without = {seat.node_rank for seat in case.grid.seats if seat.rank not in allowed}  # a vLLM node is told once
    return {seat.rank: allowed[seat.rank] for seat in case.grid.seats if seat.node_rank not in without}


def _runtime(case: _Case) -> dict[int, int]:
    return {seat.rank: case.needs.runtime[seat.stage] for seat in case.grid.seats}


def _largest_context(case: _Case, layers: Layers, weights: Mapping[int, int | None]) -> int | None:
    """The longest sequence that the memory would hold, in whole blocks, at most what the model can."""
    known = {name for place in case.places for name in place.hosts}
    if not {seat.host for seat in case.grid.seats} <= known or None in weights.values():
        return None
    block = block_tokens(case.spec, case.model)
    most = max(case.model.max_position or 0, case.needs.context)

    def holds(context: int) -> bool:
        one = _of_stages(sequence_bytes(case.spec, case.grid, case.model, context), layers)
        allowed = _allowed(case, one, max(one))
        enough = all(allowed[seat.rank] >= one[seat.stage] for seat in case.grid.seats)
        return enough and _holds(case, allowed, weights)

    if holds(most):
        return most
    low, high = 0, most // block
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle * block) else (low, middle - 1)
    return low * block


def _errors(case: _Case, layers: Layers, weights: Mapping[int, int | None], kv: KvPlan) -> list[CpuppError]:
    """Refuse what does not fit: a machine, a cgroup, a NUMA node, a KV cache below one sequence."""
    runtime = _runtime(case)
    found = [too_much(p, weights, kv.allowed, runtime, "") for p in case.places]
    if any(found):
        hint = _hint(case)
        found = [too_much(p, weights, kv.allowed, runtime, hint) for p in case.places]
    errors = [error for error in found if error is not None]
    stages = {seat.host: seat.stage for seat in reversed(case.grid.seats)}
    for host in case.spec.hosts:
        mine = case.own_kv.get(host.name)
        need = kv.one[stages[host.name]] if kv.one else 0
        if mine is not None and mine < need:
            message = f"host {host.name}: KV cache({mine / GIB:.0f} GiB) < one sequence: {kv.reason}"
            hint = f"raise {KV_ENV}, or lower engine.args.max_model_len"
            errors.append(CpuppError("PLAN-KV", message, hint=hint))
    return errors


def _hint(case: _Case) -> str:
    problem = _problem(case)
    fallback = f"lower engine.args.max_model_len or {KV_ENV}, or spread over more hosts"
    if problem is None or case.own_kv:
        return fallback
    weights, num_stages = case.needs.weights, case.grid.pipeline
    assert weights is not None
    fit = Fit(
        problem=problem,
        context=case.needs.context,
        most=case.model.max_position or case.needs.context,
        block=block_tokens(case.spec, case.model),
        sequence=lambda tokens: sequence_bytes(case.spec, case.grid, case.model, tokens),
        hosts=[seat.host for seat in case.grid.seats],
        stages=[seat.stage for seat in case.grid.seats],
        beside=(
            _beside(weights, num_stages - 1, num_stages),
            _beside(weights, num_stages - 1, num_stages + 1),
            weights.last,
        ),
        can_shrink=is_plain(case.model),
    )
    found = remedies(fit)
    return f"any one of these would fit: {'; '.join(found)}" if found else fallback
