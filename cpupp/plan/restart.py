"""Whether a run that failed comes again: the policy of the cluster file, and what the attempts so far have shown."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cpupp.plan.failures import Failure

MAX_WAIT = 300.0
"""Seconds beyond which the wait before a restart is not doubled further."""

_REACH = ("HOST-LOST", "HOST-AWAY", "LAUNCHER-STOPPED")
"""Failures of the way to a host: they repeat while it is away, and prove nothing about what runs there."""

_VARIABLE = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """policy: `never` or `on-failure`; max: restarts in the whole run; backoff: seconds before the first of them."""

    policy: str
    max: int
    backoff: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the gang and how it ended: `outcome` as in the run's result, failures with the first one first.

    ready_seconds: from its start until the model served, None when it never did; seconds: from its start to its end.
    """

    number: int
    outcome: str
    failures: tuple[Failure, ...]
    ready_seconds: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """wait: seconds until the next attempt, None when there is none; reason: why there is none, empty by policy."""

    wait: float | None
    reason: str = ""


def verdict(restart: Restart, attempts: tuple[Attempt, ...]) -> Verdict:
    """Decide after the last of `attempts`, which has failed."""
    failed = attempts[-1]
    if restart.policy == "never" or not failed.failures:
        return Verdict(wait=None)
    if failed.failures[0].code == "NOT-READY":
        return Verdict(wait=None, reason="not restarted: the time of --timeout is over")
    if len(attempts) > restart.max:
        times = "once" if restart.max == 1 else f"{restart.max} times"
        return Verdict(wait=None, reason=f"not restarted again: it was {times} (restart.max)")
    if (earlier := _same_before(attempts)) is not None:
        reason = f"not restarted again: attempts {earlier} and {failed.number} failed alike before they were ready"
        return Verdict(wait=None, reason=reason)
    return Verdict(wait=min(MAX_WAIT, restart.backoff * 2 ** min(len(attempts) - 1, 30)))


def _same_before(attempts: tuple[Attempt, ...]) -> int | None:
    """The earlier attempt that failed as the last one did, both before ready and none of those between them ready."""
    *before, last = attempts
    key = _key(last)
    if last.ready_seconds is not None or last.failures[0].code in _REACH:
        return None
    for attempt in reversed(before):
        if attempt.ready_seconds is not None:
            return None
        if _key(attempt) == key:
            return attempt.number
    return None


def _key(attempt: Attempt) -> tuple[object, ...]:
    """What makes a failure the same one: code, node and message, without pids, times and addresses in memory."""
    if not attempt.failures:
        return ()
    first = attempt.failures[0]
    return first.code, first.host, first.node_rank, _VARIABLE.sub("#", first.message)
