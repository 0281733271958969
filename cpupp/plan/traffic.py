"""What the ranks of two hosts send each other for one generated token, and what it costs on a measured way. Pure.

An estimate: a pipeline link carries hidden states and residual of the token, once; a tensor group over hosts reduces
one vector after attention and one after the MLP of every layer, each in two steps (there and back).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.grid import Grid, make_grid, slots_equation
from cpupp.plan.model import ModelFacts, dtype_bytes
from cpupp.plan.pairs import PairFacts
from cpupp.plan.weights import engine_arg


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """From host `src` to host `dst` for each token: bytes, and messages that wait for each other. what: whose."""

    src: str
    dst: str
    num_bytes: int
    num_messages: int
    what: str


def traffic_of(spec: ClusterSpec, model: ModelFacts) -> dict[tuple[str, str], Traffic]:
    """Return what flows between hosts, by (src, dst); the larger where a pair has both kinds."""
    if slots_equation(spec) is not None:
        return {}
    grid = make_grid(spec)
    wanted = str(engine_arg(spec, "dtype") or "auto")
    element = min(dtype_bytes(model.dtype), 2) if wanted == "auto" else dtype_bytes(wanted)
    vector = model.hidden_size * element
    found: dict[tuple[str, str], Traffic] = {}
    for src, dst in _hops(grid):
        found[src, dst] = Traffic(src=src, dst=dst, num_bytes=2 * vector, num_messages=1, what="the pipeline")
    num = 4 * ceil(model.num_layers / grid.pipeline)
    for src, dst in _peers(grid):
        what = "tensor parallelism over hosts"
        found[src, dst] = Traffic(src=src, dst=dst, num_bytes=num // 2 * vector, num_messages=num, what=what)
    return found


def _hops(grid: Grid) -> list[tuple[str, str]]:
    """The ways on which a stage hands over to the next, between different hosts."""
    hosts = {(seat.stage, seat.tp_index): seat.host for seat in grid.seats}
    ways = [(host, hosts.get((stage + 1, index), host)) for (stage, index), host in hosts.items()]
    return [(src, dst) for src, dst in dict.fromkeys(ways) if src != dst]


def _peers(grid: Grid) -> list[tuple[str, str]]:
    """The ways between the hosts of one tensor group."""
    hosts = {seat.rank: seat.host for seat in grid.seats}
    groups = [[hosts[rank] for rank in group.ranks] for group in grid.groups if group.kind == "tp"]
    return [(a, b) for group in groups for a in dict.fromkeys(group) for b in dict.fromkeys(group) if a != b]


def token_seconds(traffic: Traffic, pair: PairFacts) -> float | None:
    """Seconds that one token spends on this way; None when it was not measured."""
    if pair.latency_s is None or not pair.bytes_per_s:
        return None
    return traffic.num_messages * pair.latency_s / 2 + traffic.num_bytes / pair.bytes_per_s
