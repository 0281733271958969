"""Tokens a second of cpupp and of the same commands by hand, both served at once and asked in turns.

    python -m tests.bench.turns [--dtype float32] [--packed] [--half] [--concurrency 1,8,32] [--prompt-tokens 64]
                                [--output-tokens 48] [--requests 2] [--turns 5] [--idle 60]
                                [--batched-tokens 512] [--no-stream]

SmolLM2-135M, pipeline 2, compiled, on two test hosts of one core each; `--half` holds the second one to half of it.
Where `bench serve --against by-hand` starts one after the other, so that any model fits, a machine that is slow for
some minutes is slow for both here. Every turn starts with the other server. `--requests` is a multiple of the
concurrency; with one output token the tokens of the prompts are counted. `--idle` first counts the CPU time of all
processes of either side for so many seconds without a request.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cpupp.rank.agent_client import Client
from tests.bench import by_hand
from tests.bench.partition import held_to_half, hold_too
from tests.bench.serve import CONTEXT, PIECE
from tests.e2e.runs import PORT, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, HostOptions, hosts
from tests.testbed.host import Host
from tests.testbed.models import smollm2

PORTS = {"cpupp": PORT, "by hand": PORT + 1}
NUM_BLOCKS = 96
"""Of the KV cache, 128 tokens each: enough for every order, and little enough for two servers."""
SPIN_S = 1.5
"""By hand's workers spin for a second after their last message, on the core where cpupp is asked next."""
Row = tuple[float, float, float]


def main() -> None:
    """Start both, ask them in turns, and print medians and the ratio of every concurrency."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batched-tokens", type=int, default=PIECE)
    parser.add_argument("--no-stream", dest="stream", action="store_false")
    parser.add_argument("--idle", type=float, default=0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as name,
        hosts(*(HostOptions(cores=[i]) for i in range(2))) as bed,
        held_to_half(bed[1] if options.half else None),
        ExitStack() as stack,
    ):
        by_hand_pids = _start_both(stack, Path(name), bed, options)
        if options.idle:
            _idle(bed, by_hand_pids, options.idle)
        for concurrency in map(int, options.concurrency.split(",")):
            _compare(bed[0].address, concurrency, options)


def _start_both(stack: ExitStack, folder: Path, bed: Bed, options: argparse.Namespace) -> set[int]:
    """By hand: the commands of a launch with cpupp's settings, but with the layers that vLLM would choose. Its pids."""
    args = {
        "dtype": options.dtype,
        "enforce_eager": False,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": options.batched_tokens,
        "num_gpu_blocks_override": NUM_BLOCKS,
    }

    def cluster(name: str, **parallel: Any) -> Path:
        (folder / name).mkdir()
        return write_cluster(
            folder / name / "c.yaml",
            smollm2(),
            ssh_hosts(bed),
            parallel={"pipeline": 2, **parallel},
            engine={"args": args, "packed_weights": "auto" if options.packed else "off"},
            serve={"port": PORTS[name]},
        )

    with launched(folder / "by hand" / "run", bed, cluster("by hand", layers=[15, 15])) as run:
        run.wait_for("ready")
        commands = by_hand.commands_of(run)
        run.stop()
    processes = stack.enter_context(by_hand.started(folder / "by hand", bed, commands))
    if options.half:
        of_b = [process.pid for process, c in zip(processes, commands, strict=True) if c["host"] == bed[1].name]
        hold_too(bed[1], of_b)
    by_hand.wait_for_answer(folder / "by hand", bed, processes, health=False, port=PORTS["by hand"])
    by_hand_pids = {process.pid for host in bed for process in host.processes()}
    run = stack.enter_context(launched(folder / "cpupp" / "run", bed, cluster("cpupp")))
    run.wait_for("ready")
    return by_hand_pids


def _idle(bed: Bed, by_hand_pids: set[int], seconds: float) -> None:
    """Print what share of a core each side uses on each host."""

    def used(host: Host) -> dict[str, float]:
        found = dict.fromkeys(PORTS, 0.0)
        for process in host.processes():
            found["by hand" if process.pid in by_hand_pids else "cpupp"] += process.cpu_seconds
        return found

    time.sleep(seconds / 6)  # readers of vLLM's broadcast queue still spin for a second after the last message
    before = [used(host) for host in bed]
    time.sleep(seconds)
    for host, then in zip(bed, before, strict=True):
        now = used(host)
        shares = ", ".join(f"{name} {(now[name] - then[name]) / seconds:.2%}" for name in PORTS)
        print(f"idle, {host.name}: {shares} of a core", flush=True)


def _compare(address: str, concurrency: int, options: argparse.Namespace) -> None:
    found: dict[str, list[Row]] = {name: [] for name in PORTS}
    for turn in range(-1, options.turns):  # the first one is for warming up
        for name in sorted(PORTS, reverse=turn % 2 == 0):
            time.sleep(SPIN_S)
            row = _asked(address, PORTS[name], concurrency, turn, options)
            if turn >= 0:
                found[name].append(row)
            print(f"{concurrency} {turn} {name}: {_text(row)}", flush=True)
    medians = {name: tuple(map(statistics.median, zip(*rows, strict=True))) for name, rows in found.items()}
    ratio = medians["cpupp"][0] / medians["by hand"][0]
    paired = statistics.median(m[0] / h[0] for m, h in zip(found["cpupp"], found["by hand"], strict=True))
    for name, (rate, first, each) in medians.items():
        print(f"concurrency {concurrency}, median, {name}: {_text((rate, first, each))}")
    print(f"concurrency {concurrency}: x{ratio:.2f} of by hand (median of the turns' ratios {paired:.2f})", flush=True)


def _asked(address: str, port: int, concurrency: int, turn: int, options: argparse.Namespace) -> Row:
    """Tokens a second, seconds to the first token, seconds to each further one."""
    order = {
        "model": "m",
        "concurrency": concurrency,
        "requests": options.requests * concurrency,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "vocabulary": 49_152,
        "stream": options.stream,
        "timeout_s": 600.0,
        "url": f"http://{address}:{port}",
        "seed": turn + 1,
    }
    result = Client(order, "").run()
    rows = [[row[0], row[1] or row[0], *row[2:]] for row in result["rows"]]  # no first token without streaming
    assert not result["errors"], result["errors"]
    counted = 3 if options.output_tokens == 1 else 4
    return (
        sum(row[counted] for row in rows) / result["seconds"],
        statistics.median(row[1] - row[0] for row in rows),
        statistics.median((row[2] - row[1]) / max(1, row[4] - 1) for row in rows),
    )


def _text(row: Row) -> str:
    return f"{row[0]:.1f} tokens/s, first after {row[1] * 1e3:.0f} ms, each {row[2] * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
