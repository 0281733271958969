"""What a host says of the runs on it: the answers to the agent's `runs`, read with care.

An agent of another version, or a file cut short by a full disk, may lack any field; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpupp.plan.steps import RankSteps, read_rank_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a vLLM node: rss in bytes, cpu_s seconds of its threads, state as ps letters it (R, S, T, Z)."""

    pid: int
    name: str
    rss: int
    cpu_s: float
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One vLLM node: rss and cpu_s of all its processes; log_time: unix seconds of its last output, 0 without any.

    ranks: the pid of each of its ranks, as far as they have reported.
    """

    node: int
    main_pid: int
    alive: bool
    exit_code: int | None
    rss: int
    cpu_s: float
    log_bytes: int
    log_time: float
    processes: Mapping[int, Process]
    ranks: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFailure:
    """The failure that a host wrote down; node: -1 when it is the whole host's; time: unix seconds there."""

    code: str
    message: str
    node: int
    time: float
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One attempt of one run on one host, running or kept after its end.

    record: what the launcher left there for whoever asks; time: when its state was written, 0 when it never was;
    held: some process of it lives; ended: the record that a detached run keeps after its end; steps: by rank, of those
    whose workers count.
    """

    host: str
    run: str
    attempt: int
    path: str
    record: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0
    detached: bool = False
    failure: HostFailure | None = None
    nodes: Mapping[int, NodeReport] = field(default_factory=dict)
    held: bool = False
    ended: bool = False
    steps: Mapping[int, RankSteps] = field(default_factory=dict)

    @property
    def cluster(self) -> str:
        """The cluster's name, empty when the launcher did not say."""
        return str(self.record.get("cluster") or "")

    @property
    def created(self) -> float:
        """When the launcher made it, unix seconds."""
        return _float(self.record.get("created"))


def read_sites(data: Any) -> tuple[Site, ...]:
    """Read the answer to `runs`; entries that are no sites are left out."""
    items = data if isinstance(data, list) else []
    return tuple(_site(item) for item in items if isinstance(item, Mapping) and item.get("run"))


def _site(item: Mapping[str, Any]) -> Site:
    state, outer = _mapping(item.get("state")), _mapping(item.get("record"))
    nodes = [_node(node) for node in _list(state.get("nodes")) if isinstance(node, Mapping)]
    return Site(
        host=str(item.get("host") or ""),
        run=str(item["run"]),
        attempt=_int(item.get("attempt"), 1),
        path=str(item.get("site") or ""),
        # `site.json` keeps what `prepare` was given under a key of its own.
        record=_mapping(outer.get("record")) or outer,
        time=_float(state.get("time")),
        detached=bool(state.get("detached")),
        failure=_own_failure(state, _mapping(item.get("result"))),
        nodes={node.node: node for node in nodes},
        held=bool(item.get("held")),
        ended=bool(item.get("ended")),
        steps=read_rank_steps(item.get("steps")),
    )


def _node(item: Mapping[str, Any]) -> NodeReport:
    processes = [_process(one) for one in _list(item.get("processes")) if isinstance(one, Mapping)]
    code = item.get("exit_code")
    return NodeReport(
        node=_int(item.get("node"), -1),
        main_pid=_int(item.get("main_pid")),
        alive=bool(item.get("alive")),
        exit_code=code if isinstance(code, int) else None,
        rss=_int(item.get("rss")),
        cpu_s=_float(item.get("cpu_s")),
        log_bytes=_int(item.get("log_bytes")),
        log_time=_float(item.get("log_time")),
        processes={one.pid: one for one in processes},
        ranks={int(rank): _int(pid) for rank, pid in _mapping(item.get("ranks")).items() if str(rank).isdigit()},
    )


def _process(item: Mapping[str, Any]) -> Process:
    return Process(
        pid=_int(item.get("pid")),
        name=str(item.get("name") or ""),
        rss=_int(item.get("rss")),
        cpu_s=_float(item.get("cpu_s")),
        state=str(item.get("state") or ""),
    )


def _own_failure(state: Mapping[str, Any], result: Mapping[str, Any]) -> HostFailure | None:
    """The failure that the agent saw. That it was killed itself is said by the result alone."""
    failure = _failure(state.get("failure"))
    if failure is not None and failure.code == "PEER-LOST" and result.get("outcome") == "stopped":
        return None  # in an ordered stop some hosts fall silent before others hear of it
    return failure or _failure(result.get("failure"))


def _failure(value: Any) -> HostFailure | None:
    if not isinstance(value, Mapping):
        return None
    return HostFailure(
        code=str(value.get("code") or "RANK-FAILED"),
        message=str(value.get("message") or ""),
        node=_int(value.get("node"), -1),
        time=_float(value.get("time")),
        last_lines=tuple(str(line) for line in _list(value.get("last_lines"))),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _int(value: Any, default: int = 0) -> int:
    return int(value) if isinstance(value, int | float) else default
