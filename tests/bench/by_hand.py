"""vLLM started by hand on test hosts: the commands of a plan, at the same moment, without cpupp's communicator."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpupp.plan.command import CLI, SCHEDULER, SHORT_LOOKUPS, STOCK_CLI
from cpupp.plan.versions import METHOD_ENV
from tests.e2e.runs import PORT, Run, write_site
from tests.testbed.bed import Bed
from tests.testbed.host import Host

CURES = (METHOD_ENV, *SHORT_LOOKUPS)  # environment that nobody sets by hand
Command = Mapping[str, Any]


def commands_of(run: Run) -> list[Command]:
    """The commands that a launch ran, without the scheduler that only its site folder has."""
    plan = next(run.state.glob("cpupp/runs/*/plan.json"))
    commands: list[Command] = json.loads(plan.read_text(encoding="utf-8"))["commands"]
    ours = ("--scheduler-cls", SCHEDULER)
    return [{**command, "argv": [word for word in command["argv"] if word not in ours]} for command in commands]


@contextmanager
def started(folder: Path, bed: Bed, commands: Sequence[Command]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The commands, running; killed at the end, and what they left on the hosts removed."""
    site = folder / "site"
    write_site(site)
    hosts = {host.name: host for host in bed}
    processes = [_start(hosts[c["host"]], i, c, site, folder) for i, c in enumerate(commands)]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for host in bed:
            host.wait_quiet(5)
            host.kill_processes()
        for process in processes:
            process.wait()
        for host in bed:
            for entry in [*host.path("/dev/shm").iterdir(), *host.path("/tmp").iterdir()]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def wait_for_answer(
    folder: Path, bed: Bed, processes: Sequence[subprocess.Popen[bytes]], *, health: bool, port: int = PORT
) -> None:
    """Return at the first completion, or (health) as soon as /health answers. Fails when a process has ended."""
    while not _answers(bed[0].address, port, health=health):
        ended = [i for i, process in enumerate(processes) if process.poll() is not None]
        assert not ended, (folder / f"by-hand-{ended[0]}.log").read_text(errors="replace")[-3000:]
        time.sleep(0.2)


def _start(host: Host, number: int, command: Command, site: Path, folder: Path) -> subprocess.Popen[bytes]:
    # Inductor keeps precompiled headers below TMPDIR, by hand from one start to the next.
    tmp = host.path(host.home / "tmp")
    tmp.mkdir(exist_ok=True)
    env = {**command["env"], "PYTHONPATH": str(site), "TMPDIR": str(host.home / "tmp")}
    for name in CURES:
        env.pop(name, None)
    with (folder / f"by-hand-{number}.log").open("wb") as log:
        pairs = [f"{key}={value}" for key, value in env.items()]
        argv = [STOCK_CLI if word == CLI else word for word in command["argv"]]
        return host.popen(["env", *pairs, *argv], stdout=log, stderr=log)


def _answers(address: str, port: int, *, health: bool) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    base = f"http://{address}:{port}"
    body = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 2}).encode()
    completion = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with opener.open(f"{base}/health" if health else completion, timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
