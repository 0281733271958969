"""Tokens per second: served through cpupp against the same commands started by hand, in turns, servers restarted.

    python -m tests.bench.serve [--rounds 2] LAYOUT

Layouts: `pipeline` (SmolLM2-135M compiled, pipeline 2) and `tensor` (a random Llama of hidden 512 and 8 layers, eager,
tensor 2), both over two test hosts of one core each. The client has as many threads as requests at a time; each request
has about 64 tokens in and 64 out.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench.by_hand import Command, commands_of, started, wait_for_answer
from tests.e2e.runs import PORT, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, HostOptions, hosts
from tests.testbed.models import random_llama, smollm2

CONCURRENCY = (1, 8)
NUM_TOKENS = 64
REQUESTS_EACH = {1: 4, 8: 2}
TURNS = 3
Rates = dict[int, list[float]]


def main() -> None:
    """Run the rounds and print every figure and the ratios of medians."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("layout", choices=["pipeline", "tensor"])
    options = parser.parse_args()
    ours: Rates = {num: [] for num in CONCURRENCY}
    by_hand: Rates = {num: [] for num in CONCURRENCY}
    cores = [HostOptions(cores=[i]) for i in range(2)]
    with tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as name, hosts(*cores) as bed:
        for number in range(options.rounds):
            folder = Path(name) / str(number)
            commands = measure_launch(folder, bed, options.layout, ours)
            measure_by_hand(folder, bed, commands, by_hand)
            print(f"round {number + 1}: cpupp {_shown(ours)}; by hand {_shown(by_hand)}", flush=True)
    for num in CONCURRENCY:
        medians = statistics.median(ours[num]), statistics.median(by_hand[num])
        print(
            f"concurrency {num}: cpupp {medians[0]:.1f} tok/s, by hand {medians[1]:.1f}, x{medians[0] / medians[1]:.2f}"
        )


def measure_launch(folder: Path, bed: Bed, layout: str, rates: Rates) -> list[Command]:
    """Serve through cpupp and measure; return the commands that it ran."""
    folder.mkdir(parents=True)
    tensor = layout == "tensor"
    args = {"enforce_eager": tensor, "max_num_batched_tokens": 512}
    cluster = write_cluster(
        folder / "c.yaml",
        random_llama() if tensor else smollm2(),
        ssh_hosts(bed),
        engine={"args": args},
        parallel={"pipeline": 1, "tensor": 2} if tensor else {"pipeline": 2},
    )
    with launched(folder / "run", bed, cluster) as run:
        run.wait_for("ready")
        load(bed[0].address, rates)
        run.stop()
    return commands_of(run)


def measure_by_hand(folder: Path, bed: Bed, commands: list[Command], rates: Rates) -> None:
    """Serve the same commands by hand and measure."""
    with started(folder, bed, commands) as processes:
        wait_for_answer(folder, bed, processes, health=False)
        load(bed[0].address, rates)


def load(address: str, rates: Rates) -> None:
    """Add the tokens per second of some turns, one of each concurrency after the other."""
    request(address, 0)
    for turn in range(TURNS):
        for num in CONCURRENCY:
            began = time.monotonic()
            with ThreadPoolExecutor(num) as pool:
                jobs = range(num * REQUESTS_EACH[num])
                tokens = sum(pool.map(lambda i: request(address, i), [turn * 100 + i for i in jobs]))
            rates[num].append(tokens / (time.monotonic() - began))


def request(address: str, number: int) -> int:
    """One completion; return how many tokens came back."""
    body = {
        "model": "m",
        "prompt": [1000 + number * 7 + i for i in range(NUM_TOKENS)],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    asked = urllib.request.Request(
        f"http://{address}:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=300) as reply:
        return int(json.load(reply)["usage"]["completion_tokens"])


def _shown(rates: Rates) -> str:
    return ", ".join(f"c{num} {' '.join(f'{r:.1f}' for r in found)}" for num, found in rates.items())


if __name__ == "__main__":
    main()
