"""What ranks need of memory, where it is, and what of it does not fit, in bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from cpupp.errors import CpuppError
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid
from cpupp.plan.model import ModelFacts
from cpupp.plan.partition import GIB, Room
from cpupp.plan.shm_room import ShmRoom
from cpupp.plan.weights import RankWeights, engine_arg, kv_bytes_per_layer, rank_weights, running_bytes

KV_ENV = "VLLM_CPU_KVCACHE_SPACE"
DEFAULT_CONTEXT = 8192
RANK_OVERHEAD = 1 * GIB
"""Measured: a vLLM 0.32 worker of a small model holds about 0.9 GiB of libraries, buffers and arenas."""
ENGINE_OVERHEAD = 1 * GIB
"""API server and engine on the head."""
BLOCK_TOKENS = 128
LATENT_BLOCK_TOKENS = 16
TOKENS_PER_STEP = 2048
SEQUENCES_PER_STEP = 128
"""vLLM's defaults on CPU for one rank (EngineArgs.get_batch_defaults); they grow with the number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What ranks need before layers are given out.

    weights: None when no headers were read; context: tokens of one sequence; per_token, sequence: KV cache of one token
    and of one such sequence, in each layer; runtime: of one rank of each stage (libraries, activations).
    """

    weights: RankWeights | None
    context: int
    per_token: tuple[int, ...]
    sequence: tuple[int, ...]
    runtime: tuple[int, ...]


def memory_needs(spec: ClusterSpec, grid: Grid, model: ModelFacts) -> MemoryNeeds:
    """Size everything but the KV cache's number of sequences."""
    context = context_length(spec, model)
    token = kv_bytes_per_layer(spec, model, grid.tensor)
    per_token = tuple(0 if layer in model.stateful_layers else token for layer in range(model.num_layers))
    weights = rank_weights(spec, model, grid.tensor)
    runtime = [RANK_OVERHEAD + _activations(spec, grid, model, s) for s in range(grid.pipeline)]
    if weights is not None:
        # Embedding and head are held twice, as stored and packed by oneDNN (rank/packed_linear.py packs the head
        # alone): vLLM 0.32 packs with `remove_weight=False` there, because both may be the same tensor, then twice.
        runtime[0] += weights.table
        runtime[-1] += weights.head + (weights.table if model.tied and grid.pipeline > 1 else 0)
    return MemoryNeeds(
        weights=weights,
        context=context,
        per_token=per_token,
        sequence=sequence_bytes(spec, grid, model, context),
        runtime=tuple(runtime),
    )


def sequence_bytes(spec: ClusterSpec, grid: Grid, model: ModelFacts, context: int) -> tuple[int, ...]:
    """KV cache of one sequence of `context` tokens in each layer on one rank, in whole blocks."""
    token = kv_bytes_per_layer(spec, model, grid.tensor)
    block = block_tokens(spec, model)
    step = tokens_per_step(spec, grid)
    kept = [context] * model.num_layers
    for layer in model.sliding_layers:
        kept[layer] = min(context, (model.window or context) + step)
    for layer in model.stateful_layers:
        kept[layer] = 0
    return tuple(ceil(tokens / block) * block * token for tokens in kept)


def block_tokens(spec: ClusterSpec, model: ModelFacts) -> int:
    """Tokens of one block of the KV cache."""
    wanted = engine_arg(spec, "block_size")
    if model.is_latent:
        return LATENT_BLOCK_TOKENS
    return wanted if isinstance(wanted, int) and wanted > 0 else BLOCK_TOKENS


def tokens_per_step(spec: ClusterSpec, grid: Grid) -> int:
    """Tokens that vLLM computes in one step at most."""
    wanted = engine_arg(spec, "max_num_batched_tokens")
    return wanted if isinstance(wanted, int) and wanted > 0 else TOKENS_PER_STEP * len(grid.seats)


def _activations(spec: ClusterSpec, grid: Grid, model: ModelFacts, stage: int) -> int:
    """Estimated: hidden states, residual, attention and the widest MLP of a whole step; logits on the last stage."""
    tokens = tokens_per_step(spec, grid)
    total = tokens * (6 * model.hidden_size + ceil(model.widest / grid.tensor)) * running_bytes(spec, model)
    if stage == grid.pipeline - 1:
        wanted = engine_arg(spec, "max_num_seqs")
        rows = wanted if isinstance(wanted, int) and wanted > 0 else SEQUENCES_PER_STEP * len(grid.seats)
        total += min(rows, tokens) * model.vocab_size * 2 * 4  # float32, and a copy to sample from
    return total


def context_length(spec: ClusterSpec, model: ModelFacts) -> int:
    """Tokens of the longest sequence: engine.args.max_model_len, else the model's."""
    return written_context(spec) or model.max_position or DEFAULT_CONTEXT


def written_context(spec: ClusterSpec) -> int:
    """What engine.args.max_model_len says (also `32k`, as vLLM reads it); 0 where it leaves that to the model."""
    match = _TOKENS.fullmatch(str(engine_arg(spec, "max_model_len")))
    return 0 if match is None else int(float(match[1]) * _UNITS[match[2]])


