"""The split of layers: against every split there is, and where memory decides."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cpupp.plan.partition import GIB, Problem, Room, StageCost, fits, solve, stage_memory, stage_times


def every_split(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """All ways to give every stage at least one layer, in order."""
    found = []
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        edges = [0, *cuts, num_layers]
        found.append(tuple(b - a for a, b in pairwise(edges)))
    return found


def best(problem: Problem) -> tuple[int, int] | None:
    """Time of the slowest stage and sum of squares of the best split that fits."""
    values = []
    for sizes in every_split(len(problem.read), len(problem.stages)):
        memory = stage_memory(problem, sizes)
        if all(sum(memory[s] * n for s, n in room.num_ranks.items()) <= room.limit for room in problem.rooms):
            times = stage_times(problem, sizes)
            values.append((max(times), sum(time * time for time in times)))
    return min(values, default=None)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small problems of unequal layers, stages and rooms, some of them shared by several stages."""
    num_layers = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, min(4, num_layers)))
    sizes = st.lists(st.integers(1, GIB), min_size=num_layers, max_size=num_layers).map(tuple)
    stage = st.builds(
        StageCost,
        per_byte=st.integers(1, 50),
        per_layer=st.integers(0, 10**8),
        extra=st.integers(0, 10**9),
        fixed=st.integers(0, GIB),
    )
    inside = st.dictionaries(st.integers(0, num_stages - 1), st.integers(1, 2), min_size=1)
    room = st.builds(Room, limit=st.integers(1, 16).map(lambda n: n * GIB), num_ranks=inside)
    return Problem(
        read=draw(sizes),
        held=draw(sizes),
        kv=draw(sizes),
        stages=tuple(draw(st.lists(stage, min_size=num_stages, max_size=num_stages))),
        rooms=tuple(draw(st.lists(room, max_size=3))),
    )


@settings(max_examples=300, deadline=None)
@given(problems())
def test_nothing_is_better(problem: Problem) -> None:
    found, wanted = solve(problem), best(problem)
    assert fits(problem) == (wanted is not None)
    if found is None:
        assert wanted is None
        return
    times = stage_times(problem, found)
    assert (max(times), sum(time * time for time in times)) == wanted


def test_a_long_pipeline_takes_no_time() -> None:
    cost = StageCost(per_byte=5, per_layer=500_000, extra=0, fixed=GIB)
    problem = Problem(
        read=(6 * GIB,) * 126,
        held=(6 * GIB,) * 126,
        kv=(GIB // 3,) * 126,
        stages=(cost,) * 63,
        rooms=tuple(Room(limit=16 * GIB, num_ranks={stage: 1}) for stage in range(63)),
    )
    assert solve(problem) == (2,) * 63
