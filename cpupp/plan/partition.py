"""The split of layers over stages whose slowest stage is fastest, among those that fit the memory: exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

GIB = 1 << 30
FEMTO = 1_000_000
"""Femtoseconds of a nanosecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a stage's time is made of, and its memory beside the layers (fixed, bytes of one rank).

    per_byte: femtoseconds to read one byte of weights; per_layer: nanoseconds of every layer whatever its size; extra:
    nanoseconds of a token (head, engine).
    """

    per_byte: int
    per_layer: int
    extra: int
    fixed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that ranks share: its size in bytes, and how many ranks of which stage are in it."""

    limit: int
    num_ranks: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Layers in order (bytes that a rank reads and holds of each, and of its KV cache), stages in order, and rooms."""

    read: tuple[int, ...]
    held: tuple[int, ...]
    kv: tuple[int, ...]
    stages: tuple[StageCost, ...]
    rooms: tuple[Room, ...]


def solve(problem: Problem) -> tuple[int, ...] | None:
    """Return the number of layers of each stage, or None when nothing fits.

    The slowest stage is as fast as it can be; among all such splits the sum of squared times is least.
    """
    table = _Table(problem)
    ceiling = _greedy_ceiling(table)
    found = _search(table, ceiling, max)
    if found is None:
        return None
    slowest = max(table.times(found))
    return _search(table, slowest, lambda total, time: total + time * time)


def fits(problem: Problem) -> bool:
    """Whether any split fits the memory."""
    table = _Table(problem)
    return _greedy(table, None) is not None or _search(table, None, max) is not None


def stage_times(problem: Problem, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Nanoseconds of each stage for one token."""
    return _Table(problem).times(sizes)


def stage_memory(problem: Problem, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of one rank of each stage: weights, KV cache in whole GiB, and what is fixed."""
    table = _Table(problem)
    starts = [0, *accumulate(sizes)]
    return tuple(table.memory(s, starts[s], starts[s + 1]) for s in range(len(sizes)))


class _Table:
    """Sums over any run of layers in constant time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_layers, self.num_stages = len(problem.read), len(problem.stages)
        self._read = [0, *accumulate(problem.read)]
        self._held = [0, *accumulate(problem.held)]
        self._kv = [0, *accumulate(problem.kv)]
        self.rooms_of = [[i for i, room in enumerate(problem.rooms) if s in room.num_ranks] for s in self.stages]
        last = [max(room.num_ranks, default=-1) for room in problem.rooms]
        self.stays_open = [[last[i] > s for i in range(len(last))] for s in self.stages]

    @property
    def stages(self) -> range:
        return range(self.num_stages)

    def time(self, stage: int, start: int, end: int) -> int:
        """Nanoseconds of layers [start, end) on a stage."""
        cost = self.problem.stages[stage]
        return (
            (self._read[end] - self._read[start]) * cost.per_byte // FEMTO + (end - start) * cost.per_layer + cost.extra
        )

    def memory(self, stage: int, start: int, end: int) -> int:
        """Bytes of one rank; vLLM takes the size of the KV cache in whole GiB."""
        kv = -(-(self._kv[end] - self._kv[start]) // GIB) * GIB
        return self._held[end] - self._held[start] + kv + self.problem.stages[stage].fixed

    def times(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        starts = [0, *accumulate(sizes)]
        return tuple(self.time(s, starts[s], starts[s + 1]) for s in self.stages)

    def after(self, used: tuple[int, ...], stage: int, start: int, end: int) -> tuple[int, ...] | None:
        """What is used of the rooms that later stages share too; None when the layers do not fit."""
        if not self.rooms_of[stage]:
            return used
        need, now = self.memory(stage, start, end), list(used)
        for index in self.rooms_of[stage]:
            room = self.problem.rooms[index]
            now[index] += need * room.num_ranks[stage]
            if now[index] > room.limit:
                return None
            if not self.stays_open[stage][index]:
                now[index] = 0
        return tuple(now)


def _greedy(table: _Table, ceiling: int | None) -> tuple[int, ...] | None:
    """Give every stage as many layers as fit and stay below the ceiling (none: memory alone counts)."""
    start, used, sizes = 0, (0,) * len(table.problem.rooms), []
    for stage in table.stages:
        most = table.num_layers - (table.num_stages - 1 - stage)
        end, then = start, None
        while end < most and (ceiling is None or table.time(stage, start, end + 1) <= ceiling):
            more = table.after(used, stage, start, end + 1)
            if more is None:
                break
            end, then = end + 1, more
        if then is None:
            return None
        sizes.append(end - start)
        start, used = end, then
    return tuple(sizes) if start == table.num_layers else None


def _greedy_ceiling(table: _Table) -> int | None:
    """A time of the slowest stage that can be kept; None when greed finds no split that fits."""
    found = _greedy(table, None)
    if found is None:
        return None
    low, high = 0, max(table.times(found))
    while low < high:
        middle = (low + high) // 2
        better = _greedy(table, middle)
        if better is None:
            low = middle + 1
        else:
            high = max(table.times(better))
    return high


def _search(table: _Table, ceiling: int | None, add: Callable[[int, int], int]) -> tuple[int, ...] | None:
    """The split of least value, by dynamic programming over the layers given out and the shared rooms' use.

    add(value so far, time of one more stage) must not fall when either grows.
    """
    nothing: tuple[int, ...] = ()
    states = {(0, (0,) * len(table.problem.rooms)): (0, nothing)}
    earliest = _earliest_starts(table, ceiling)
    for stage in table.stages:
        is_last = stage == table.num_stages - 1
        most = table.num_layers - (table.num_stages - 1 - stage)
        found: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
        for (start, used), (value, sizes) in states.items():
            for end in range(most if is_last else max(start + 1, earliest[stage + 1]), most + 1):
                time = table.time(stage, start, end)
                if ceiling is not None and time > ceiling:
                    break
                then = table.after(used, stage, start, end)
                if then is None:
                    break
                total, key = add(value, time), (end, then)
                if key not in found or total < found[key][0]:
                    found[key] = (total, (*sizes, end - start))
        states = found
    ends = [state for (end, _), state in states.items() if end == table.num_layers]
    return min(ends, key=lambda state: state[0])[1] if ends else None


def _earliest_starts(table: _Table, ceiling: int | None) -> list[int]:
    """The first layer from which on each stage and those behind it stay below the ceiling, memory aside."""
    starts = [0] * table.num_stages + [table.num_layers]
    for stage in reversed(table.stages):
        end = start = starts[stage + 1]
        while start > 0 and (ceiling is None or table.time(stage, start - 1, end) <= ceiling):
            start -= 1
        starts[stage] = start
    return starts
