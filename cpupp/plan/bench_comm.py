"""`cpupp bench comm`, the pure part: what is measured, by which commands, and what the times mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cpupp.errors import CpuppError
from cpupp.plan.bench_order import ALL_REDUCE, BENCH_ENV, HOP, PATHS, BenchGroup, BenchOrder, BenchTarget, BenchTimes
from cpupp.plan.command import RankCommand
from cpupp.plan.model import ModelFacts, dtype_bytes
from cpupp.plan.plan import Plan
from cpupp.plan.secret import looks_secret

KIB, MIB = 1 << 10, 1 << 20
HOP_SIZES = (16 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB)
REDUCE_SIZES = (8 * KIB, 64 * KIB, 512 * KIB, 8 * MIB)
BUDGET_S, QUICK_BUDGET_S = 60.0, 8.0
"""Seconds of measuring in all, which targets and sizes share; starting the ranks comes on top."""
MAX_BLOCK_S = 5.0
ROUNDS, QUICK_ROUNDS = 5, 3
RANK_TIMEOUT_S = 300.0
REDUCES_PER_LAYER = 2
_NOT_OURS = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_PP_LAYER_PARTITION")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One row of the result: microseconds one way (hop) or for the whole operation, over `runs` runs."""

    op: str
    group: str
    ranks: tuple[int, ...]
    bytes: int
    path: str
    median_us: float
    p10_us: float
    p90_us: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """What one path costs a token of the model on its way through all stages, in microseconds.

    hops: over the slowest link of each step; all_reduces: two a layer, each in the group of its stage. None: this path
    was not measured everywhere.
    """

    path: str
    hops_us: float
    all_reduces_us: float

    @property
    def total_us(self) -> float:
        """Both."""
        return self.hops_us + self.all_reduces_us


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """What one token sends: bytes of a hop (hidden states and residual) and of an all-reduce (hidden states)."""

    hop: int
    all_reduce: int
    num_hops: int
    num_all_reduces: int


def bench_targets(plan: Plan) -> tuple[BenchTarget, ...]:
    """Every link between neighbouring stages, and an all-reduce of every TP group.

    Raises CpuppError BENCH-ALONE when no rank talks to another.
    """
    targets = []
    for group in plan.groups:
        transport = {(link.src, link.dst): link.transport for link in group.links}
        if group.kind == "pp":
            for pair in zip(group.ranks, group.ranks[1:], strict=False):
                shared = transport[pair] == "shm"
                targets.append(BenchTarget(op=HOP, group=group.name, ranks=pair, shared=shared))
        else:
            shared = group.backend == "shm"
            targets.append(BenchTarget(op=ALL_REDUCE, group=group.name, ranks=group.ranks, shared=shared))
    if not targets:
        raise CpuppError(
            "BENCH-ALONE",
            "the plan has one rank, which talks to nobody: there is nothing to measure",
            hint="give a cluster file with pipeline or tensor of 2 and more",
        )
    return tuple(sorted(targets, key=lambda t: (t.op != HOP, t.group, t.ranks)))


def token_bytes(plan: Plan) -> TokenBytes | None:
    """What one token of the plan's model sends; None when nobody could read the model."""
    model = plan.model_facts
    if model is None:
        return None
    row = model.hidden_size * _activation_bytes(plan, model)
    return TokenBytes(
        hop=2 * row,
        all_reduce=row,
        num_hops=plan.pipeline - 1,
        num_all_reduces=REDUCES_PER_LAYER * model.num_layers if plan.tensor > 1 else 0,
    )


def _activation_bytes(plan: Plan, model: ModelFacts) -> int:
    wanted = str(plan.args.get("dtype", "auto"))
    return max(2, dtype_bytes(model.dtype if wanted == "auto" else wanted))  # what is stored in 8 bits runs in 16


