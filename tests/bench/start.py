"""From the command to the first completion: `cpupp launch` against the same two `vllm serve` started by hand, in turns.

    python -m tests.bench.start --rounds 5 [--eager | --cold]

Two test hosts of one core each, SmolLM2-135M, pipeline 2. "By hand" starts both commands at the same moment, with the
environment that cpupp would give them (addresses, interface, cores, preloads) but without cpupp's communicator, and
asks the API every 0.2 s. In eager mode stock vLLM 0.27.1 to 0.32 dies at the first request: there by hand ends at
/health. `--cold` empties the caches of both hosts before each start; else a first round fills them and does not count.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.bench.by_hand import Command, commands_of, started, wait_for_answer
from tests.e2e.runs import assert_quiet, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, hosts
from tests.testbed.models import smollm2


def main() -> None:
    """Run the rounds and print every figure and the ratio of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--eager", action="store_true")
    mode.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so its children
    ours: list[float] = []
    by_hand: list[float] = []
    with tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as name, hosts(2) as bed:
        for number in range(options.cold, options.rounds + 1):
            folder = Path(name) / str(number)
            if options.cold:
                empty_caches(bed)
            seconds, commands = time_launch(folder, bed, eager=options.eager)
            if options.cold:
                empty_caches(bed)
            seconds_by_hand = time_by_hand(folder, bed, commands, eager=options.eager)
            label = "warm-up" if number == 0 else f"round {number}"
            print(f"{label}: cpupp {seconds:.1f} s, by hand {seconds_by_hand:.1f} s", flush=True)
            if number > 0:
                ours.append(seconds)
                by_hand.append(seconds_by_hand)
    ratio = statistics.median(ours) / statistics.median(by_hand)
    print(
        f"median: cpupp {statistics.median(ours):.1f} s, by hand {statistics.median(by_hand):.1f} s, ratio {ratio:.2f}"
    )


def empty_caches(bed: Bed) -> None:
    """Remove what vLLM, torch and cpupp keep from one start to the next, but not the pages that the kernel has read."""
    for host in bed:
        for kept in (".cache", ".triton", "tmp"):
            shutil.rmtree(host.path(host.home / kept), ignore_errors=True)


def time_launch(folder: Path, bed: Bed, *, eager: bool) -> tuple[float, list[Command]]:
    """Seconds from the start of the process to its ready event, and the commands that it ran."""
    folder.mkdir(parents=True)
    # A compiled start ends with one step of this size, which is equal on both sides and slow on one core.
    args = {"enforce_eager": eager, "max_num_batched_tokens": 512}
    cluster = write_cluster(folder / "c.yaml", smollm2(), ssh_hosts(bed), engine={"args": args})
    began = time.time()
    with launched(folder / "run", bed, cluster) as run:
        seconds = run.wait_for("ready")["time"] - began
        run.stop()
    assert_quiet(bed)
    return seconds, commands_of(run)


def time_by_hand(folder: Path, bed: Bed, commands: list[Command], *, eager: bool) -> float:
    """Seconds from starting both commands to the first completion (eager: to /health)."""
    began = time.monotonic()
    with started(folder, bed, commands) as processes:
        wait_for_answer(folder, bed, processes, health=eager)
        return time.monotonic() - began


if __name__ == "__main__":
    main()
