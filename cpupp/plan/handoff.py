"""The contract between launcher and ranks: what travels in `CPUPP_HANDOFF`, and what ranks report back.

Standard library only: this module is also copied to the hosts and imported inside vLLM's worker processes.
The handoff is one JSON object in one environment variable. Reports are NDJSON lines that ranks append to the file
`RankHandoff.reports`; the agent beside them reads that file and passes each line to the launcher.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

HANDOFF_ENV = "CPUPP_HANDOFF"
HANDOFF_VERSION = 1

MODES = ("links", "fallback", "stock")
BACKENDS = ("auto", "shm", "gloo")
TRANSPORTS = ("shm", "gloo")


class HandoffError(ValueError):
    """The handoff or a report cannot be read: the text says which field and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHandoff:
    """What cpupp tells the ranks of one vLLM node.

    run: run id, unique for each launch; attempt: 1, 2, ... of that run; node_rank: vLLM's `--node-rank`;
    mode: `links`, `fallback` or `stock` (issue: which communicator to inject); backend: `auto`, `shm` (demanded) or
    `gloo` (forced); reports: absolute path of the NDJSON file to append to; host: the host's name in the cluster file;
    no_shm: the plan found too little room in this host's /dev/shm, so its groups that share memory are gloo;
    num_nodes: vLLM nodes of the run, which watch each other when there are several (rank/beat.py);
    shares_cores: API server and engine have no core but those of this node's only rank;
    packed_weights: linear layers may be packed on CPUs that need it (rank/packed_linear.py);
    tiled_weights: their weights may be held a second time, as AMX tiles (rank/tiled_linear.py).
    """

    run: str
    attempt: int
    node_rank: int
    mode: str
    backend: str
    reports: str
    host: str
    no_shm: bool
    num_nodes: int = 1
    shares_cores: bool = False
    packed_weights: bool = False
    tiled_weights: bool = False

    def encode(self) -> str:
        """Return one line of JSON (ASCII, sorted keys), the value of `CPUPP_HANDOFF`."""
        return json.dumps({"version": HANDOFF_VERSION, **asdict(self)}, sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> RankHandoff:
        """Read what `encode` wrote. Raises HandoffError on another version, a missing, unknown or ill-typed field."""
        data = _load(text)
        version = data.pop("version", None)
        if version != HANDOFF_VERSION:
            raise HandoffError(f"handoff version {version!r} is not {HANDOFF_VERSION}")
        return cls(**_typed(data, cls, "handoff"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginReport:
    """Sent once by each process that registered the plugin: pid, what it is (argv0 or process title), vllm version."""

    pid: int
    vllm: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Sent by each rank for each TP or PP group it is in, once the group's transports are settled.

    rank: global rank; kind: `tp` or `pp`; ranks: global ranks of the group in order; backend: `shm`, `gloo` or `mixed`;
    links: [src, dst, transport] with global ranks, every ordered pair of the group; reason: one sentence.
    """

    rank: int
    pid: int
    kind: str
    ranks: list[int]
    backend: str
    links: list[list[Any]]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """A rank's own account of why it cannot go on: where (module or step) and the message."""

    pid: int
    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """A vLLM node does not hear from another any more; sent again for as long as that lasts.

    node_rank: the vLLM node that is lost, -1 for torch's store in the worker of rank 0; silent_s: for how long, 0 when
    that node itself told of its end; message: one sentence. Only a detached agent acts on it: an attached launcher sees
    losses by itself.
    """

    pid: int
    node_rank: int
    silent_s: float
    message: str


Report = PluginReport | GroupReport | ErrorReport | PeerReport
_REPORTS: dict[str, type[PluginReport] | type[GroupReport] | type[ErrorReport] | type[PeerReport]] = {
    "plugin": PluginReport,
    "group": GroupReport,
    "error": ErrorReport,
    "peer": PeerReport,
}


def encode_report(report: Report) -> str:
    """Return the report as one line of JSON without a newline."""
    kind = next(name for name, cls in _REPORTS.items() if isinstance(report, cls))
    return json.dumps({"report": kind, **asdict(report)}, sort_keys=True)


def decode_report(line: str) -> Report:
    """Read what `encode_report` wrote. Raises HandoffError with the reason when the line is anything else."""
    data = _load(line)
    kind = data.pop("report", None)
    cls = _REPORTS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise HandoffError(f"unknown report {kind!r}; known: {', '.join(_REPORTS)}")
    return cls(**_typed(data, cls, f"report {kind}"))


def _load(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise HandoffError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise HandoffError(f"not a JSON object: {text[:80]!r}")
    return data


def _typed(data: dict[str, Any], cls: type, what: str) -> dict[str, Any]:
    kinds = {"str": str, "int": int, "float": float, "bool": bool, "list[int]": list, "list[list[Any]]": list}
    wanted: dict[str, str] = {name: cls.__annotations__[name] for name in cls.__dataclass_fields__}  # type: ignore[attr-defined]  # cls is a dataclass
    missing = sorted(set(wanted) - set(data))
    unknown = sorted(set(data) - set(wanted))
    if missing or unknown:
        raise HandoffError(f"{what}: missing {missing}, unknown {unknown}")
    for name, kind in wanted.items():
        value = data[name]
        if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise HandoffError(f"{what}: {name} = {value!r} is not {kind}")
    return data
