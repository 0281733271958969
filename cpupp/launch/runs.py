"""The runs that this machine has records of, read as other processes left them: never written to while they live."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpupp.errors import CpuppError
from cpupp.plan.failures import Failure
from cpupp.plan.runs import LauncherRef, Run, read_run
from cpupp.plan.runstate import RunState
from cpupp.plan.status import RankPlace, Recorded

LONGEST_LINE = 1 << 20
FOLDER = re.compile(r"(.+)-(\d{4}-\d{6}-[0-9a-f]{4})")  # name and id of the run whose record is in it


def all_runs(root: Path) -> list[Run]:
    """Every run with a readable record below `root`, the newest first. A run whose launcher is gone is `crashed`.

    Raises CpuppError STATE-FOLDER where it cannot be read.
    """
    try:
        folders = sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        message = f"the records of runs cannot be read: {error.strerror} ({error.filename})"
        hint = "set XDG_STATE_HOME to the folder below which they are, or give the cluster file: its hosts are asked"
        raise CpuppError("STATE-FOLDER", message, hint=hint, where=str(root)) from None
    found = [run for folder in folders if (run := run_in(folder)) is not None]
    return sorted(found, key=lambda run: run.started, reverse=True)


def run_in(folder: Path) -> Run | None:
    """The run whose record is in `folder`; None when there is none that can be read."""
    run = read_run(json_of(folder / "run.json"), str(folder)) or _without_record(folder)
    if run is None or run.state.ended or run.launcher is None:
        return run
    alive = launcher_alive(run.launcher)
    crashed = alive is False and not run.detached
    return replace(run, launcher_alive=alive, state=RunState.CRASHED if crashed else run.state)


def _without_record(folder: Path) -> Run | None:
    """A run whose `run.json` is lost or damaged: it may live, so its hosts, which its cluster file names, are asked."""
    named = FOLDER.fullmatch(folder.name)
    if named is None or not (folder / "run.json").exists() or not (folder / "spec.yaml").is_file():
        return None  # without any run.json it may just begin
    result = json_of(folder / "result.json")
    outcome = str(result.get("outcome")) if isinstance(result, dict) else ""
    state = RunState.STOPPED if outcome == "stopped" else RunState.FAILED if outcome else RunState.READY
    started = (folder / "spec.yaml").stat().st_mtime
    file = str(folder / "spec.yaml")
    return Run(run=named[2], name=named[1], file=file, folder=str(folder), started=started, state=state, detached=True)


def launcher_alive(launcher: LauncherRef) -> bool | None:
    """Whether that very process lives; None when it is or was on another machine (a home shared over NFS).

    Two machines never share a boot id; two containers may, with pids of their own.
    """
    hostname = _text(Path("/proc/sys/kernel/hostname")).strip()
    if launcher.boot_id == boot_id() and start_ticks(launcher.pid) == launcher.start:
        return True
    return False if launcher.hostname == hostname else None


def boot_id() -> str:
    """The kernel's boot id; empty when it cannot be read."""
    return _text(Path("/proc/sys/kernel/random/boot_id")).strip()


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None when it does not run (a zombie does not)."""
    # The second field, the command's name in brackets, may hold anything; the 22nd is the start.
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return None if len(fields) < 20 or fields[0] in ("Z", "X") else int(fields[19])


def recorded(run: Run) -> Recorded:
    """What the run's folder tells beside `run.json`."""
    if not run.folder:
        return Recorded()
    folder = Path(run.folder)
    return Recorded(places=places(folder), phases=phases(folder), first_failure=first_failure(folder))


def places(folder: Path) -> tuple[RankPlace, ...]:
    """The ranks of the run's plan; empty when the plan cannot be read."""
    try:
        return tuple(
            RankPlace(
                rank=int(rank["rank"]),
                host=str(rank["host"]),
                node_rank=int(rank["node_rank"]),
                stage=int(rank["stage"]),
                tp_index=int(rank["tp_index"]),
            )
            for rank in json_of(folder / "plan.json")["plan"]["ranks"]
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return ()


def phases(folder: Path) -> dict[int, str]:
    """What each vLLM node did last, by the run's events."""
    found: dict[int, str] = {}
    for event in events(folder):
        if event.get("event") == "phase" and isinstance(event.get("node_rank"), int):
            found[event["node_rank"]] = str(event.get("phase") or "")
    return found


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """The run's events, one after the other. A line that a crash cut short is passed over."""
    try:
        with (folder / "events.ndjson").open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(LONGEST_LINE):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield event
    except OSError:
        return


def first_failure(folder: Path) -> Failure | None:
    """The first failure of the run's result, or that which `run.json` tells while the run goes down."""
    for name, key in (("result.json", "first_failure"), ("run.json", "failure"), ("run.json", "first_failure")):
        data = json_of(folder / name)
        value = data.get(key) if isinstance(data, Mapping) else None
        if isinstance(value, Mapping) and value.get("message"):
            return _failure(value)
    return None


def _failure(value: Mapping[str, Any]) -> Failure:
    node = value.get("node_rank")
    return Failure(
        host=str(value.get("host") or ""),
        node_rank=node if isinstance(node, int) else None,
        ranks=tuple(rank for rank in _list(value.get("ranks")) if isinstance(rank, int)),
        code=str(value.get("code") or "RANK-FAILED"),
        message=str(value["message"]),
        hint=str(value.get("hint") or ""),
        last_lines=tuple(str(line) for line in _list(value.get("last_lines"))),
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def result_of(run: Run) -> dict[str, Any]:
    """The run's result; empty when it has none yet."""
    data = json_of(Path(run.folder) / "result.json") if run.folder else None
    return data if isinstance(data, dict) else {}


def json_of(path: Path) -> Any:
    """The values of a JSON file; None when it is not there, or is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
