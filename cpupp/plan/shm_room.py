"""The room in each host's /dev/shm, and what the planned ranks put there. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid, GroupSeats
from cpupp.plan.partition import GIB

MIB = 1 << 20
SHM_PER_TENSOR_RANK = 4 * MIB
"""A rank's board in a TP group that shares memory (rank/board.py)."""
SHM_PER_STAGE_LINK = 8 * MIB
"""The ring from a rank to the next stage, when they share memory (rank/communicator.py)."""
SHM_PER_OTHER_LINK = 1 * MIB
"""The ring between any other two ranks of a PP group that share memory."""
SHM_BASE = 64 * MIB
"""Of each host, at most: broadcast queues of API server, engine and workers, and what torch puts there."""
SHM_RESERVE = 16 * MIB
"""What links leave free at least for the same: they yield to gloo, vLLM's own queues could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmRoom:
    """One /dev/shm that ranks can write to. hosts: the entries of the cluster file that share it.

    size: bytes, 0 when it has no limit; free: the least that one of the hosts saw; links: all rings and boards;
    sudo: what a command begins with that needs root there.
    """

    hosts: tuple[str, ...]
    size: int
    free: int
    links: int
    sudo: str = "sudo "

    @property
    def need(self) -> int:
        """Bytes that links and vLLM's own queues take together, at most."""
        return self.links + SHM_BASE * len(self.hosts)

    @property
    def is_tight(self) -> bool:
        """Whether the ranks may need more than is free."""
        return self.size > 0 and self.free < self.need

    @property
    def shortage(self) -> str:
        """Why the links do not fit, as one sentence; empty when they do or when there are none."""
        if self.links == 0 or self.size == 0 or self.free >= self.links + SHM_RESERVE:
            return ""
        need = f"its links need {self.links // MIB} MiB, vLLM's queues {SHM_RESERVE // MIB} MiB"
        return f"{self.has}, {need}"

    @property
    def has(self) -> str:
        """Whose it is and what is free, the start of a sentence."""
        return f"/dev/shm of {' and '.join(self.hosts)} has {self.free // MIB} MiB free"

    @property
    def remedy(self) -> str:
        """The command that gives it twice the need, beside what is in it now."""
        wanted = self.size - self.free + 2 * self.need
        size = f"{-(-wanted // GIB)}g"
        command = f"{self.sudo}mount -o remount,size={size} /dev/shm"
        return f"{command} (until the next reboot; in docker: --shm-size={size}); look for leftovers first"


def shm_rooms(
    grid: Grid | None, facts: Mapping[str, HostFacts], shared: Mapping[str, Collection[tuple[int, int]]]
) -> tuple[ShmRoom, ...]:
    """Every writable /dev/shm, told apart by boot id and device: one room for entries that are one machine.

    grid: None when ranks cannot be seated; shared: group name -> ordered pairs of ranks that talk by shared memory.
    """
    sharing: dict[tuple[str, int], list[str]] = {}
    for name, fact in facts.items():
        if fact.shm.writable:
            sharing.setdefault((fact.boot_id, fact.shm.device), []).append(name)
    rooms = []
    for names in sharing.values():
        fullest = min((facts[name].shm for name in names), key=lambda shm: shm.free)
        sudo = "" if facts[names[0]].user == "root" else "sudo "
        links = _links(grid, names, shared) if grid else 0
        rooms.append(ShmRoom(hosts=tuple(names), size=fullest.size, free=fullest.free, links=links, sudo=sudo))
    return tuple(rooms)


def _links(grid: Grid, names: Collection[str], shared: Mapping[str, Collection[tuple[int, int]]]) -> int:
    here = {seat.rank for seat in grid.seats if seat.host in names}
    return sum(
        _group_links(group, [pair for pair in shared.get(group.name, ()) if pair[0] in here]) for group in grid.groups
    )


def _group_links(group: GroupSeats, pairs: Collection[tuple[int, int]]) -> int:
    """Bytes that the first rank of each pair puts into its /dev/shm."""
    if group.kind == "tp":
        return SHM_PER_TENSOR_RANK * len({src for src, _ in pairs})
    position = {rank: index for index, rank in enumerate(group.ranks)}
    steps = [(position[dst] - position[src]) % len(group.ranks) for src, dst in pairs]
    return sum(SHM_PER_STAGE_LINK if step == 1 else SHM_PER_OTHER_LINK for step in steps)


def hosts_without_room(spec: ClusterSpec, rooms: Iterable[ShmRoom]) -> dict[str, str]:
    """Host -> why its ranks may not share memory. Empty for stock vLLM, whose choice is not cpupp's."""
    if spec.engine.communicator == "stock":
        return {}
    return {name: room.shortage for room in rooms if room.shortage for name in room.hosts}
