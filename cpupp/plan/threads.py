"""Cores of every rank: one hardware thread a physical core, by NUMA node, none shared by two ranks where avoidable.

Hosts that run one kernel (equal boot id) and may use the same CPUs share them, whatever their /dev/shm: containers and
two entries that are one machine. One core is left for API server and engine on the head where there is one to leave
(vllm #25818: without it one rank crawls).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cpupp.plan.amounts import count
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import CpuFacts, HostFacts
from cpupp.plan.grid import Grid

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """cores: CPU numbers of each rank (empty when unknown); warnings: what the user should know about them."""

    cores: dict[int, tuple[int, ...]]
    reserved: tuple[int, ...]
    warnings: tuple[str, ...]


def plan_cores(spec: ClusterSpec, grid: Grid, facts: Mapping[str, HostFacts]) -> CorePlan:
    """Give each rank its CPUs. Ranks of hosts without facts get none (vLLM binds by itself: assumed)."""
    cores: dict[int, tuple[int, ...]] = {seat.rank: () for seat in grid.seats}
    reserved: tuple[int, ...] = ()
    warnings: list[str] = []
    for hosts in _sharing_cpus(spec, facts):
        for names, pool in _pools(hosts, spec, facts):
            ranks = [seat.rank for seat in grid.seats if seat.host in names]
            where = " and ".join(names)
            if len(names) > 1:
                divided = f"{_num(pool)} divided over {len(ranks)} ranks"
                warnings.append(f"{where} share their CPUs (one kernel): {divided}")
            shares, short = _divide(pool, ranks)
            if short:
                warnings.append(f"{where}: {len(ranks)} ranks on {_num(pool)}: ranks share cores and will be slow")
            warnings += _spans(where, pool, shares)
            if 0 in shares:
                shares[0], reserved, note = _reserve(shares[0], where)
                warnings.extend(note)
            cores.update(shares)
    return CorePlan(cores=cores, reserved=reserved, warnings=tuple(warnings))


def _spans(where: str, pool: list[CpuFacts], shares: Mapping[int, tuple[int, ...]]) -> list[str]:
    """vLLM binds all memory of a rank to the NUMA node of its first core."""
    node_of = {cpu.cpu: cpu.numa for cpu in pool}
    found = []
    for rank, cpus in shares.items():
        nodes = sorted({node_of[cpu] for cpu in cpus})
        if len(nodes) > 1:
            names = " and ".join(map(str, nodes))
            bound = f"vLLM binds its memory to node {node_of[min(cpus)]} alone"
            fix = f"`slots: {len(nodes) * len(shares)}` gives every node a rank"
            found.append(f"{where}: rank {rank} has cores of NUMA nodes {names}, but {bound}; {fix}")
    return found


def _num(pool: list[CpuFacts]) -> str:
    return count(len(pool), "core")


def _pools(
    hosts: list[str], spec: ClusterSpec, facts: Mapping[str, HostFacts]
) -> list[tuple[list[str], list[CpuFacts]]]:
    """Hosts that may use the same CPUs take from one pool; where their CPUs overlap in part, each gets its own."""
    allowed = {name: _allowed(name, spec, facts) for name in hosts}
    slots = {host.name: host.slots for host in spec.hosts}
    if len({frozenset(cpus) for cpus in allowed.values()}) == 1:
        num_ranks = sum(slots[name] for name in hosts)
        return [(hosts, _pool([facts[name] for name in hosts], allowed[hosts[0]], num_ranks))]
    own: dict[str, set[int]] = {name: set() for name in hosts}
    for cpu in sorted(set().union(*allowed.values())):
        takers = [name for name in hosts if cpu in allowed[name]]
        own[min(takers, key=lambda name: len(own[name]) / slots[name])].add(cpu)
    return [([name], _pool([facts[name]], own[name], slots[name])) for name in hosts]


def _sharing_cpus(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> list[list[str]]:
    groups: list[list[str]] = []
    for host in spec.hosts:
        if host.name not in facts:
            continue
        mine = _allowed(host.name, spec, facts)
        boot = facts[host.name].boot_id
        home = next(
            (g for g in groups if any(facts[o].boot_id == boot and mine & _allowed(o, spec, facts) for o in g)),
            None,
        )
        if home is None:
            groups.append([host.name])
        else:
            home.append(host.name)
    return groups


def _allowed(name: str, spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> set[int]:
    host = next(h for h in spec.hosts if h.name == name)
    cpus = {c.cpu for c in facts[name].cpus}
    return cpus & set(host.cores) if host.cores else cpus


def _pool(facts: list[HostFacts], allowed: set[int], num_ranks: int) -> list[CpuFacts]:
    """One hardware thread of each physical core among `allowed`, NUMA node by NUMA node, within the cgroups' quota."""
    seen: dict[tuple[int, int], CpuFacts] = {}
    for cpu in sorted((cpu for fact in facts for cpu in fact.cpus if cpu.cpu in allowed), key=lambda c: c.cpu):
        seen.setdefault((cpu.socket, cpu.core), cpu)
    pool = sorted(seen.values(), key=lambda c: (c.numa, c.socket, c.core))
    quotas = [f.cpu_quota for f in facts if f.cpu_quota is not None]
    if quotas and len(quotas) == len(facts):
        return _within(pool, max(1, int(sum(quotas))), num_ranks)
    return pool


