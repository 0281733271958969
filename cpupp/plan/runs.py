"""Runs as their records name them, and which one the user means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpupp.errors import CpuppError, ExitCode
from cpupp.plan.hoststate import Site
from cpupp.plan.runstate import RunState
from cpupp.plan.start_times import StartStep, read_start

MAX_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRef:
    """A host of a run and the way to it: an SSH target, or this machine."""

    name: str
    ssh: str | None
    local: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRef:
    """The process that started a run: pid and start time in clock ticks prove which one, on the boot of a machine."""

    pid: int
    start: int
    boot_id: str
    hostname: str
    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run's record. started: unix seconds; state: as written last, or `crashed` when nobody writes it any more.

    launcher_alive: None when that cannot be told from this machine; folder: empty when this machine has no record;
    log_shifts: by vLLM node, how many bytes more it had written than its log here had when the launcher left;
    start: where the time until it was ready went.
    """

    run: str
    name: str
    file: str = ""
    folder: str = ""
    started: float = 0.0
    state: RunState
    detached: bool = False
    attempt: int = 1
    url: str = ""
    served_name: str = ""
    hosts: tuple[HostRef, ...] = ()
    launcher: LauncherRef | None = None
    launcher_alive: bool | None = None
    log_shifts: Mapping[int, int] = field(default_factory=dict)
    start: tuple[StartStep, ...] = ()

    @property
    def live(self) -> bool:
        """Whether it runs, as far as its record tells."""
        return not self.state.ended


def read_run(data: Any, folder: str) -> Run | None:
    """Read the values of a `run.json`; None when they are no record of a run."""
    if not isinstance(data, Mapping):
        return None
    try:
        state = RunState(str(data["status"]))
        run, name = str(data["run"]), str(data["name"])
    except (KeyError, ValueError):
        return None
    return Run(
        run=run,
        name=name,
        file=str(data.get("file") or ""),
        folder=folder,
        started=_number(data.get("started")),
        state=state,
        detached=bool(data.get("detached")),
        attempt=int(_number(data.get("attempt"))) or 1,
        url=str(data.get("url") or ""),
        served_name=str(data.get("served_name") or ""),
        hosts=_hosts(data.get("hosts")),
        launcher=_launcher(data.get("launcher")),
        log_shifts=_shifts(data.get("log_shifts")),
        start=read_start(data.get("start")),
    )


def _number(value: Any) -> float:
    """A number as Python's JSON reads it, which may be NaN, infinite or beyond a float: then 0."""
    try:
        number = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _hosts(value: Any) -> tuple[HostRef, ...]:
    items = [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
    return tuple(
        HostRef(name=str(item.get("name")), ssh=str(item.get("ssh") or "") or None, local=bool(item.get("local")))
        for item in items
    )


def _shifts(value: Any) -> dict[int, int]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {int(node): int(_number(shift)) for node, shift in items if str(node).isdecimal()}


def _launcher(value: Any) -> LauncherRef | None:
    if not isinstance(value, Mapping):
        return None
    return LauncherRef(
        pid=int(_number(value.get("pid"))),
        start=int(_number(value.get("start"))),
        boot_id=str(value.get("boot_id") or ""),
        hostname=str(value.get("hostname") or ""),
        user=str(value.get("user") or ""),
    )


def looks_like_file(text: str) -> bool:
    """Whether RUN is meant as the path of a cluster file: names and run ids hold no slash and no such ending."""
    return "/" in text or text.lower().endswith((".yaml", ".yml"))


def choose(runs: Sequence[Run], wanted: str | None) -> Run:
    """The run that `wanted` names: a run id, a unique beginning of one, a cluster's name, or a run folder's name.

    Without a wish: the only live run, else the newest. Raises CpuppError RUN-NONE, RUN-UNKNOWN or RUN-AMBIGUOUS; the
    last two list what there is.
    """
    if not runs and wanted is None:
        raise _error("RUN-NONE", "no run is recorded here", "with --file FILE the hosts of a cluster file are asked")
    newest = sorted(runs, key=lambda run: run.started, reverse=True)
    if wanted is None:
        live = [run for run in newest if run.live]
        return newest[0] if not live else _only(live, "several runs live")
    exact = [run for run in newest if wanted in (run.run, f"{run.name}-{run.run}")]
    if exact:
        return exact[0]
    named = [run for run in newest if run.name == wanted]
    if named:
        live = [run for run in named if run.live]
        return named[0] if not live else _only(live, f"several runs of {wanted} live")
    begun = [run for run in newest if run.run.startswith(wanted)] if wanted else []
    if begun:
        return _only(begun, f"several runs begin with {wanted!r}")
    known = f"known are\n{listed(newest)}" if newest else "none is"
    message = f"no run {wanted!r} is recorded here; {known}"
    raise _error("RUN-UNKNOWN", message, "with --file FILE the hosts of a cluster file are asked")


def _only(runs: Sequence[Run], what: str) -> Run:
    if len(runs) == 1:
        return runs[0]
    raise _error("RUN-AMBIGUOUS", f"{what}\n{listed(runs)}", "give one of these run ids")


def listed(runs: Sequence[Run]) -> str:
    """One line for each run, in order, for messages."""
    lines = [f"{run.run}  {run.name}  {run.state}" for run in runs[:MAX_LISTED]]
    rest = len(runs) - MAX_LISTED
    return "\n".join([*lines, *([f"and {rest} more (cpupp ps --all)"] if rest > 0 else [])])


def _error(code: str, message: str, hint: str) -> CpuppError:
    return CpuppError(code, message, hint=hint, exit_code=ExitCode.USAGE)


def runs_found(spec_name: str, hosts: Sequence[HostRef], sites: Sequence[Site]) -> list[Run]:
    """The runs of one cluster that its hosts know of, the newest first: for whoever has no record of them.

    Their state is provisional: `starting` where something lives; plan/status.py says more.
    """
    by_run: dict[str, list[Site]] = {}
    for site in sites:
        if site.cluster == spec_name:
            by_run.setdefault(site.run, []).append(site)
    found = [_run_found(spec_name, hosts, run, mine) for run, mine in by_run.items()]
    return sorted(found, key=lambda run: run.started, reverse=True)


def _run_found(name: str, hosts: Sequence[HostRef], run: str, sites: Sequence[Site]) -> Run:
    attempt = max(site.attempt for site in sites)
    last = [site for site in sites if site.attempt == attempt]
    failed = any(site.failure for site in last)
    return Run(
        run=run,
        name=name,
        started=min((site.created for site in sites if site.created), default=0.0),
        state=RunState.STARTING if any(site.held for site in last) else RunState.FAILED if failed else RunState.STOPPED,
        detached=any(site.detached for site in last),
        attempt=attempt,
        url=_said(last, "url"),
        served_name=_said(last, "served_name"),
        hosts=tuple(hosts),
    )


def _said(sites: Sequence[Site], key: str) -> str:
    return next((str(site.record[key]) for site in sites if site.record.get(key)), "")


def joined(recorded: Sequence[Run], found: Sequence[Run]) -> list[Run]:
    """Records and what hosts told: a run with a record is known by it, however little the hosts still say."""
    known = {run.run for run in recorded}
    return [*recorded, *(run for run in found if run.run not in known)]
