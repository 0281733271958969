"""The transport of every link and the backend of every group, each with its reason.

Equal host names or equal SHM group names prove nothing (vllm #33628, #46716, ROCm/mori #74). Shared memory is proved:
same boot id, same device of /dev/shm, and a nonce that one wrote there and the other read. And there must be room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid, GroupSeats
from cpupp.plan.shm_room import ShmRoom, hosts_without_room, shm_rooms

SHM_ARCH = "x86_64"
"""The shared-memory links of rank/ring.py and rank/board.py need the total store order of x86-64 (rank/identity.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether two hosts share memory, and the sentence that says why. assumed: no facts, only the cluster file."""

    shared: bool
    reason: str
    assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """An ordered pair of global ranks of a group and the transport (`shm` or `gloo`) between them."""

    src: int
    dst: int
    transport: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One TP or PP group with its backend (`shm`, `gloo` or `mixed`) and every link."""

    name: str
    kind: str
    ranks: tuple[int, ...]
    backend: str
    reason: str
    links: tuple[LinkPlan, ...]


def ways_in(spec: ClusterSpec) -> dict[str, str]:
    """How each host is reached: without facts, two entries that are reached in one way are taken as one machine."""
    return {host.name: "this machine" if host.ssh is None else host.ssh for host in spec.hosts}


def same_memory(ways: Mapping[str, str], a: str, b: str, facts: Mapping[str, HostFacts]) -> Verdict:
    """Decide whether hosts `a` and `b` (names of the cluster file) share memory, as far as the facts prove it.

    ways: of `ways_in`, used where facts are missing.
    """
    one, two = facts.get(a), facts.get(b)
    if one is None or two is None:
        return _assumed(ways, a, b)
    if not (one.shm.writable and two.shm.writable):
        bad = a if not one.shm.writable else b
        return Verdict(shared=False, reason=f"/dev/shm of {bad} is not writable")
    if a == b:
        return Verdict(shared=True, reason=f"both on host {a}")
    if one.boot_id != two.boot_id:
        return Verdict(shared=False, reason=f"{a} and {b} are two machines (boot ids differ)")
    if one.shm.device != two.shm.device:
        devices = f"devices {one.shm.device:#x} and {two.shm.device:#x}"
        return Verdict(shared=False, reason=f"{a} and {b} run one kernel but have their own /dev/shm ({devices})")
    if a not in two.shm_seen or b not in one.shm_seen:
        return Verdict(shared=False, reason=f"{a} and {b} could not read each other's nonce in /dev/shm")
    return Verdict(shared=True, reason=f"{a} and {b} are one machine (boot id, /dev/shm device, nonce read)")


def _assumed(ways: Mapping[str, str], a: str, b: str) -> Verdict:
    if a == b:
        return Verdict(shared=True, reason=f"both on host {a}", assumed=True)
    if ways[a] == ways[b]:
        return Verdict(shared=True, reason=f"{a} and {b} are both {ways[a]} (assumed one machine)", assumed=True)
    return Verdict(shared=False, reason=f"{a} and {b} assumed to be two machines", assumed=True)


def memory_domains(
    spec: ClusterSpec, names: tuple[str, ...], facts: Mapping[str, HostFacts]
) -> tuple[tuple[str, ...], ...]:
    """Group host names that share memory, in the order given; hosts that share with nobody stand alone."""
    ways = ways_in(spec)
    domains: list[list[str]] = []
    for name in names:
        home = next((d for d in domains if all(same_memory(ways, other, name, facts).shared for other in d)), None)
        if home is None:
            domains.append([name])
        else:
            home.append(name)
    return tuple(tuple(d) for d in domains)


def plan_groups(spec: ClusterSpec, grid: Grid, facts: Mapping[str, HostFacts]) -> tuple[GroupPlan, ...]:
    """Plan every group of the grid: each link by what the facts prove, the group's backend from its links.

    A group that shares memory where there is no room for it is gloo as a whole: the ranks decide so too
    (rank/outcome.py).
    """
    groups = _proved_groups(spec, grid, facts)
    no_room = hosts_without_room(spec, _rooms(grid, facts, groups))
    hosts = {seat.rank: seat.host for seat in grid.seats}
    return tuple(_within_room(group, hosts, no_room) for group in groups)


def plan_rooms(spec: ClusterSpec, grid: Grid, facts: Mapping[str, HostFacts]) -> tuple[ShmRoom, ...]:
    """Every /dev/shm and what the links that the facts prove take there, whether there is room for them or not."""
    return _rooms(grid, facts, _proved_groups(spec, grid, facts))


def _rooms(grid: Grid, facts: Mapping[str, HostFacts], groups: Iterable[GroupPlan]) -> tuple[ShmRoom, ...]:
    shared = {g.name: [(link.src, link.dst) for link in g.links if link.transport == "shm"] for g in groups}
    return shm_rooms(grid, facts, shared)


def _within_room(group: GroupPlan, hosts: Mapping[int, str], no_room: Mapping[str, str]) -> GroupPlan:
    for link in group.links:
        if link.transport == "shm" and hosts[link.src] in no_room:
            return _group(group.name, group.kind, group.ranks, _all_gloo(group.links, no_room[hosts[link.src]]))
    return group


def _proved_groups(spec: ClusterSpec, grid: Grid, facts: Mapping[str, HostFacts]) -> tuple[GroupPlan, ...]:
    hosts = {seat.rank: seat.host for seat in grid.seats}
    return tuple(_plan_group(spec, group, hosts, facts) for group in grid.groups)


def _plan_group(
    spec: ClusterSpec, group: GroupSeats, hosts: Mapping[int, str], facts: Mapping[str, HostFacts]
) -> GroupPlan:
    ways = ways_in(spec)
    verdicts: dict[tuple[str, str], Verdict] = {}
    links = []
    for src in group.ranks:
        for dst in group.ranks:
            if src != dst:
                # One sentence for both directions: the lower rank's host is named first.
                pair = (hosts[min(src, dst)], hosts[max(src, dst)])
                if pair not in verdicts:
                    verdicts[pair] = _link_verdict(spec, ways, *pair, facts)
                verdict = verdicts[pair]
                transport = "shm" if verdict.shared else "gloo"
                links.append(LinkPlan(src=src, dst=dst, transport=transport, reason=verdict.reason))
    shared = {hosts[link.src] for link in links if link.transport == "shm"}
    other = next((h for h in sorted(shared) if h in facts and facts[h].arch != SHM_ARCH), None)
    if other is not None:
        # A rank that shares memory and cannot use it takes its group to gloo: so the ranks do (rank/outcome.py).
        links = _all_gloo(links, f"host {other} is {facts[other].arch}, shared-memory links need {SHM_ARCH}")
    if spec.engine.communicator != "links" and any(link.transport == "gloo" for link in links):
        why = f"communicator {spec.engine.communicator}: one gloo link makes the whole group gloo"
        links = _all_gloo(links, why)
    return _group(group.name, group.kind, group.ranks, links)


def _group(name: str, kind: str, ranks: tuple[int, ...], links: list[LinkPlan]) -> GroupPlan:
    backend, reason = _backend(links)
    return GroupPlan(name=name, kind=kind, ranks=ranks, backend=backend, reason=reason, links=tuple(links))


def _all_gloo(links: Iterable[LinkPlan], why: str) -> list[LinkPlan]:
    """The same links without shared memory. why: the reason of those that had it."""
    return [
        LinkPlan(src=k.src, dst=k.dst, transport="gloo", reason=why if k.transport == "shm" else k.reason)
        for k in links
    ]


def _link_verdict(
    spec: ClusterSpec, ways: Mapping[str, str], a: str, b: str, facts: Mapping[str, HostFacts]
) -> Verdict:
    if spec.network.backend == "gloo":
        return Verdict(shared=False, reason="network.backend is gloo")
    return same_memory(ways, a, b, facts)


def _backend(links: list[LinkPlan]) -> tuple[str, str]:
    transports = {link.transport for link in links}
    reasons = list(dict.fromkeys(link.reason for link in links))
    if transports == {"shm"}:
        return "shm", "; ".join(reasons)
    if transports == {"gloo"}:
        return "gloo", "; ".join(reasons)
    remote = list(dict.fromkeys(link.reason for link in links if link.transport == "gloo"))
    num_shm = sum(link.transport == "shm" for link in links)
    return "mixed", f"{num_shm} of {len(links)} links share memory; the others: {'; '.join(remote)}"
