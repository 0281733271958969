"""What stock vLLM would do with a group: the names that its ranks make up, its backend, and whether that is right.

Where the names of a group agree, vLLM shares memory. A name says nothing of the machine, so names can agree over two
machines and differ on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import GroupSeats, Seat
from cpupp.plan.versions import (
    NAMES_SOURCES,
    SHM_ISA,
    SHM_MAX_RANKS,
    SHM_NAME,
    TENSOR_DICT,
    ShmNaming,
)

_DIES = "the start dies (SHMManager: errno 2) or the first all-reduce hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StockName:
    """The name that the ranks of one vLLM node make up; `<...>` stands for what is made up at the start."""

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StockChoice:
    """What stock vLLM of some versions does with one group.

    versions: `0.28 to 0.32`; here: the installed version, empty when it is none of these; agree: whether all names are
    equal; backend: `shm` or `gloo`, empty when the ranks do not come to one; outcome: `right`, `slow`, `fails` or
    `hangs`; why: a sentence, or empty; trap: what a setting would make of it, or empty; sources: upstream's numbers.
    """

    versions: str
    here: str
    names: tuple[StockName, ...]
    agree: bool
    backend: str
    outcome: str
    why: str
    trap: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """A group with all that decides what stock does with it. memories: its hosts, by the memory that they share."""

    spec: ClusterSpec
    facts: Mapping[str, HostFacts]
    group: GroupSeats
    seats: Sequence[Seat]
    memories: tuple[tuple[str, ...], ...]

    @property
    def hosts(self) -> list[str]:
        """The hosts of its ranks, in rank order."""
        return list(dict.fromkeys(seat.host for seat in self.seats))

    @property
    def is_one_memory(self) -> bool:
        """Whether all its ranks share memory."""
        return len(self.memories) == 1

    @property
    def num_alone(self) -> int:
        """How many memories hold one of its ranks only."""
        home = {host: index for index, memory in enumerate(self.memories) for host in memory}
        ranks = [home[seat.host] for seat in self.seats]
        return sum(ranks.count(index) == 1 for index in set(ranks))

    def variable(self, host: str, name: str) -> str:
        """A variable as stock vLLM would see it on this host: of the cluster file, else of the host itself."""
        entry = next(h for h in self.spec.hosts if h.name == host)
        own = self.facts[host].environment.get(name, "") if host in self.facts else ""
        return entry.engine.env.get(name) or self.spec.engine.env.get(name) or own


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    backend: str
    outcome: str
    why: str
    sources: tuple[str, ...] = ()


def stock_choice(place: GroupPlace, naming: ShmNaming, here: str) -> StockChoice:
    """What stock vLLM that names its groups this way does. here: the installed version, empty when it is another."""
    names = _names(place, naming)
    agree = len({name.name for name in names}) == 1
    verdict = _verdict(place, naming, agree)
    trap = ""
    if naming.shared_by and not agree and not place.is_one_memory and verdict.backend == "gloo":
        trap = f"with one {naming.shared_by} on all hosts the names agree, and {_DIES}"
    return StockChoice(
        versions=naming.versions,
        here=here,
        names=names,
        agree=agree,
        backend=verdict.backend,
        outcome=verdict.outcome,
        why=verdict.why,
        trap=trap,
        sources=verdict.sources,
    )


def _names(place: GroupPlace, naming: ShmNaming) -> tuple[StockName, ...]:
    nodes: dict[int, list[Seat]] = {}
    for seat in place.seats:
        nodes.setdefault(seat.node_rank, []).append(seat)
    set_to = {place.variable(host, naming.shared_by) for host in place.hosts} if naming.shared_by else {""}
    common = next(iter(set_to)) if len(set_to) == 1 else ""
    ranks = "-".join(str(rank) for rank in place.group.ranks)
    return tuple(
        StockName(
            node_rank=node,
            host=seats[0].host,
            ranks=tuple(seat.rank for seat in seats),
            name=SHM_NAME.format(ident=common or naming.ident.format(node=node), kind=place.group.kind, ranks=ranks),
        )
        for node, seats in nodes.items()
    )


def _verdict(place: GroupPlace, naming: ShmNaming, agree: bool) -> _Verdict:
    able = {host: _has_operations(place.facts[host]) for host in place.hosts if host in place.facts}
    lacking = ", ".join(host for host, has in able.items() if not has)
    if True in able.values() and False in able.values():
        why = f"{lacking} has no {SHM_ISA}, so no SHM operations and no names to tell: the others wait"
        return _Verdict(backend="", outcome="hangs", why=why)
    if not agree or lacking:
        return _gloo(place, naming, f"no SHM operations without {SHM_ISA}" if lacking else "")
    if not place.is_one_memory:
        return _Verdict(backend="shm", outcome="fails", why=f"over two machines: {_DIES}", sources=NAMES_SOURCES)
    if len(place.seats) > SHM_MAX_RANKS:
        why = f"its SHM operations take {SHM_MAX_RANKS} ranks at most: the start dies"
        return _Verdict(backend="shm", outcome="fails", why=why)
    return _Verdict(backend="shm", outcome="right", why="")


def _has_operations(fact: HostFacts) -> bool:
    return fact.arch == "aarch64" or (fact.arch == "x86_64" and SHM_ISA in fact.isa)


def _gloo(place: GroupPlace, naming: ShmNaming, cause: str) -> _Verdict:
    if place.group.kind == "pp" and naming.last <= TENSOR_DICT.last:
        why = "the first request dies: no recv_tensor_dict"
        return _Verdict(backend="gloo", outcome="fails", why=why, sources=("vllm #37933", "vllm #40150"))
    if len(place.memories) == len(place.seats):
        return _Verdict(backend="gloo", outcome="right", why=cause)
    if place.is_one_memory:
        return _Verdict(backend="gloo", outcome="slow", why=cause or "though its ranks are one memory")
    who = "one remote rank takes" if place.num_alone == 1 else "ranks on other machines take"
    return _Verdict(backend="gloo", outcome="slow", why=cause or f"{who} the whole group to gloo")
