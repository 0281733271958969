"""Where the time of each rank's steps goes: its worker's counters (rank/agent_steps.py), and the split of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counters of one kind of step. The four times, in nanoseconds, add up to all that passed.

    compute: the worker without its communicator; wire: the communicator's own work; wait: blocked in it until a peer's
    data is there, its travel included; idle: until the engine orders something.
    """

    steps: int = 0
    tokens: int = 0
    compute_ns: int = 0
    wire_ns: int = 0
    wait_ns: int = 0
    idle_ns: int = 0

    def since(self, before: StepCounts) -> StepCounts:
        """What was added after `before`; all of it where the worker has started anew."""
        if before.steps > self.steps:
            return self
        return StepCounts(**{name: getattr(self, name) - getattr(before, name) for name in self.__slots__})

    def plus(self, other: StepCounts) -> StepCounts:
        """Both together."""
        return StepCounts(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """decode: steps in which every request gets one token; other: those that read a prompt, and orders beside steps."""

    decode: StepCounts = StepCounts()
    other: StepCounts = StepCounts()

    def since(self, before: RankSteps | None) -> RankSteps:
        """What was added after `before`."""
        if before is None:
            return self
        return RankSteps(decode=self.decode.since(before.decode), other=self.other.since(before.other))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """An average step, in milliseconds; the four parts add up to step_ms. batch: tokens of a step, on average."""

    steps: int
    batch: float
    step_ms: float
    compute_ms: float
    wire_ms: float
    wait_ms: float
    idle_ms: float


def read_rank_steps(data: Any) -> dict[int, RankSteps]:
    """Read what an agent says of the ranks of one site; what cannot be read is left out."""
    items = data.items() if isinstance(data, Mapping) else ()
    return {
        int(rank): RankSteps(decode=_counts(kinds.get("decode")), other=_counts(kinds.get("other")))
        for rank, kinds in items
        if str(rank).isdecimal() and isinstance(kinds, Mapping)
    }


def _counts(data: Any) -> StepCounts:
    values = data if isinstance(data, Mapping) else {}
    found = {name: values.get(name) for name in StepCounts.__slots__}
    return StepCounts(**{name: value for name, value in found.items() if isinstance(value, int)})


def split(counts: StepCounts) -> StepSplit | None:
    """The average of these steps; None when there are none."""
    if counts.steps < 1:
        return None
    parts = [
        value / counts.steps / 1e6 for value in (counts.compute_ns, counts.wire_ns, counts.wait_ns, counts.idle_ns)
    ]
    compute, wire, wait, idle = parts
    return StepSplit(
        steps=counts.steps,
        batch=counts.tokens / counts.steps,
        step_ms=sum(parts),
        compute_ms=compute,
        wire_ms=wire,
        wait_ms=wait,
        idle_ms=idle,
    )
