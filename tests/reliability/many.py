"""Many hosts at once: how long the start and the stop take against one host, and what the launcher needs for it."""

from __future__ import annotations

import re
import signal
import time
import uuid
from pathlib import Path

from tests.e2e.runs import Run
from tests.integration.faults import Lane, left_on, start
from tests.testbed.bed import Bed, hosts
from tests.testbed.fake_engine import make_engine, make_model
from tests.testbed.host import Host

START_LIMIT_S = 10.0  # more than one host takes
STOP_LIMIT_S = 5.0
READY_S = 300.0


def run_many(folder: Path, count: int) -> tuple[list[str], int]:
    """Launch on one host and on `count`; return what to write and how many limits were broken."""
    python, model = make_engine(folder / "engine"), make_model(folder / "model", layers=max(8, count))
    with hosts(count) as bed:
        for host in bed:
            _own_kernel(host)
        one = _once(folder / "one", Lane(bed[:1], python, model))
        many = _once(folder / "many", Lane(bed[:], python, model))
        sshd = _max_startups(bed)
    lines = [
        "| hosts | started after | ready after | stopped after | launcher's RSS | its threads |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {n} | {row['started']:.1f} s | {row['ready']:.1f} s | {row['stopped']:.1f} s | {row['rss']:.0f} MiB | "
            f"{row['threads']:.0f} |"
            for n, row in ((1, one), (count, many))
        ),
        "",
        f"Started: every host's vLLM node runs. sshd's MaxStartups: {sshd}. All hosts share the cores of one machine.",
    ]
    broken = int(many["started"] - one["started"] > START_LIMIT_S) + int(many["stopped"] > STOP_LIMIT_S)
    return lines, broken


def _own_kernel(host: Host) -> None:
    """Give the host a boot id of its own: the plan refuses 32 hosts that share the memory of one machine."""
    file = host.folder / "boot_id"
    file.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
    host.run(["mount", "--bind", str(file), "/proc/sys/kernel/random/boot_id"])


def _once(folder: Path, lane: Lane) -> dict[str, float]:
    began = time.monotonic()
    run = start(folder, lane, [{}] * len(lane.hosts), "--timeout", str(READY_S))
    try:
        _wait_spawned(run, len(lane.hosts), began + READY_S)
        started = time.monotonic() - began
        run.wait_for("ready", READY_S)
        found = {"started": started, "ready": time.monotonic() - began, **_needs(run.process.pid)}
        stopping = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        assert left_on(lane.hosts, 30) == []
        return {**found, "stopped": time.monotonic() - stopping}
    finally:
        run.stop(signal.SIGKILL)


def _wait_spawned(run: Run, count: int, deadline: float) -> None:
    while sum(event["event"] == "Spawned" for event in run.events()) < count:
        assert run.process.poll() is None, run.stderr[-3000:]
        assert time.monotonic() < deadline, run.stderr[-3000:]
        time.sleep(0.05)


def _needs(pid: int) -> dict[str, float]:
    """Resident memory in MiB and threads of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    fields = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", text, re.MULTILINE))
    return {"rss": int(fields["VmRSS"]) / 1024, "threads": float(fields["Threads"])}


def _max_startups(bed: Bed) -> str:
    listed = bed[0].run(["/usr/sbin/sshd", "-T", "-f", str(bed[0].folder / "sshd_config")]).stdout
    return next(line.partition(" ")[2] for line in listed.splitlines() if line.startswith("maxstartups"))
