"""What a detached run leaves on its hosts after its end, brought into its record: logs, and how it ended."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.logs import NodeLog
from cpupp.launch.private import private_folder
from cpupp.launch.records import RunRecord, making
from cpupp.launch.run_hosts import RunHosts
from cpupp.launch.run_logs import CHUNK, FileLog, attempt_folder
from cpupp.launch.runs import json_of, result_of
from cpupp.plan.failures import Failure
from cpupp.plan.hoststate import Site
from cpupp.plan.runs import Run
from cpupp.plan.runstate import RunState

LOCK = "stop.lock"


def folder_of(run: Run, root: Path) -> Path:
    """The run's folder; of a run whose record is lost, the one that it would have here."""
    return Path(run.folder) if run.folder else root / f"{run.name}-{run.run}"


def collect_logs(run: Run, folder: Path, site: Site, hosts: RunHosts) -> list[str]:
    """Append to the record's logs what a host kept beyond them; return the logs' paths.

    The record ends where the host goes on, byte for byte, so a second call goes on where a first one broke off.
    Raises CpuppError.
    """
    logs = attempt_folder(folder, site.attempt)
    with making(logs):
        private_folder(logs)
    return [_collect_log(logs, node, site, hosts, run.log_shifts.get(node, 0)) for node in sorted(site.nodes)]


def _collect_log(logs: Path, node: int, site: Site, hosts: RunHosts, shift: int) -> str:
    offset = _size(FileLog(logs, node, site.host)) + shift
    with making(logs):
        log = NodeLog(logs / f"node-{node}-{site.host}.log")
    try:
        while True:
            reply: Mapping[str, Any] = hosts.ask(
                site.host, "run_log", timeout=60, run=site.run, node=node, offset=offset, size=CHUNK, host=site.host
            )
            offset = int(reply["offset"])
            log.feed(str(reply["data"]))
            if log.error:
                raise CpuppError("STATE-FOLDER", f"{log.path}: {log.error}", hint="free some room, then stop it again")
            if not reply["data"]:
                return str(log.path)
    finally:
        log.close()


def _size(log: FileLog) -> int:
    try:
        while log.read():
            pass
    finally:
        log.close()
    return log.offset


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep a second `cpupp stop` of the same run from appending to the same logs. Raises CpuppError STATE-FOLDER.

    The file stays: whoever waits for it when it is removed gets a lock that the next one, with a new file, never sees.
    """
    with making(folder):
        private_folder(folder)
        descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def settle(run: Run, folder: Path, state: RunState, failures: Sequence[Failure], *, whole: bool) -> None:
    """Write into the record how the run ended. whole: everything that the hosts kept is in it now.

    Raises CpuppError STATE-FOLDER.
    """
    record = RunRecord(folder)
    try:
        known = json_of(folder / "run.json")
        base = known if isinstance(known, dict) else _new_record(run)
        failure = {"failure": asdict(failures[0])} if failures else {}
        record.write("run.json", {**base, **failure, "status": state, "attempt": run.attempt}, must=True)
        if state.ended:
            result = result_of(run)
            first = result.get("first_failure") or (asdict(failures[0]) if failures else None)
            ending: dict[str, Any] = {
                "outcome": str(state),
                "exit_code": int(ExitCode.OK if state is RunState.STOPPED else ExitCode.RANK_FAILED),
                "first_failure": first if state is RunState.FAILED else None,
                "leftovers": [],
                "collected": whole or bool(result.get("collected")),
            }
            record.write("result.json", {**result, **ending}, must=True)
        record.event("stop", state=state, whole=whole)
    finally:
        record.close()


def _new_record(run: Run) -> dict[str, Any]:
    """The values of `run.json` for a run that had none here."""
    return {
        "run": run.run,
        "name": run.name,
        "file": run.file,
        "started": run.started,
        "launcher": None,
        "detached": run.detached,
        "hosts": [asdict(host) for host in run.hosts],
        "attempt": run.attempt,
        "url": run.url,
        "served_name": run.served_name,
    }
