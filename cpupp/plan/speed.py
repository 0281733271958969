"""How long a stage takes for one token, from the memory bandwidth of its cores and the cost of its links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, floor, log2
from statistics import median

from cpupp.plan.backend import GroupPlan
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid, Seat
from cpupp.plan.threads import CorePlan

LAYER_NS = 500_000
"""Assumed: what a layer costs beside reading its weights (docs/benchmarks.md, Layers over stages)."""
ENGINE_NS = 6_000_000
"""Assumed: what API server and engine take of a step from rank 0 when no core is left for them (docs/benchmarks.md,
Layers over stages)."""
HOP_NS = {"shm": 32_000, "gloo": 70_000}
"""Assumed: one token's hop from stage to stage, by transport (docs/benchmarks.md, bench comm, 16 KiB)."""
REDUCE_NS = {"shm": 30_000, "mixed": 220_000, "gloo": 220_000}
"""Assumed: one all-reduce of a token, by the group's backend (docs/benchmarks.md, bench comm, 8 KiB)."""
REDUCES_PER_LAYER = 2
ASSUMED_BYTES_PER_S = 50_000_000_000
"""Of every rank, where a host was not measured: then only ratios count, and all are equal."""
SAME = 0.85
"""Ranks whose bandwidth is at least this part of the fastest one's are taken as equal to it: two measurements of one
machine differ as much, and each change of layers makes vLLM compile anew."""
ALIKE = 0.55
"""Ranks with as many cores of the same CPU model are taken as equal from this part of the fastest one's on: virtual
machines' neighbours take up to 40 % (measured: 6.9 and 11.6 GB/s on two cores of one machine); half of the memory
channels left empty makes a half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """bytes_per_s: weights that the rank can read; share: the part of its CPUs' time that its cgroup grants.

    kind: equal for ranks that should be equally fast, empty when that is not known.
    """

    bytes_per_s: int
    share: float
    kind: str = ""


def rank_speeds(grid: Grid, cores: CorePlan, facts: Mapping[str, HostFacts]) -> dict[int, RankSpeed] | None:
    """Speed of every rank, None when the bandwidth of some host was not measured or its cores are unknown."""
    speeds = {seat.rank: _speed(seat, grid, cores, facts) for seat in grid.seats}
    known = {rank: speed for rank, speed in speeds.items() if speed is not None}
    return known if len(known) == len(speeds) else None


def _speed(seat: Seat, grid: Grid, cores: CorePlan, facts: Mapping[str, HostFacts]) -> RankSpeed | None:
    """vLLM binds a rank's memory to the NUMA node of its first core, so that node's bandwidth is all that it has."""
    fact, own = facts.get(seat.host), cores.cores[seat.rank]
    if fact is None or not fact.bandwidth or not own:
        return None
    core_of = {cpu.cpu: (cpu.socket, cpu.core) for cpu in fact.cpus}
    home = core_of.get(min(own))
    node = next((n for n in fact.bandwidth if home in {core_of.get(cpu) for cpu in n.cpus}), None)
    if node is None:
        return None
    measured = {core_of[cpu] for cpu in node.cpus if cpu in core_of}
    neighbours = [s for s in grid.seats if s.host in facts and facts[s.host].boot_id == fact.boot_id]
    taken = {core_of.get(cpu) for s in neighbours for cpu in cores.cores[s.rank]} & measured
    mine = {core_of.get(cpu) for cpu in own} & measured
    # Memory is saturated by fewer than all cores, so a core that stays free takes no bandwidth away.
    rate = node.bytes_per_s / max(node.cpu_share, 0.01) * len(mine) / max(len(taken), ceil(len(measured) * 3 / 4))
    here = {cpu for s in grid.seats if s.host == seat.host for cpu in cores.cores[s.rank]}
    share = 1.0 if fact.cpu_quota is None else min(1.0, fact.cpu_quota / len(here))
    kind = f"{len(mine)} of {len(taken)} of {len(measured)} at {share:.2f}: {fact.cpu_model}" if fact.cpu_model else ""
    return RankSpeed(bytes_per_s=max(1, round(rate * share)), share=share, kind=kind)


def levelled(speeds: Mapping[int, RankSpeed], steps: int) -> dict[int, RankSpeed]:
    """Speeds in coarse steps, so that noise between two measurements does not move layers.

    steps: how many the fastest rank's speed has from one power of two to the next.
    """
    even = _evened(speeds)
    fastest = max(even.values())
    anchor = 2 ** (round(log2(fastest) * steps) / steps)
    return {
        rank: replace(s, bytes_per_s=max(1, round(anchor * _level(even[rank] / fastest)))) for rank, s in speeds.items()
    }


def _evened(speeds: Mapping[int, RankSpeed]) -> dict[int, float]:
    """Bytes a second of every rank; those of one kind have their median, unless they are far apart."""
    kinds: dict[str, list[int]] = {}
    for speed in speeds.values():
        kinds.setdefault(speed.kind, []).append(speed.bytes_per_s)
    middle = {kind: median(rates) for kind, rates in kinds.items() if kind and min(rates) >= ALIKE * max(rates)}
    return {rank: middle.get(speed.kind, speed.bytes_per_s) for rank, speed in speeds.items()}


def _level(ratio: float) -> float:
    """1, then tenths, then steps of about a tenth of what is left."""
    if ratio >= SAME:
        return 1.0
    if ratio >= 0.25:
        return floor(ratio * 10 + 0.5) / 10
    return float(2 ** (round(log2(ratio) * 5) / 5))


def hop_ns(grid: Grid, groups: tuple[GroupPlan, ...]) -> tuple[int, ...]:
    """Cost of each step from a stage to the next: the slowest of its tensor ranks' links."""
    transport = {(link.src, link.dst): link.transport for g in groups if g.kind == "pp" for link in g.links}
    steps = []
    for stage in range(grid.pipeline - 1):
        pairs = [(stage * grid.tensor + i, (stage + 1) * grid.tensor + i) for i in range(grid.tensor)]
        steps.append(max(HOP_NS[transport[pair]] for pair in pairs))
    return tuple(steps)


def reduce_ns(grid: Grid, groups: tuple[GroupPlan, ...]) -> tuple[int, ...]:
    """Cost of the all-reduces of one layer, on each stage; zero without tensor groups."""
    backend = {g.ranks: g.backend for g in groups if g.kind == "tp"}
    stages = [tuple(range(s * grid.tensor, (s + 1) * grid.tensor)) for s in range(grid.pipeline)]
    return tuple(REDUCES_PER_LAYER * REDUCE_NS[backend[ranks]] if ranks in backend else 0 for ranks in stages)
