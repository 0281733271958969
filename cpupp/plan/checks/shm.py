"""Checks of /dev/shm. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.plan.backend import plan_rooms
from cpupp.plan.findings import Case, Finding, check, error, ok
from cpupp.plan.grid import make_grid, slots_equation
from cpupp.plan.shm_room import MIB, ShmRoom, shm_rooms


@check(
    "SHM",
    "/dev/shm exists, is writable and large enough for the planned groups",
    severities="error",
    why="beyond the size of /dev/shm ranks die of SIGBUS; without it vLLM's queues cannot start",
    fix="mount a larger tmpfs there (`--shm-size` of a container)",
)
def shm(case: Case) -> Iterator[Finding]:
    """vllm #1710, gpustack #5014: a container's 64 MiB; the SHM manager dies of SIGBUS."""
    rooms = {name: room for room in _rooms(case) for name in room.hosts}
    for name, fact in case.facts.items():
        found = fact.shm
        evidence = f"/dev/shm: {found.size // MIB} MiB, {found.free // MIB} MiB free, device {found.device:#x}"
        if not found.writable:
            cause = "without it every link of this host is gloo, and vLLM's own queues cannot start"
            fix = "mount it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
            yield error(name, "/dev/shm is not writable", evidence=evidence, cause=cause, fix=fix)
            continue
        need = f"{rooms[name].need // MIB} MiB"
        if rooms[name].is_tight:
            cause = f"the ranks of this host need {need} there; beyond its size they die of SIGBUS"
            yield error(name, "/dev/shm is too small", evidence=evidence, cause=cause, fix=rooms[name].remedy)
        else:
            free = f"{found.free // MIB} MiB free" if found.size else "no limit"
            yield ok(name, f"/dev/shm has {free}, {need} needed", evidence)


def _rooms(case: Case) -> tuple[ShmRoom, ...]:
    """Every writable /dev/shm; without a file, or when its ranks cannot be seated, nothing but queues is in it."""
    if case.spec is None or slots_equation(case.spec) is not None:
        return shm_rooms(None, case.facts, {})
    return plan_rooms(case.spec, make_grid(case.spec), case.facts)
