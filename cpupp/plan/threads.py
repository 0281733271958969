"""Cores of every rank: one hardware thread a physical core, by NUMA node, none shared by two ranks where avoidable.

Hosts that run one kernel (equal boot id) and may use the same CPUs share them, whatever their /dev/shm: containers and
two entries that are one machine. One core is left for API server and engine on the head where there is one to leave
(vllm #25818: without it one rank crawls).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import CpuFacts, HostFacts
from cpupp.plan.grid import Grid


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
        ranks = [seat.rank for seat in grid.seats if seat.host in hosts]
        pool = _pool([facts[h] for h in hosts], spec, hosts)
        where = " and ".join(hosts)
        if len(hosts) > 1:
            warnings.append(f"{where} share their CPUs (one kernel): {len(pool)} cores divided over {len(ranks)} ranks")
        shares, short = _divide(pool, ranks, spec, grid)
        if short:
            warnings.append(f"{where}: {len(ranks)} ranks on {len(pool)} core(s): ranks share cores and will be slow")
        if 0 in shares:
            shares[0], reserved, note = _reserve(shares[0], where)
            warnings.extend(note)
        cores.update(shares)
    return CorePlan(cores=cores, reserved=reserved, warnings=tuple(warnings))


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


def _pool(facts: list[HostFacts], spec: ClusterSpec, hosts: list[str]) -> list[CpuFacts]:
    """One hardware thread of each physical core that any of these hosts may use, NUMA node by NUMA node."""
    seen: dict[tuple[int, int], CpuFacts] = {}
    for name, fact in zip(hosts, facts, strict=True):
        allowed = _allowed(name, spec, {name: fact})
        for cpu in sorted(fact.cpus, key=lambda c: c.cpu):
            if cpu.cpu in allowed:
                seen.setdefault((cpu.socket, cpu.core), cpu)
    pool = sorted(seen.values(), key=lambda c: (c.numa, c.socket, c.core))
    quotas = [f.cpu_quota for f in facts if f.cpu_quota is not None]
    if quotas and len(quotas) == len(facts):
        pool = pool[: max(1, int(sum(quotas)))]
    return pool


def _divide(
    pool: list[CpuFacts], ranks: list[int], spec: ClusterSpec, grid: Grid
) -> tuple[dict[int, tuple[int, ...]], bool]:
    if len(pool) < len(ranks):
        return {r: (pool[i % len(pool)].cpu,) if pool else () for i, r in enumerate(ranks)}, True
    base, extra = divmod(len(pool), len(ranks))
    shares: dict[int, tuple[int, ...]] = {}
    start = 0
    for index, rank in enumerate(ranks):
        # The last ranks take the odd cores: rank 0 gives one away already.
        size = base + (1 if index >= len(ranks) - extra else 0)
        shares[rank] = tuple(sorted(c.cpu for c in pool[start : start + size]))
        start += size
    return shares, False


def _reserve(share: tuple[int, ...], where: str) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    if len(share) > 1:
        return share[:-1], share[-1:], []
    note = f"{where}: no core left for API server and engine, they share a core with rank 0"
    return share, (), [note]
