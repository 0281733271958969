"""The states of a run, as its record and the commands that look at runs name them."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """What a run is doing, one word for people and for JSON.

    starting: until the model serves; ready: it serves; degraded: a first sign of failure, the gang still to be taken
    down; restarting: all is down, and comes again; stopping: on the way down for good; failed: ended by a failure, or
    not ready in time; stopped: ended because it was told to, or because its question was answered; crashed: its
    launcher, or everything on its hosts, is gone and nobody wrote how it ended. Those who look find that out.
    """

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILED = "failed"
    STOPPED = "stopped"
    CRASHED = "crashed"

    @property
    def ended(self) -> bool:
        """Whether nothing of the run is left to change it."""
        return self in (RunState.FAILED, RunState.STOPPED, RunState.CRASHED)
