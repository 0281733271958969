"""Leave a run to its agents: every host has agreed before any connection is closed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cpupp.launch.contract import Session
from cpupp.launch.session import run_all
from cpupp.plan.versions import WORKER_EXCEPTION

ANSWER_S = 30.0


def detach_hosts(sessions: Mapping[str, Session]) -> list[str]:
    """Tell every host to go on without this launcher, all at once. Returns what went wrong, empty when nothing did.

    When a host will not, all connections are still open, and everything can be stopped over them.
    """
    params: dict[str, Any] = {"patterns": [WORKER_EXCEPTION.pattern]}
    orders = {
        host: partial(session.request, "detach", timeout=ANSWER_S, **params) for host, session in sessions.items()
    }
    _, errors = run_all(orders)
    if not errors:  # the order may be given again
        _, errors = run_all({host: partial(session.detach, **params) for host, session in sessions.items()})
    return [f"host {error.where}: {error.message}" for error in errors]
