"""Each group in detail: which of its hosts are one memory, by what proof, and what stock vLLM would do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpupp.plan.backend import same_memory, ways_in
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid, GroupSeats
from cpupp.plan.link_costs import stock_cost
from cpupp.plan.stock_choice import GroupPlace, StockChoice, stock_choice
from cpupp.plan.versions import SHM_NAMINGS, shm_naming


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProof:
    """Whether two hosts are one memory: equal boot ids, equal devices of /dev/shm, both nonces read by the other.

    None where a host was not asked; shared is then what the cluster file says.
    """

    hosts: tuple[str, str]
    boot_id: bool | None
    device: bool | None
    nonce: bool | None
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDetail:
    """One group by its name: its hosts by the memory that they share, the proof of each pair, what stock would do.

    ranks: host -> ranks of the group there; stock: the installed version's choice first, then the others, new to old;
    cost: what gloo costs there by vLLM and by cpupp, empty where stock would share memory too.
    """

    name: str
    ranks: dict[str, tuple[int, ...]]
    memories: tuple[tuple[str, ...], ...]
    proofs: tuple[MemoryProof, ...]
    stock: tuple[StockChoice, ...]
    cost: str


def group_details(spec: ClusterSpec, grid: Grid, facts: Mapping[str, HostFacts]) -> tuple[GroupDetail, ...]:
    """The detail of every group, in the order of the grid."""
    ways = ways_in(spec)
    proofs: dict[tuple[str, str], MemoryProof] = {}
    for group in grid.groups:
        for a, b in _pairs([grid.seats[rank].host for rank in group.ranks]):
            if (a, b) not in proofs:
                proofs[a, b] = _proof(ways, facts, a, b)
    return tuple(_detail(spec, grid, facts, group, proofs) for group in grid.groups)


def _pairs(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs of two hosts, each once, in order."""
    different = list(dict.fromkeys(hosts))
    return [(a, b) for index, a in enumerate(different) for b in different[index + 1 :]]


def _detail(
    spec: ClusterSpec,
    grid: Grid,
    facts: Mapping[str, HostFacts],
    group: GroupSeats,
    proofs: Mapping[tuple[str, str], MemoryProof],
) -> GroupDetail:
    seats = [grid.seats[rank] for rank in group.ranks]
    hosts = list(dict.fromkeys(seat.host for seat in seats))
    found = tuple(proofs[pair] for pair in _pairs(hosts))
    memories = _memories(hosts, found)
    version = next((facts[h].engine.vllm for h in hosts if h in facts and facts[h].engine.vllm), "")
    here = shm_naming(version) if version else None
    place = GroupPlace(spec=spec, facts=facts, group=group, seats=seats, memories=memories)
    ordered = [*([here] if here else []), *(naming for naming in reversed(SHM_NAMINGS) if naming is not here)]
    stock = tuple(stock_choice(place, naming, version if naming is here else "") for naming in ordered)
    some_memory = len(memories) < len(seats)
    return GroupDetail(
        name=group.name,
        ranks={host: tuple(seat.rank for seat in seats if seat.host == host) for host in hosts},
        memories=memories,
        proofs=found,
        stock=stock,
        cost=stock_cost(group.kind, shared=some_memory) if any(c.backend == "gloo" for c in stock) else "",
    )


def _proof(ways: Mapping[str, str], facts: Mapping[str, HostFacts], a: str, b: str) -> MemoryProof:
    shared = same_memory(ways, a, b, facts).shared
    one, two = facts.get(a), facts.get(b)
    if one is None or two is None:
        return MemoryProof(hosts=(a, b), boot_id=None, device=None, nonce=None, shared=shared)
    return MemoryProof(
        hosts=(a, b),
        boot_id=one.boot_id == two.boot_id,
        device=one.shm.device == two.shm.device,
        nonce=a in two.shm_seen and b in one.shm_seen,
        shared=shared,
    )


def _memories(hosts: list[str], proofs: tuple[MemoryProof, ...]) -> tuple[tuple[str, ...], ...]:
    shared = {proof.hosts for proof in proofs if proof.shared}
    found: list[list[str]] = []
    for host in hosts:
        home = next((memory for memory in found if all((other, host) in shared for other in memory)), None)
        if home is None:
            found.append([host])
        else:
            home.append(host)
    return tuple(map(tuple, found))
