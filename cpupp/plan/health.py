"""What only doctor asks of a host, so that plan and launch do not pay for it. Sizes are bytes, times seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverFacts:
    """A file in /dev/shm with a name as vLLM, torch, OpenMP or cpupp give it.

    state: `alive` (a process maps or holds it, or it is younger than a minute), `dead`, or `unknown` where processes
    that this user cannot see may use it; mine: this user's.
    """

    name: str
    size: int
    age_s: float
    owner: str
    mine: bool
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process of vLLM or cpupp beside doctor's own. kind: `vllm`, `agent` or `keeper`.

    run: the run of cpupp that it belongs to, empty when no site of this user tells; orphan: its parent is gone.
    """

    pid: int
    kind: str
    name: str
    age_s: float
    owner: str
    run: str
    orphan: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadFacts:
    """A library that the plan preloads, and why the host's loader does not take it (empty when it does)."""

    path: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """A place that vLLM or cpupp write to."""

    what: str
    path: str
    free: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFacts:
    """One host's answer. online: CPUs of the machine.

    commit_left: bytes that may still be reserved (matters when overcommit is 2); model_files: `size digest` of what
    decides the model, by file name; hub: empty when it was not tried, `reachable`, or why not.
    """

    glibc: str
    online: int
    threads_per_core: int
    governors: tuple[str, ...]
    load: float
    swap_total: int
    swap_free: int
    huge_pages: str
    overcommit: int
    commit_left: int
    shm_type: str
    shm_options: tuple[str, ...]
    leftovers: tuple[LeftoverFacts, ...]
    processes: tuple[ProcessFacts, ...]
    preloads: tuple[PreloadFacts, ...]
    disks: tuple[DiskFacts, ...]
    model_files: dict[str, str]
    unreadable: tuple[str, ...]
    hub: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """What the vLLM of a host says of itself: flags that it does not know; architectures: name -> `pipeline`, `single`
    (no pipeline) or `absent` (not in its registry). error: why it could not be asked, else empty.
    """

    unknown_flags: tuple[str, ...]
    architectures: dict[str, str]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingFacts:
    """Round trips of small requests over the SSH session, in seconds, and how far the host's clock is ahead of ours."""

    round_trips: tuple[float, ...] = field(default=())
    ahead_s: float = 0.0

    @property
    def median_s(self) -> float:
        """The middle one of the round trips."""
        return sorted(self.round_trips)[len(self.round_trips) // 2]