def bench_sizes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Bytes to measure of each op, ascending: one token of the model, and the round sizes."""
    token = token_bytes(plan)
    own = {HOP: token.hop, ALL_REDUCE: token.all_reduce} if token else {}
    rounds = {HOP: HOP_SIZES, ALL_REDUCE: REDUCE_SIZES}
    return {op: tuple(sorted({*sizes, *([own[op]] if op in own else [])})) for op, sizes in rounds.items()}


def bench_order(plan: Plan, rank: int, *, quick: bool) -> BenchOrder:
    """What one rank of the plan is told. Raises CpuppError BENCH-ALONE."""
    targets, sizes = bench_targets(plan), bench_sizes(plan)
    num_blocks = sum(len(sizes[target.op]) for target in targets)
    node = next(node for node in plan.nodes if rank in node.ranks)
    return BenchOrder(
        rank=rank,
        world_size=len(plan.ranks),
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        address=node.endpoint.address,
        groups=tuple(BenchGroup(name=g.name, kind=g.kind, ranks=g.ranks) for g in plan.groups),
        targets=targets,
        sizes=sizes,
        block_s=min(MAX_BLOCK_S, (QUICK_BUDGET_S if quick else BUDGET_S) / num_blocks),
        rounds=QUICK_ROUNDS if quick else ROUNDS,
        timeout_s=RANK_TIMEOUT_S,
    )


def bench_commands(plan: Plan, commands: Sequence[RankCommand], *, quick: bool) -> tuple[RankCommand, ...]:
    """One command a rank, with the Python, environment and site of its vLLM node; `node_rank` is the rank here.

    Raises CpuppError BENCH-ALONE.
    """
    made = []
    for rank in plan.ranks:
        node = commands[rank.node_rank]
        env = {name: value for name, value in node.env.items() if name not in _NOT_OURS and not looks_secret(name)}
        made.append(
            RankCommand(
                host=rank.host,
                node_rank=rank.rank,
                argv=(node.argv[0], "-m", "cpupp.rank.bench_comm"),
                env={**env, BENCH_ENV: bench_order(plan, rank.rank, quick=quick).encode()},
                site_env=dict(node.site_env),
                keep_env=node.keep_env,
                drop_env=node.drop_env,
            )
        )
    return tuple(made)


# What the times mean


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, between two of them where it falls there."""
    assert values
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def bench_row(times: BenchTimes) -> BenchRow:
    """Median and spread of the times of one path."""
    p10, median, p90 = (round(percentile(times.nanoseconds, share) / 1000, 1) for share in (0.1, 0.5, 0.9))
    return BenchRow(
        op=times.op,
        group=times.group,
        ranks=times.ranks,
        bytes=times.bytes,
        path=times.path,
        median_us=median,
        p10_us=p10,
        p90_us=p90,
        runs=len(times.nanoseconds),
    )


def bench_rows(times: Iterable[BenchTimes]) -> tuple[BenchRow, ...]:
    """The rows of everything that was measured, by op, group, ranks, size and path."""
    rows = [bench_row(t) for t in times if t.nanoseconds]
    return tuple(sorted(rows, key=lambda r: (r.op != HOP, r.group, r.ranks, r.bytes, PATHS.index(r.path))))


def token_costs(plan: Plan, rows: Iterable[BenchRow]) -> tuple[TokenCost, ...]:
    """What a token pays by each path that was measured on all links and groups; empty without a readable model."""
    token = token_bytes(plan)
    if token is None:
        return ()
    medians: dict[tuple[str, str], dict[tuple[int, ...], float]] = {}
    for row in rows:
        if row.bytes == (token.hop if row.op == HOP else token.all_reduce):
            medians.setdefault((row.op, row.path), {})[row.ranks] = row.median_us
    costs = []
    for path in PATHS:
        hops = _hops_us(plan, medians.get((HOP, path), {}))
        reduces = _reduces_us(plan, medians.get((ALL_REDUCE, path), {}))
        if hops is not None and reduces is not None:
            costs.append(TokenCost(path=path, hops_us=round(hops, 1), all_reduces_us=round(reduces, 1)))
    return tuple(costs)


def _hops_us(plan: Plan, medians: Mapping[tuple[int, ...], float]) -> float | None:
    total = 0.0
    for stage in range(plan.pipeline - 1):
        pairs = [(stage * plan.tensor + i, (stage + 1) * plan.tensor + i) for i in range(plan.tensor)]
        if any(pair not in medians for pair in pairs):
            return None
        total += max(medians[pair] for pair in pairs)
    return total


def _reduces_us(plan: Plan, medians: Mapping[tuple[int, ...], float]) -> float | None:
    if plan.tensor == 1:
        return 0.0
    assert plan.model_facts is not None
    total = 0.0
    for stage in range(plan.pipeline):
        ranks = tuple(range(stage * plan.tensor, (stage + 1) * plan.tensor))
        if ranks not in medians:
            return None
        layers = plan.ranks[ranks[0]].layers or (0, plan.model_facts.num_layers)
        total += REDUCES_PER_LAYER * (layers[1] - layers[0]) * medians[ranks]
    return total


def slowest(rows: Sequence[BenchRow], op: str) -> BenchRow | None:
    """The row of our path, at the smallest size, whose median is highest: that link (or group) holds the others up."""
    ours = [row for row in rows if row.op == op and row.path == PATHS[0]]
    if not ours:
        return None
    smallest = min(row.bytes for row in ours)
    return max((row for row in ours if row.bytes == smallest), key=lambda row: row.median_us)
