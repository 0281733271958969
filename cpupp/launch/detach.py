"""Leave a run to its agents: every host is told before any connection is closed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cpupp.launch.contract import Session
from cpupp.launch.session import run_all


def detach_hosts(sessions: Mapping[str, Session]) -> list[str]:
    """Tell every host to go on without this launcher, all at once. Returns what went wrong, empty when nothing did."""
    _, errors = run_all({host: partial(session.detach) for host, session in sessions.items()})
    return [f"host {error.where}: {error.message}" for error in errors]
