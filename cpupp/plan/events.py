"""What can happen to a run, and what can be done about it: the events and actions of the supervision policy.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cpupp.plan.handoff import Report

# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at time `at`."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Event):
    """The supervisor runs: start the vLLM nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed. tails: the last lines of each vLLM node's log, needed when a failure is to be named."""

    tails: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned(Event):
    """A vLLM node's process was started."""

    node_rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed(Event):
    """A vLLM node could not be started at all: the host's own words."""

    node_rank: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(Event):
    """A vLLM node wrote a line."""

    node_rank: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Event):
    """A rank reported (rank/communicator.py, rank/vllm_plugin.py)."""

    node_rank: int
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Event):
    """A vLLM node's main process ended; a negative code is a signal.

    stopped: its agent had begun to end it; why: the kernel's word for it, where the host could read one.
    """

    node_rank: int
    code: int
    stopped: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDied(Event):
    """A worker process that had reported is gone while its vLLM node's main process still runs.

    code: its exit code, negative for a signal, None where only its parent could see it; why: as for Exited.
    """

    node_rank: int
    rank: int
    pid: int
    code: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperLost(Event):
    """The process between agent and vLLM node is gone, and the node was killed for it: the agent's words."""

    node_rank: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted(Event):
    """A process of a vLLM node stays stopped (SIGSTOP): it lives, and does nothing. rank: whose worker it is, if one's.

    name: what the process calls itself.
    """

    node_rank: int
    pid: int
    name: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost(Event):
    """The agent of a host, or the way to it, is gone."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health(Event):
    """/health answered with 200 (healthy) or not at all."""

    healthy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed(Event):
    """The completion that proves readiness came back (error empty), or did not."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Event):
    """The question of --ask was answered (error empty), or was not."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached(Event):
    """Every host was told to go on without the launcher (error empty), or one would not."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended(Event):
    """The launcher itself did not run for so many seconds: it was stopped, or its machine slept."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnected(Event):
    """Every host that the next attempt needs has a live session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAway(Event):
    """A host that the next attempt needs cannot be reached."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted(Event):
    """A signal reached the launcher."""

    signum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Event):
    """Every host has stopped, or could not be reached any more."""


# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNodes:
    """Prepare the site folders and start every vLLM node, all hosts at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHealth:
    """Ask the head's /health through its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Request one real completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceReady:
    """Tell the user the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask the user's question over the API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """Tell every host to go on without the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAll:
    """TERM, grace, KILL everywhere. now: the user insists, so no grace; failed: no request can end well any more."""

    now: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRestart:
    """Tell the user that the gang comes again: the failed attempt is the last of State.attempts."""

    wait: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect:
    """Make ready for the next attempt: sessions to the hosts that were lost, new ports."""


Action = StartNodes | CheckHealth | Complete | AnnounceReady | Ask | Detach | StopAll | AnnounceRestart | Reconnect
