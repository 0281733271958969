"""`cpupp bench comm` on test hosts of one core each: our communicator against the baselines, as ratios of medians.

    python -m tests.bench.comm [--quick] [LAYOUT...]

Layouts: `pipeline` (a link across hosts), `tensor` (an all-reduce across hosts), `mixed` (pipeline 3 on 2 + 1 slots:
links in shared memory beside links across hosts), `tensor4` (an all-reduce of 2 x 2 ranks).
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.runs import Run, ssh_hosts, write_cluster
from tests.testbed.bed import HostOptions, hosts
from tests.testbed.models import random_llama, smollm2

LAYOUTS: dict[str, tuple[Sequence[int], Mapping[str, int]]] = {
    "pipeline": ([1, 1], {"pipeline": 2}),
    "tensor": ([1, 1], {"pipeline": 1, "tensor": 2}),
    "mixed": ([2, 1], {"pipeline": 3}),
    "tensor4": ([2, 2], {"pipeline": 1, "tensor": 4}),
}
"""Slots of both hosts, and the sizes."""
LIMIT_S = 900


def main() -> None:
    """Measure the layouts one after the other and print a table of each."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS))
    options = parser.parse_args()
    for layout in options.layouts or LAYOUTS:
        print(f"== {layout}", flush=True)
        for line in table(measure(layout, quick=options.quick)):
            print(line, flush=True)


def measure(layout: str, *, quick: bool) -> list[dict[str, Any]]:
    """The rows of `bench comm --json`."""
    slots, parallel = LAYOUTS[layout]
    # Ranks that share memory get a core each: on one core what is measured would be the scheduler.
    cores = [HostOptions(cores=[0, 1] if layout == "mixed" else [0]), HostOptions(cores=[1])]
    with tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as name, hosts(*cores) as bed:
        model = random_llama() if "tensor" in parallel else smollm2()
        cluster = write_cluster(Path(name) / "c.yaml", model, ssh_hosts(bed, slots), parallel=parallel)
        argv = ["bench", "comm", str(cluster), "--json", *(["--quick"] if quick else [])]
        run = Run(argv, bed.env, Path(name))
        try:
            code = run.wait(LIMIT_S)
        finally:
            run.stop()
        assert code == 0, run.stderr[-3000:]
        rows: list[dict[str, Any]] = json.loads(run.stdout)["data"]["results"]
        return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each op, ranks and size: medians in microseconds of each path, and ours in relation to it."""
    lines = []
    keys = dict.fromkeys((row["op"], tuple(row["ranks"]), row["bytes"]) for row in rows)
    for key in keys:
        medians = {r["path"]: r["median_us"] for r in rows if (r["op"], tuple(r["ranks"]), r["bytes"]) == key}
        ours = medians.pop("cpupp")
        others = "  ".join(f"{path} {us:,.0f} (x{us / ours:.2f})" for path, us in medians.items())
        op, ranks, size = key
        lines.append(f"{op} {ranks} {size:>10,} B: cpupp {ours:,.0f} us  {others}")
    return lines


if __name__ == "__main__":
    main()
