"""Where each rank sits: rank <-> (host, vLLM node, stage, TP index), and the TP and PP groups.

vLLM numbers ranks with the TP index fastest, then the stage (`rank = stage * tensor + tp_index`), and gives vLLM node r
the ranks from `r * local_world_size`; all vLLM nodes have the same local world size. A host with more slots than that
size therefore carries several vLLM nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from cpupp.plan.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one rank. `rank`, `node_rank` and `stage` count from 0 in the cluster, `local_rank` in its node."""

    rank: int
    host: str
    node_rank: int
    local_rank: int
    stage: int
    tp_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSeats:
    """One TP or PP group: name (`tp0`, `pp1`, ...), kind (`tp` or `pp`) and its global ranks in group order."""

    name: str
    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """All seats in rank order, and the groups with more than one rank (others need no communication)."""

    pipeline: int
    tensor: int
    local_world_size: int
    num_nodes: int
    seats: tuple[Seat, ...]
    groups: tuple[GroupSeats, ...]


def equation(pipeline: int, tensor: int, slots: list[int]) -> str | None:
    """Return why the slots do not sum to `pipeline x tensor`, as the whole equation; None when they do."""
    if pipeline * tensor == sum(slots):
        return None
    total = " + ".join(str(n) for n in slots)
    total = f"slots({total} = {sum(slots)})" if len(slots) > 1 else f"slots({total})"
    return f"pipeline({pipeline}) * tensor({tensor}) = {pipeline * tensor} != {total}"


def slots_equation(spec: ClusterSpec) -> str | None:
    """The equation of a whole spec; None when its slots fit."""
    if spec.parallel.auto:
        return None
    return equation(spec.parallel.pipeline, spec.parallel.tensor, [host.slots for host in spec.hosts])


def make_grid(spec: ClusterSpec) -> Grid:
    """Seat every rank on its host, in the order of the cluster file. The caller has checked `slots_equation`."""
    assert slots_equation(spec) is None
    pipeline, tensor = spec.parallel.pipeline, spec.parallel.tensor
    size = gcd(*(host.slots for host in spec.hosts))
    hosts = [host.name for host in spec.hosts for _ in range(host.slots)]
    seats = tuple(
        Seat(
            rank=rank,
            host=host,
            node_rank=rank // size,
            local_rank=rank % size,
            stage=rank // tensor,
            tp_index=rank % tensor,
        )
        for rank, host in enumerate(hosts)
    )
    tp = [("tp", tuple(range(s * tensor, (s + 1) * tensor))) for s in range(pipeline)] if tensor > 1 else []
    pp = [("pp", tuple(range(t, pipeline * tensor, tensor))) for t in range(tensor)] if pipeline > 1 else []
    groups = tuple(
        GroupSeats(name=f"{kind}{index}", kind=kind, ranks=ranks)
        for kinds in (tp, pp)
        for index, (kind, ranks) in enumerate(kinds)
    )
    return Grid(
        pipeline=pipeline,
        tensor=tensor,
        local_world_size=size,
        num_nodes=len(seats) // size,
        seats=seats,
        groups=groups,
    )
