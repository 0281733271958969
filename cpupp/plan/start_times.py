"""Where the time of a start went: each milestone, what it took, and the host that all others waited for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpupp.plan.gang import State
from cpupp.plan.milestones import MILESTONES


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """seconds: since the step before; last: the host that was last; at: of each vLLM node, seconds since the begin."""

    milestone: str
    seconds: float
    last: str
    at: tuple[float, ...] = ()


def start_steps(state: State, began: float) -> tuple[StartStep, ...]:
    """The steps of an attempt that is ready, else none. began: on the clock of the state's events."""
    if state.ready_at is None:
        return ()
    steps, before = [], began
    for index, milestone in enumerate(MILESTONES[1:]):
        times = [node.reached[index] for node in state.nodes]
        after = max(times)
        last = state.nodes[times.index(after)].host
        at = tuple(round(time - began, 3) for time in times)
        steps.append(StartStep(milestone=milestone, seconds=round(after - before, 3), last=last, at=at))
        before = after
    return tuple(steps)


def start_text(steps: Sequence[StartStep]) -> str:
    """One line: `spawned 1.4 s, imported 11.2 s (b), ..., ready 2.1 s`; in brackets who was last, of several hosts."""
    several = any(len(step.at) > 1 for step in steps)
    # What comes last is the head's alone.
    named = [f" ({step.last})" if several and step.milestone != MILESTONES[-1] else "" for step in steps]
    return ", ".join(f"{step.milestone} {step.seconds:.1f} s{who}" for step, who in zip(steps, named, strict=True))


def start_data(steps: Sequence[StartStep]) -> list[dict[str, Any]]:
    """The steps as JSON values."""
    return [asdict(step) for step in steps]


def read_start(data: Any) -> tuple[StartStep, ...]:
    """Read what `start_data` wrote, as far as it can be read."""
    found = []
    for item in data if isinstance(data, list) else ():
        if not isinstance(item, Mapping):
            continue
        seconds, at = item.get("seconds"), item.get("at")
        if isinstance(seconds, int | float) and math.isfinite(seconds):
            times = tuple(t for t in at if isinstance(t, int | float)) if isinstance(at, list) else ()
            name, last = str(item.get("milestone")), str(item.get("last") or "")
            found.append(StartStep(milestone=name, seconds=seconds, last=last, at=times))
    return tuple(found)