def argument_errors(spec: ClusterSpec) -> list[CpuppError]:
    """Values that vLLM cannot parse: it would say so only once it has been imported on every host."""
    found = []
    length, dtype = engine_arg(spec, "max_model_len"), engine_arg(spec, "dtype")
    if length not in (None, "auto", "-1", -1) and not _TOKENS.fullmatch(str(length)):
        message = f"engine.args.max_model_len {length!r} is no number of tokens"
        found.append(CpuppError("PLAN-CONTEXT", message, hint="8192 or 32k, or leave it out for the model's own"))
    if dtype is not None and dtype not in _DTYPES:
        message = f"engine.args.dtype {dtype!r} is none that vLLM knows"
        found.append(CpuppError("PLAN-DTYPE", message, hint=f"one of {', '.join(_DTYPES)}"))
    return found


_TOKENS = re.compile(r"(\d{1,12}(?:\.\d+)?)([kKmMgG]?)")
_UNITS = {"": 1, "k": 1000, "K": 1 << 10, "m": 1000_000, "M": 1 << 20, "g": 1000_000_000, "G": 1 << 30}
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
"""vLLM 0.18 to 0.32 (config/model.py, ModelDType)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A piece of memory that ranks share: a machine, a cgroup or a NUMA node.

    taken: bytes of links and, on the head, of API server and engine.
    """

    what: str
    hosts: tuple[str, ...]
    limit: int
    taken: int
    ranks: tuple[int, ...]


def memory_places(
    grid: Grid, cores: Mapping[int, tuple[int, ...]], facts: Mapping[str, HostFacts], rooms: tuple[ShmRoom, ...]
) -> list[Place]:
    """Every piece of memory that the facts tell of and ranks are in.

    cores: CPU numbers of each rank. Entries of one kernel (equal boot id) share its memory. vLLM binds all memory of a
    rank to the NUMA node of its first core (numa_set_membind; vllm #15800).
    """
    machines: dict[str, list[str]] = {}
    for name, fact in facts.items():
        machines.setdefault(fact.boot_id, []).append(name)
    places = []
    for names in machines.values():
        where = f"host{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        machine = _place(f"{where}: memory", names, facts[names[0]].memory_total, grid, rooms)
        places.append(machine)
        for name in names:
            limit = facts[name].memory_limit
            if limit is not None and limit < facts[name].memory_total:
                what = f"host {name}: cgroup memory limit"
                places.append(_place(what, [name], limit, grid, rooms))
        places += _numa_places(machine, facts, cores)
    return [place for place in places if place.ranks]


def _place(what: str, names: list[str], limit: int, grid: Grid, rooms: tuple[ShmRoom, ...]) -> Place:
    ranks = tuple(seat.rank for seat in grid.seats if seat.host in names)
    links = sum(room.links for room in rooms if set(room.hosts) <= set(names))
    engine = ENGINE_OVERHEAD if 0 in ranks else 0
    return Place(what=what, hosts=tuple(names), limit=limit, taken=links + engine, ranks=ranks)


def _numa_places(machine: Place, facts: Mapping[str, HostFacts], cores: Mapping[int, tuple[int, ...]]) -> list[Place]:
    fact = facts[machine.hosts[0]]
    node_of = {cpu.cpu: cpu.numa for cpu in fact.cpus}
    where = machine.what.rpartition(":")[0]
    places = []
    for numa in fact.numa:
        own = tuple(r for r in machine.ranks if cores[r] and node_of.get(min(cores[r])) == numa.node)
        if own and numa.memory_total < fact.memory_total:
            what = f"{where}: NUMA node {numa.node}"
            places.append(Place(what=what, hosts=machine.hosts, limit=numa.memory_total, taken=0, ranks=own))
    return places


def partition_rooms(grid: Grid, places: list[Place]) -> tuple[Room, ...]:
    """The same, as the partition takes them."""
    rooms = []
    for place in places:
        stages = [grid.seats[rank].stage for rank in place.ranks]
        num_ranks = {stage: stages.count(stage) for stage in dict.fromkeys(stages)}
        rooms.append(Room(limit=place.limit - place.taken, num_ranks=num_ranks))
    return tuple(rooms)


def sizes_in(
    place: Place, weights: Mapping[int, int | None], kv: Mapping[int, int], runtime: Mapping[int, int]
) -> dict[str, int]:
    """Bytes of everything that a place holds, by what it is. weights, kv, runtime: bytes of each rank."""
    return {
        "weights": sum(weights[rank] or 0 for rank in place.ranks),
        "KV": sum(kv[rank] for rank in place.ranks),
        "runtime": sum(runtime[rank] for rank in place.ranks),
        "engine and links": place.taken,
    }


def too_much(
    place: Place, weights: Mapping[int, int | None], kv: Mapping[int, int], runtime: Mapping[int, int], hint: str
) -> CpuppError | None:
    """Refuse a place that does not hold its ranks, with the whole sum. weights, kv, runtime: bytes of each rank."""
    sizes = sizes_in(place, weights, kv, runtime)
    need = sum(sizes.values())
    if need <= place.limit:
        return None
    parts = " + ".join(f"{name}({size / GIB:.1f})" for name, size in sizes.items() if size)
    num = f"{len(place.ranks)} rank{'s' if len(place.ranks) > 1 else ''}"
    short = f"{(need - place.limit) / GIB:.1f} GiB short"
    message = f"{place.what}({place.limit / GIB:.1f} GiB) < {parts} = {need / GIB:.1f} GiB of {num}: {short}"
    return CpuppError("PLAN-MEMORY", message, hint=hint)
