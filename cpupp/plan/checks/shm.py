"""Checks of /dev/shm. Pure; sizes in bytes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from cpupp.plan.amounts import count
from cpupp.plan.backend import plan_rooms
from cpupp.plan.checks.wording import age, sudo, there
from cpupp.plan.findings import Case, Finding, check, error, info, ok, warning
from cpupp.plan.grid import make_grid, slots_equation
from cpupp.plan.health import LeftoverFacts
from cpupp.plan.shm_room import MIB, ShmRoom, shm_rooms

SEGMENT = re.compile(r"cpupp-|psm_|vllm|shm_broadcast")
"""Names of segments of links and queues, at which a start can fail."""


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
            # A second tmpfs over a live one would hide what runs and leftovers have in it.
            cure = "chmod 1777" if found.size else "mount -t tmpfs -o mode=1777 tmpfs"
            fix = there(name, f"{sudo(fact)}{cure} /dev/shm", for_good=False)
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


@check(
    "SHM-MOUNT",
    "/dev/shm is a tmpfs that can be written to",
    severities="error warning info",
    why="on a disk or over the network shared memory is slow; mounted read-only nothing can start",
    fix="sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
    needs=("health",),
)
def shm_mount(case: Case) -> Iterator[Finding]:
    """/proc/self/mountinfo of the host; a container has its own."""
    for name, health in case.health.items():
        root = sudo(case.facts[name])
        evidence = f"{health.shm_type or 'no mount'}, {','.join(health.shm_options)}"
        if "ro" in health.shm_options:
            cause = "no link and no queue of vLLM can be made"
            fix = there(name, f"{root}mount -o remount,rw /dev/shm", for_good=False)
            yield error(name, "/dev/shm is mounted read-only", evidence=evidence, cause=cause, fix=fix)
        elif health.shm_type not in ("tmpfs", "ramfs"):
            cause = "what ranks write there may go to a disk, and names may outlive a reboot"
            fix = there(name, f"{root}mount -t tmpfs -o mode=1777 tmpfs /dev/shm", for_good=False)
            yield warning(name, "/dev/shm is no tmpfs", evidence=evidence, cause=cause, fix=fix)
        elif "noexec" in health.shm_options:
            yield info(name, "/dev/shm is mounted noexec", evidence, cause="nothing of vLLM or cpupp runs code there")
        else:
            yield ok(name, "/dev/shm is a tmpfs", evidence)


@check(
    "SHM-LEFTOVERS",
    "crashed runs have left nothing in /dev/shm",
    severities="warning info",
    why="dead segments take memory until the machine restarts, and vLLM fails on one that has its name (vllm #54002)",
    fix="cpupp doctor FILE --clean",
    needs=("health",),
)
def shm_leftovers(case: Case) -> Iterator[Finding]:
    """Dead: no process maps or holds it. `--clean` removes this user's; what others left is theirs to remove."""
    for name, health in case.health.items():
        dead = [found for found in health.leftovers if found.state == "dead"]
        mine, others = [f for f in dead if f.mine], [f for f in dead if not f.mine]
        clean = f"cpupp doctor {f'{shlex.quote(case.file)} ' if case.file else ''}--clean"
        if mine and not any(SEGMENT.match(f.name) or f.size >= MIB for f in mine):
            yield info(name, f"{_files(mine)} in /dev/shm", _listed(mine), cause="marks of ended processes", fix=clean)
        elif mine:
            cause = "a crashed run left them: they take memory, and vLLM fails on one that has its name"
            fix = f"{clean} (removes dead files of this user alone)"
            yield warning(name, f"{_files(mine)} in /dev/shm", evidence=_listed(mine), cause=cause, fix=fix)
        if others:
            owners = ", ".join(sorted({_who(found) for found in others}))
            fix = f"their owner removes them: {owners}"
            yield info(name, f"{_files(others)} of {owners} in /dev/shm", _listed(others), fix=fix)
        unknown = [found for found in health.leftovers if found.state == "unknown" and found.mine]
        if unknown:
            cause = "processes that cannot be seen from here may use them, so --clean leaves them alone"
            fix = "look at them where all processes are seen, so outside a container: sudo lsof +D /dev/shm"
            yield info(
                name,
                f"{count(len(unknown), 'file')} in /dev/shm, perhaps in use",
                _listed(unknown),
                cause=cause,
                fix=fix,
            )
        if not dead and not unknown:
            alive = f"{len(health.leftovers)} in use" if health.leftovers else ""
            yield ok(name, "nothing is left in /dev/shm", alive)


def _who(found: LeftoverFacts) -> str:
    return f"uid {found.owner}" if found.owner.isdigit() else found.owner


def _files(found: list[LeftoverFacts]) -> str:
    size = sum(entry.size for entry in found)
    what = count(len(found), "dead file")
    return f"{what}{f' of {size / MIB:.1f} MiB' if size >= MIB else ''}"


def _listed(found: list[LeftoverFacts]) -> str:
    oldest = sorted(found, key=lambda entry: (-entry.size, -entry.age_s))[:4]
    texts = [f"{f.name} ({f.size / MIB:.1f} MiB, {age(f.age_s)} old, {_who(f)})" for f in oldest]
    return ", ".join(texts) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
