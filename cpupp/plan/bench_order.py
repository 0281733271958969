"""The contract between `cpupp bench comm` and its ranks: what to measure, and the times that come back.

Standard library only: this module is also copied to the hosts. The order is one JSON object in `CPUPP_BENCH`, beside
the handoff. Times are NDJSON lines in the handoff's reports file, beside the announcements of the groups.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from cpupp.plan.handoff import HandoffError, Report, decode_report

BENCH_ENV = "CPUPP_BENCH"
BENCH_VERSION = 1

HOP, ALL_REDUCE = "hop", "all_reduce"
PATHS = ("cpupp", "vllm_generic", "gloo", "tcp", "shm")
"""Ours; vLLM's generic path; one plain gloo send and receive; a raw TCP socket; vLLM's bare SHM operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchGroup:
    """A TP or PP group of the plan: its name there, `tp` or `pp`, its global ranks in order."""

    name: str
    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """What is measured: op `hop` (a link, both directions) or `all_reduce` (a whole group), and its ranks.

    shared: whether the plan says that all these ranks share memory.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOrder:
    """What one rank is told. sizes: bytes of each op, ascending.

    address: of this rank for its peers; block_s: seconds that one target at one size should take; rounds: how often the
    paths take turns in it; timeout_s: how long a rank waits for another.
    """

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    address: str
    groups: tuple[BenchGroup, ...]
    targets: tuple[BenchTarget, ...]
    sizes: dict[str, tuple[int, ...]]
    block_s: float
    rounds: int
    timeout_s: float

    def encode(self) -> str:
        """Return one line of JSON, the value of `CPUPP_BENCH`."""
        return json.dumps({"version": BENCH_VERSION, **asdict(self)}, sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> BenchOrder:
        """Read what `encode` wrote. Raises HandoffError."""
        try:
            data = json.loads(text)
            if data.pop("version") != BENCH_VERSION:
                raise ValueError(f"version is not {BENCH_VERSION}")
            data["groups"] = tuple(BenchGroup(**{**g, "ranks": tuple(g["ranks"])}) for g in data["groups"])
            data["targets"] = tuple(BenchTarget(**{**t, "ranks": tuple(t["ranks"])}) for t in data["targets"])
            data["sizes"] = {op: tuple(sizes) for op, sizes in data["sizes"].items()}
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HandoffError(f"bench order: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTimes:
    """Times of one path for one target and size, by its first rank. An empty list: left out, and `note` says why.

    nanoseconds: one way for a hop, the whole operation for a collective.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    bytes: int
    path: str
    nanoseconds: tuple[int, ...]
    note: str = ""

    def encode(self) -> str:
        """Return one line of JSON without a newline."""
        return json.dumps({"report": "bench", **asdict(self)}, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDone:
    """The rank has measured everything and is about to leave."""

    rank: int

    def encode(self) -> str:
        """Return one line of JSON without a newline."""
        return json.dumps({"report": "bench-done", "rank": self.rank}, sort_keys=True)


def decode_line(line: str) -> Report | BenchTimes | BenchDone:
    """Read one line of the reports file. Raises HandoffError with the reason."""
    try:
        data: Any = json.loads(line)
        kind = data.pop("report")
        if kind == "bench":
            lists = {"ranks": tuple(data["ranks"]), "nanoseconds": tuple(data["nanoseconds"])}
            return BenchTimes(**{**data, **lists})
        if kind == "bench-done":
            return BenchDone(**data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HandoffError(f"report: {error}") from None
    return decode_report(line)
