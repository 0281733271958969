"""Launch and stop again and again, at a random moment of the start each time: what is left, on the hosts and here."""

from __future__ import annotations

import os
import queue
import random
import signal
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.runs import Run
from tests.integration.faults import DOWN_S, READY_S, Lane, left_on, make_lanes, pid_of, result_of, start
from tests.testbed.bed import hosts

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
LATEST_S = 12.0  # of the random moment: some runs are ready by then
NUM_RESTARTS = 12


def run_cycles(folder: Path, count: int, seed: int, num_lanes: int) -> tuple[list[str], int]:
    """Do `count` cycles on pairs of hosts, and restarts in one launcher; return what to write, how many are wrong."""
    chance = random.Random(seed)
    plans = [(number, chance.choice(STOPS), chance.uniform(0.0, LATEST_S)) for number in range(count)]
    free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    with hosts(2 * num_lanes) as bed:
        lanes = make_lanes(folder, bed)
        for lane in lanes:
            free.put(lane)

        def one(plan: tuple[int, signal.Signals, float]) -> tuple[list[str], float, bool]:
            lane = free.get()
            try:
                return _cycle(folder / f"cycle-{plan[0]}", lane, plan[1], plan[2])
            finally:
                free.put(lane)

        with ThreadPoolExecutor(num_lanes) as pool:
            done = list(pool.map(one, plans))
        descriptors, threads = _restarts(folder / "restarts", lanes[0])
    wrong = [problems for problems, _, _ in done if problems]
    took = [seconds for _, seconds, _ in done]
    lines = [
        f"- {count} launches, each stopped by SIGINT, SIGTERM or SIGKILL at a random moment of its first "
        f"{LATEST_S:g} s (seed {seed}); {sum(was_ready for _, _, was_ready in done)} were ready by then.",
        f"- Something left on a host, or another end than the signal's: {len(wrong)}.",
        f"- From the signal until both hosts were quiet: median {statistics.median(took):.1f} s, "
        f"longest {max(took):.1f} s.",
        f"- One launcher with `restart: on-failure`, whose follower's worker was killed {NUM_RESTARTS} times: open "
        f"descriptors at each *ready* {_range(descriptors)}, threads {_range(threads)}.",
    ]
    return lines, len(wrong) + int(descriptors[-1] > descriptors[1] + 2)


def _cycle(folder: Path, lane: Lane, signum: signal.Signals, moment: float) -> tuple[list[str], float, bool]:
    run = start(folder, lane, [{}, {}], "--grace", "2")
    time.sleep(moment)
    began = time.monotonic()
    code = run.stop(signum)
    # Before Python has set up its handlers, a signal ends it as any other process.
    problems = [] if code in (128 + signum, -signum) else [f"exit code {code}: {run.stderr[-300:]}"]
    problems += left_on(lane.hosts, DOWN_S - (time.monotonic() - began))
    seconds = time.monotonic() - began
    if first := result_of(run).get("first_failure"):
        problems.append(f"a failure was named: {first}")
    if problems:
        print(f"{folder.name}, {signum.name} after {moment:.2f} s: {'; '.join(problems)}", flush=True)
    return problems, seconds, any(event["event"] == "ready" for event in run.events())


def _restarts(folder: Path, lane: Lane) -> tuple[list[int], list[int]]:
    """Open descriptors and threads of one launcher at each of its attempts' readiness."""
    restart = {"policy": "on-failure", "max": NUM_RESTARTS, "backoff": 0.001}  # which doubles each time
    run = start(folder, lane, [{}, {}], restart=restart)
    descriptors, threads = [], []
    try:
        for number in range(NUM_RESTARTS + 1):
            _wait_ready(run, number + 1)
            time.sleep(0.5)
            descriptors.append(len(os.listdir(f"/proc/{run.process.pid}/fd")))  # noqa: PTH208
            threads.append(len(os.listdir(f"/proc/{run.process.pid}/task")))  # noqa: PTH208
            if number < NUM_RESTARTS:
                os.kill(pid_of(run, 1, "worker"), signal.SIGKILL)
    finally:
        run.stop(signal.SIGINT)
    return descriptors, threads


def _wait_ready(run: Run, count: int) -> None:
    deadline = time.monotonic() + READY_S
    while sum(event["event"] == "ready" for event in run.events()) < count:
        assert run.process.poll() is None, run.stderr[-3000:]
        assert time.monotonic() < deadline, run.stderr[-3000:]
        time.sleep(0.1)


def _range(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)} (first {values[0]}, last {values[-1]})"
