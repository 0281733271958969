"""Tokens per second of every split of SmolLM2's layers over two hosts, beside the split that the plan chooses.

    python -m tests.bench.partition [--half] [--splits 10,12,14,16,18,20,22] [--compiled] [--dtype float32]

Two test hosts of one core each; with `--half` a cgroup holds the second one to half of its core. Concurrency 8, the
plain client of `bench serve`. A split is the number of layers of the first stage. All splits are served at once (some
2.5 GiB each) and asked in turns, so that a machine which is slow for a while is slow for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cpupp.rank.agent_client import Client
from tests.e2e.runs import PORT, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, HostOptions, hosts
from tests.testbed.host import Host, wait_for
from tests.testbed.models import smollm2

NUM_LAYERS = 30
QUOTA = Path("/sys/fs/cgroup/cpu/cpupp-bench-half")
PERIOD_US = 100_000
TURNS = 5
NUM_BLOCKS = 32
"""Of the KV cache: enough for all requests of a turn, and little enough for many servers side by side."""
ORDER = {
    "model": "m",
    "concurrency": 8,
    "requests": 16,
    "prompt_tokens": 64,
    "output_tokens": 32,
    "vocabulary": 49_152,
    "stream": False,
    "timeout_s": 300.0,
}


def main() -> None:
    """Sweep, then say how far the chosen split is from the best and from the even one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--splits", default="10,12,14,15,16,18,20,22")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    cores = [HostOptions(cores=[i]) for i in range(2)]
    with (
        tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as name,
        hosts(*cores) as bed,
        held_to_half(bed[1] if options.half else None),
    ):
        folder = Path(name)
        args = {"enforce_eager": not options.compiled, "dtype": options.dtype, "max_num_batched_tokens": 512}
        chosen = _chosen(folder, bed, args)
        print(f"the plan chooses {chosen}, {NUM_LAYERS - chosen}", flush=True)
        rates = _rates(folder, bed, sorted({chosen, *map(int, options.splits.split(","))}), args)
    best = max(rates, key=lambda first: rates[first])
    of_best = rates[chosen] / rates[best]
    print(f"best {best}, {NUM_LAYERS - best}; chosen x{of_best:.3f} of it, even x{rates[15] / rates[best]:.3f}")


@contextmanager
def held_to_half(host: Host | None) -> Iterator[None]:
    """All that is started on a host from now on shares half a core."""
    if host is None:
        yield
        return
    QUOTA.mkdir(exist_ok=True)
    (QUOTA / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
    (QUOTA / "cpu.cfs_quota_us").write_text(str(PERIOD_US // 2), encoding="ascii")
    join = QUOTA / "cgroup.procs"
    join.write_text(str(os.getpid()), encoding="ascii")  # what is started now is born in it
    try:
        host.restart_sshd()
    finally:
        (QUOTA.parent / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    try:
        yield
    finally:
        host.kill_processes()
        host.stop_sshd()
        for left in join.read_text(encoding="ascii").split():
            (QUOTA.parent / "cgroup.procs").write_text(left, encoding="ascii")
        QUOTA.rmdir()


def hold_too(host: Host, started: Iterable[int]) -> None:
    """Hold processes to the same half that were not started through the host's sshd, and what they have started."""
    join = QUOTA / "cgroup.procs"
    pids = set(started)
    for pid in pids:
        join.write_text(str(pid), encoding="ascii")
    wait_for(lambda: pids <= {process.pid for process in host.processes()}, "the processes to enter the host")
    for process in host.processes():
        join.write_text(str(process.pid), encoding="ascii")


def _chosen(folder: Path, bed: Bed, args: dict[str, Any]) -> int:
    """Layers of the first stage in the plan."""
    cluster = write_cluster(folder / "plan.yaml", smollm2(), ssh_hosts(bed), engine={"args": args})
    command = [sys.executable, "-m", "cpupp", "plan", str(cluster), "--json"]
    answer = subprocess.run(command, env=bed.env, stdout=subprocess.PIPE, check=True)
    ranks = json.loads(answer.stdout)["data"]["ranks"]
    return int(ranks[0]["layers"][1])


def _rates(folder: Path, bed: Bed, splits: list[int], args: dict[str, Any]) -> dict[int, float]:
    """Median tokens per second by split."""
    measured: dict[int, list[float]] = {first: [] for first in splits}
    with ExitStack() as stack:
        for place, first in enumerate(splits):
            home = folder / str(first)
            home.mkdir()
            cluster = write_cluster(
                home / "c.yaml",
                smollm2(),
                ssh_hosts(bed),
                parallel={"pipeline": 2, "layers": [first, NUM_LAYERS - first]},
                engine={"args": {**args, "num_gpu_blocks_override": NUM_BLOCKS}},
                serve={"port": PORT + place},
            )
            run = stack.enter_context(launched(home / "run", bed, cluster))
            run.wait_for("ready")
        for turn in range(TURNS):
            for place, first in enumerate(splits):
                order = {**ORDER, "url": f"http://{bed[0].address}:{PORT + place}", "seed": turn}
                result = Client(order, "").run()
                measured[first].append(sum(row[4] for row in result["rows"]) / result["seconds"])
            print(turn, *(f"{first}: {measured[first][-1]:.1f}" for first in splits), sep="  ", flush=True)
    rates = {first: statistics.median(measured[first]) for first in splits}
    for first, rate in rates.items():
        print(f"{first}, {NUM_LAYERS - first}: {rate:.1f} tok/s", flush=True)
    return rates


if __name__ == "__main__":
    main()
