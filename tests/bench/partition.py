"""Tokens per second of every split of SmolLM2's layers over two hosts, beside the split that the plan chooses.

    python -m tests.bench.partition [--half] [--splits 10,12,14,16,18,20,22] [--compiled] [--dtype float32]

Two test hosts of one core each; with `--half` a cgroup holds the second one to half of its core. Concurrency 8, the
plain client of `bench serve`. A split is the number of layers of the first stage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpupp.rank.agent_client import Client
from tests.e2e.runs import PORT, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, HostOptions, hosts
from tests.testbed.host import Host
from tests.testbed.models import smollm2

NUM_LAYERS = 30
QUOTA = Path("/sys/fs/cgroup/cpu/cpupp-bench-half")
PERIOD_US = 100_000
TURNS = 3
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
        rates = {}
        for first in sorted({chosen, *map(int, options.splits.split(","))}):
            rates[first] = _rate(folder / str(first), bed, first, args)
            print(f"{first}, {NUM_LAYERS - first}: {rates[first]:.1f} tok/s", flush=True)
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


def _chosen(folder: Path, bed: Bed, args: dict[str, Any]) -> int:
    """Layers of the first stage in the plan."""
    cluster = write_cluster(folder / "plan.yaml", smollm2(), ssh_hosts(bed), engine={"args": args})
    command = [sys.executable, "-m", "cpupp", "plan", str(cluster), "--json"]
    answer = subprocess.run(command, env=bed.env, stdout=subprocess.PIPE, check=True)
    ranks = json.loads(answer.stdout)["data"]["ranks"]
    return int(ranks[0]["layers"][1])


def _rate(folder: Path, bed: Bed, first: int, args: dict[str, Any]) -> float:
    """Median tokens per second of one split."""
    folder.mkdir()
    cluster = write_cluster(
        folder / "c.yaml",
        smollm2(),
        ssh_hosts(bed),
        parallel={"pipeline": 2, "layers": [first, NUM_LAYERS - first]},
        engine={"args": args},
    )
    rates: list[float] = []
    with launched(folder / "run", bed, cluster) as run:
        run.wait_for("ready")
        for turn in range(TURNS):
            order = {**ORDER, "url": f"http://{bed[0].address}:{PORT}", "seed": turn}
            result = Client(order, "").run()
            rates.append(sum(row[4] for row in result["rows"]) / result["seconds"])
        run.stop()
    return statistics.median(rates)


if __name__ == "__main__":
    main()
