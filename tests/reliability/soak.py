"""Real vLLM serving for minutes under load: memory of launcher and agents over time, and every log line counted."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from tests.e2e.runs import Run, greedy, launched, ssh_hosts, write_cluster
from tests.integration.faults import left_on, pid_of
from tests.reliability.many import _needs
from tests.testbed.bed import hosts
from tests.testbed.host import Host
from tests.testbed.models import smollm2

CONCURRENCY = 4
NUM_TOKENS = 64
EVERY_S = 30.0
GROWTH_MIB = 8.0
"""What a process may have grown by, from the second quarter of the soak to the last, before that counts as a leak."""


def run_soak(folder: Path, minutes: float) -> tuple[list[str], int]:
    """Serve for that long at concurrency 4; return what to write and how many things went wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    with hosts(2) as bed:
        cluster = write_cluster(folder / "cluster.yaml", smollm2(), ssh_hosts(bed))
        with launched(folder, bed, cluster) as run:
            run.wait_for("ready")
            pids = {"launcher": run.process.pid, "agent, head": pid_of(run, 0, "agent")}
            pids["agent, follower"] = pid_of(run, 1, "agent")
            samples, answered, errors = _serve(bed[0], pids, minutes * 60)
            code = run.stop(signal.SIGINT)
            written = _requests_logged(run)
            left = left_on(bed, 15)
    grown = {name: _growth([sample[name] for sample in samples]) for name in pids}
    lines = [
        f"- {minutes:g} minutes, {answered} answers of {NUM_TOKENS} tokens, {errors} errors, exit code {code}.",
        f"- Access-log lines of the completions in the launcher's record: {written} for {answered + 1} requests.",
        *(
            f"- RSS of {name}: {samples[0][name]:.1f} MiB at the start, {samples[-1][name]:.1f} MiB at the end "
            f"({growth:+.1f} from the second quarter to the last)."
            for name, growth in grown.items()
        ),
    ]
    wrong = [growth for growth in grown.values() if growth > GROWTH_MIB] + left
    return lines, len(wrong) + errors + int(written != answered + 1) + int(code != 130)


def _serve(head: Host, pids: dict[str, int], seconds: float) -> tuple[list[dict[str, float]], int, int]:
    end = time.monotonic() + seconds
    answered, errors = [0] * CONCURRENCY, [0] * CONCURRENCY

    def client(index: int) -> None:
        while time.monotonic() < end:
            try:
                greedy(head.address, f"Story number {answered[index]} of client {index}:", num_tokens=NUM_TOKENS)
                answered[index] += 1
            except (OSError, AssertionError):
                errors[index] += 1

    threads = [threading.Thread(target=client, args=(index,)) for index in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    samples = []
    while time.monotonic() < end:
        samples.append({name: _needs(pid)["rss"] for name, pid in pids.items()})
        time.sleep(min(EVERY_S, max(0.1, end - time.monotonic())))
    for thread in threads:
        thread.join()
    samples.append({name: _needs(pid)["rss"] for name, pid in pids.items()})
    return samples, sum(answered), sum(errors)


def _requests_logged(run: Run) -> int:
    return sum(text.count('POST /v1/completions HTTP/1.1" 200') for text in run.logs().values())


def _growth(values: list[float]) -> float:
    """From the mean of the second quarter to that of the last."""
    quarter = max(1, len(values) // 4)
    early, late = values[quarter : 2 * quarter] or values[:1], values[-quarter:]
    return sum(late) / len(late) - sum(early) / len(early)
