"""From the command to the first completion: `cpupp launch` against the same two `vllm serve` started by hand, in turns.

    python -m tests.bench.start --rounds 3 [--eager]

Two test hosts of one core each, SmolLM2-135M, pipeline 2. "By hand" starts both commands at the same moment, with the
environment that cpupp would give them (addresses, interface, cores, preloads) but without cpupp's communicator, and
asks the API every 0.2 s. In eager mode stock vLLM 0.27.1 to 0.32 dies at the first request: there by hand ends at
/health.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.runs import PORT, assert_quiet, launched, ssh_hosts, write_cluster, write_site
from tests.testbed.bed import Bed, hosts
from tests.testbed.host import Host
from tests.testbed.models import smollm2


def main() -> None:
    """Run the rounds and print every figure and the ratio of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so its children
    ours: list[float] = []
    by_hand: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as name, hosts(2) as bed:
        for number in range(options.rounds + 1):
            folder = Path(name) / str(number)
            seconds = time_launch(folder, bed, eager=options.eager)
            seconds_by_hand = time_by_hand(folder, bed, seconds.commands, eager=options.eager)
            label = "warm-up" if number == 0 else f"round {number}"
            print(f"{label}: cpupp {seconds.seconds:.1f} s, by hand {seconds_by_hand:.1f} s", flush=True)
            if number > 0:
                ours.append(seconds.seconds)
                by_hand.append(seconds_by_hand)
    ratio = statistics.median(ours) / statistics.median(by_hand)
    print(
        f"median: cpupp {statistics.median(ours):.1f} s, by hand {statistics.median(by_hand):.1f} s, ratio {ratio:.2f}"
    )


class Launched:
    """How long a launch took, and the commands that it ran."""

    def __init__(self, seconds: float, commands: list[dict[str, Any]]) -> None:
        self.seconds = seconds
        self.commands = commands


def time_launch(folder: Path, bed: Bed, *, eager: bool) -> Launched:
    """Seconds from the start of the process to its ready event."""
    folder.mkdir(parents=True)
    # A compiled start ends with one step of this size, which is equal on both sides and slow on one core.
    args = {"enforce_eager": eager, "max_num_batched_tokens": 512}
    cluster = write_cluster(folder / "c.yaml", smollm2(), ssh_hosts(bed), engine={"args": args})
    began = time.time()
    with launched(folder / "run", bed, cluster) as run:
        seconds = run.wait_for("ready")["time"] - began
        plan = next(run.state.glob("cpupp/runs/*/plan.json"))
        commands = json.loads(plan.read_text(encoding="utf-8"))["commands"]
        run.stop()
    assert_quiet(bed)
    return Launched(seconds, commands)


def time_by_hand(folder: Path, bed: Bed, commands: list[dict[str, Any]], *, eager: bool) -> float:
    """Seconds from starting both commands to the first completion (eager: to /health)."""
    site = folder / "site"
    write_site(site)
    began = time.monotonic()
    started = [_start(bed[i], command, site, folder) for i, command in enumerate(commands)]
    try:
        while not _answers(bed[0].address, eager=eager):
            ended = [i for i, process in enumerate(started) if process.poll() is not None]
            assert not ended, (folder / f"by-hand-{bed[ended[0]].name}.log").read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        return time.monotonic() - began
    finally:
        for process in started:
            process.terminate()
        for host in bed:
            host.wait_quiet(5)
            host.kill_processes()
        for process in started:
            process.wait()
        for host in bed:
            for entry in [*host.path("/dev/shm").iterdir(), *host.path("/tmp").iterdir()]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _start(host: Host, command: dict[str, Any], site: Path, folder: Path) -> subprocess.Popen[bytes]:
    env = {**command["env"], "PYTHONPATH": str(site)}
    with (folder / f"by-hand-{host.name}.log").open("wb") as log:
        pairs = [f"{key}={value}" for key, value in env.items()]
        return host.popen(["env", *pairs, *command["argv"]], stdout=log, stderr=log)


def _answers(address: str, *, eager: bool) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    base = f"http://{address}:{PORT}"
    body = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 2}).encode()
    completion = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with opener.open(f"{base}/health" if eager else completion, timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