def _within(pool: list[CpuFacts], num: int, num_ranks: int) -> list[CpuFacts]:
    """As many cores as the quota grants: of one NUMA node for one rank, of all nodes alike for several."""
    if num_ranks == 1 or num >= len(pool):
        return pool[:num]
    place: dict[int, int] = {}
    order = {}
    for cpu in pool:
        place[cpu.numa] = place.get(cpu.numa, -1) + 1
        order[cpu.cpu] = (place[cpu.numa], cpu.numa)
    taken = {cpu.cpu for cpu in sorted(pool, key=lambda c: order[c.cpu])[:num]}
    return [cpu for cpu in pool if cpu.cpu in taken]


def _divide(pool: list[CpuFacts], ranks: list[int]) -> tuple[dict[int, tuple[int, ...]], bool]:
    """Give each rank its own cores, inside one NUMA node where the ranks are as many as the nodes or more."""
    if len(pool) < len(ranks):
        return {r: (pool[i % len(pool)].cpu,) if pool else () for i, r in enumerate(ranks)}, True
    nodes = [[c.cpu for c in pool if c.numa == n] for n in dict.fromkeys(c.numa for c in pool)]
    shares: dict[int, tuple[int, ...]] = {}
    if len(ranks) < len(nodes):
        for several, rank in zip(_chunks(nodes, len(ranks)), ranks, strict=True):
            shares[rank] = tuple(sorted(cpu for node in several for cpu in node))
        return shares, False
    start = 0
    for cpus, num in zip(nodes, _ranks_per_node([len(n) for n in nodes], len(ranks)), strict=True):
        for rank, chunk in zip(ranks[start : start + num], _chunks(cpus, num), strict=True):
            shares[rank] = tuple(sorted(chunk))
        start += num
    return shares, False


def _chunks(items: list[T], num: int) -> list[list[T]]:
    """Split into `num` runs; the last ones take what is over: rank 0 gives a core away already."""
    if num == 0:
        return []
    base, extra = divmod(len(items), num)
    sizes = [base + (1 if index >= num - extra else 0) for index in range(num)]
    starts = [sum(sizes[:index]) for index in range(num)]
    return [items[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _ranks_per_node(sizes: list[int], num_ranks: int) -> list[int]:
    """How many ranks each NUMA node takes: one, then one more at a time where that leaves most cores a rank."""
    counts = [1] * len(sizes)  # no node stays idle
    for _ in range(num_ranks - len(sizes)):
        room = [size / (count + 1) if count < size else 0.0 for size, count in zip(sizes, counts, strict=True)]
        counts[room.index(max(room))] += 1
    return counts


def _reserve(share: tuple[int, ...], where: str) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    if len(share) > 1:
        return share[:-1], share[-1:], []
    note = f"{where}: no core left for API server and engine, they share a core with rank 0"
    return share, (), [note]
