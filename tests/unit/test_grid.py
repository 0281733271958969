"""Ranks, stages, vLLM nodes and groups."""

from __future__ import annotations

from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpupp.errors import CpuppError
from cpupp.plan.grid import equation, make_grid
from cpupp.plan.plan import make_plan
from tests.unit.factory import cluster


def test_two_by_two() -> None:
    grid = make_grid(cluster({"name": "a", "slots": 2}, {"name": "b", "slots": 2}, pipeline=2, tensor=2))
    assert [(s.rank, s.host, s.node_rank, s.local_rank, s.stage, s.tp_index) for s in grid.seats] == [
        (0, "a", 0, 0, 0, 0),
        (1, "a", 0, 1, 0, 1),
        (2, "b", 1, 0, 1, 0),
        (3, "b", 1, 1, 1, 1),
    ]
    assert {g.name: g.ranks for g in grid.groups} == {"tp0": (0, 1), "tp1": (2, 3), "pp0": (0, 2), "pp1": (1, 3)}


def test_unequal_slots_make_several_nodes_on_the_big_host() -> None:
    grid = make_grid(cluster({"name": "big", "slots": 4}, {"name": "small", "slots": 2}, pipeline=6))
    assert grid.local_world_size == 2
    assert [(s.host, s.node_rank, s.local_rank) for s in grid.seats] == [
        ("big", 0, 0),
        ("big", 0, 1),
        ("big", 1, 0),
        ("big", 1, 1),
        ("small", 2, 0),
        ("small", 2, 1),
    ]


def test_one_rank_needs_no_group() -> None:
    assert make_grid(cluster("a")).groups == ()


@pytest.mark.parametrize(
    ("pipeline", "tensor", "slots", "text"),
    [
        (2, 2, [3], "pipeline(2) * tensor(2) = 4 != slots(3)"),
        (4, 1, [1, 1, 1], "pipeline(4) * tensor(1) = 4 != slots(1 + 1 + 1 = 3)"),  # vllm #51548
    ],
)
def test_the_equation_is_printed_whole(pipeline: int, tensor: int, slots: list[int], text: str) -> None:
    assert equation(pipeline, tensor, slots) == text


def test_a_plan_refuses_the_wrong_sum() -> None:
    with pytest.raises(CpuppError, match=r"pipeline\(4\) \* tensor\(1\) = 4 != slots\(1 \+ 1 \+ 1 = 3\)"):
        make_plan(cluster("a", "b", "c", pipeline=4), {})


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 4))
def test_every_shape_is_numbered_as_vllm_numbers_it(slots: list[int], tensor: int) -> None:
    slots = [n * tensor for n in slots]
    pipeline = sum(slots) // tensor
    hosts = [{"name": f"h{i}", "slots": n} for i, n in enumerate(slots)]
    grid = make_grid(cluster(*hosts, pipeline=pipeline, tensor=tensor))
    assert grid.local_world_size == gcd(*slots)
    for seat in grid.seats:
        assert seat.rank == seat.stage * tensor + seat.tp_index
        assert seat.rank == seat.node_rank * grid.local_world_size + seat.local_rank
    nodes = {seat.node_rank: seat.host for seat in grid.seats}
    assert all(nodes[seat.node_rank] == seat.host for seat in grid.seats)  # no node on two hosts
    for kind in ("tp", "pp"):
        members = [rank for group in grid.groups if group.kind == kind for rank in group.ranks]
        assert len(members) == len(set(members))
