"""A run without a launcher: seen and asked from another machine, taken down by its own agents, cleared by `stop`.

One launch for all of it, because most of the time goes into the start of real vLLM. The
two hosts have one hostname and an equal VLLM_DIST_IDENT, which must not make them one machine (vllm #46716,
ROCm/mori #74).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.e2e.runs import DOWN_TIMEOUT_S, PORT, READY_TIMEOUT_S, assert_quiet, greedy, ssh_hosts, write_cluster
from tests.integration.faults import left_on
from tests.testbed.bed import HostOptions, hosts
from tests.testbed.host import Host
from tests.testbed.models import ROOT, smollm2

HIDDEN = 576
BYTES_PER_TOKEN = 2 * HIDDEN * 2
"""A stage of a Llama sends hidden states and residual, bfloat16 both."""
LONG = 480  # tokens of an answer that nobody waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the run is: the machines, and the cluster file. desk: the machine that it is launched from."""

    head: Host
    follower: Host
    desk: Host
    folder: Path
    cluster: Path

    def on_desk(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run cpupp where the run is launched from."""
        env = ["env", f"HOME={self.desk.bed.home}", f"XDG_STATE_HOME={self.folder / 'desk'}"]
        return self.desk.run([*env, sys.executable, "-m", "cpupp", *words], cwd=ROOT, timeout=timeout, check=False)

    def elsewhere(self, *words: str, code: int = 0) -> str:
        """Run cpupp on another machine, which has no record of the run; return its answer."""
        done = subprocess.run(
            [sys.executable, "-m", "cpupp", *words],
            env={**self.desk.bed.env, "XDG_STATE_HOME": str(self.folder / "elsewhere")},
            cwd=ROOT,
            timeout=60,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def status(self, code: int = 0) -> dict[str, Any]:
        """The run as another machine sees it."""
        envelope = json.loads(self.elsewhere("status", str(self.cluster), "--json", code=code))
        data: dict[str, Any] = envelope["data"]
        return data


class Stream:
    """A streamed answer that is being read. tokens: chunks so far; error: how it ended, if not well."""

    def __init__(self, address: str) -> None:
        self.tokens = 0
        self.error = ""
        self._address = address
        self._closed = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_tokens(self, count: int) -> None:
        """Wait until that many have come."""
        deadline = time.monotonic() + 60
        while self.tokens < count:
            assert self._thread.is_alive(), self.error
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def close(self) -> None:
        """Hang up, as a client that has read enough."""
        self._closed = True
        assert self.ended(60)

    def ended(self, timeout: float) -> bool:
        """Whether it has ended, after at most that time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _read(self) -> None:
        body = {"model": "m", "prompt": "A long story:", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"http://{self._address}:{PORT}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as reply:
                for line in reply:
                    if line.startswith(b'data: {"error"'):
                        self.error = line.decode()
                    self.tokens += line.startswith(b"data: {")
                    if self._closed or line.startswith(b"data: [DONE]"):
                        return
                self.error = "cut off before its end"  # http.client takes a broken chunk for the last one
        except (OSError, HTTPException) as error:
            self.error = repr(error)


@contextmanager
def left_to_its_agents() -> Iterator[Place]:
    """Launch from a desk, and leave the run to its agents."""
    twin = HostOptions(hostname="node")
    folder = Path(tempfile.mkdtemp(prefix="cpupp-detached-", dir="/var/tmp"))
    try:
        with hosts(twin, twin, HostOptions(name="desk")) as bed:
            head, follower, desk = bed
            engine = {"env": {"VLLM_DIST_IDENT": "same-on-both"}}
            cluster = write_cluster(folder / "c.yaml", smollm2(), ssh_hosts([head, follower]), engine=engine)
            place = Place(head=head, follower=follower, desk=desk, folder=folder, cluster=cluster)
            done = place.on_desk("launch", str(cluster), "--detach", timeout=READY_TIMEOUT_S)
            assert done.returncode == 0, done.stderr[-6000:]
            yield place
    finally:
        shutil.rmtree(folder)


def test_a_run_without_a_launcher() -> None:
    with left_to_its_agents() as place:
        listed_where_it_was_launched(place)
        questions_are_answered_by_both_hosts(place)
        a_load_is_measured_and_every_step_is_split(place)
        another_machine_sees_ranks_load_and_logs(place)
        the_loss_of_the_launchers_machine_changes_nothing(place)
        the_death_of_a_worker_ends_it_all(place)
        what_is_left_says_why_and_is_cleared(place)


def listed_where_it_was_launched(place: Place) -> None:
    (run,) = json.loads(place.on_desk("ps", "--json").stdout)["data"]["runs"]
    assert (run["name"], run["state"], run["detached"], run["hosts"]) == ("e2e", "ready", True, ["a", "b"])
    (file,) = (place.folder / "desk").glob("cpupp/runs/*/events.ndjson")
    events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    reports = [event["data"]["report"] for event in events if event["event"] == "Reported"]
    assert {report["backend"] for report in reports if "backend" in report} == {"gloo"}


def questions_are_answered_by_both_hosts(place: Place) -> None:
    before, num_tokens = place.head.bytes_sent(), 32
    for prompt in ("The capital of France is", "Water boils at"):
        greedy(place.head.address, prompt, num_tokens=num_tokens)
    assert place.head.bytes_sent() - before >= 2 * num_tokens * BYTES_PER_TOKEN


def a_load_is_measured_and_every_step_is_split(place: Place) -> None:
    words = ("--client", "plain", "--concurrency", "2", "--waves", "1", "--prompt-tokens", "8", "--output-tokens", "8")
    done = place.on_desk("bench", "serve", *words, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["data"]["results"]
    assert (row["requests"], row["failed"]) == (2, 0)
    assert 0 < row["output_tokens_per_second"] < row["roofline_tokens_per_second"]
    assert row["ttft_ms"]["p50"] > 0 < row["tpot_ms"]["p50"]
    head, follower = row["stages"]
    assert head["steps"] == follower["steps"]
    assert 8 <= head["steps"] <= 15, "one of the warm-up, seven of each request, most of them together"
    for stage in (head, follower):
        assert all(stage[part] > 0 for part in ("compute_ms", "wire_ms", "idle_ms"))
        assert abs(sum(stage[p] for p in ("compute_ms", "wire_ms", "wait_ms", "idle_ms")) - stage["step_ms"]) < 0.01
        assert stage["wire_ms"] < stage["compute_ms"]
    assert follower["wait_ms"] > head["wait_ms"], "only the second stage waits for a peer's data"


def another_machine_sees_ranks_load_and_logs(place: Place) -> None:
    stream = Stream(place.head.address)
    stream.wait_tokens(5)
    status = place.status()
    assert (status["state"], status["detached"], status["unreachable"]) == ("ready", True, [])
    assert (status["url"], status["model"]) == (f"http://{place.head.address}:{PORT}/v1", "m")
    ranks = status["ranks"]
    assert [(r["rank"], r["stage"], r["host"], r["alive"]) for r in ranks] == [(0, 0, "a", True), (1, 1, "b", True)]
    assert all(r["decode_step"]["batch"] == 1 for r in ranks)
    assert all(r["cpu"] > 0.05 and r["rss_bytes"] > 100 << 20 and r["log_age_seconds"] >= 0 for r in ranks)
    load = status["load"]
    assert load["running"] == 1
    assert load["generated_tokens_per_second"] > 0
    assert 0 < load["kv_usage"] < 1
    lines = place.elsewhere("logs", str(place.cluster), "--rank", "1", "--grep", "Loading weights took").splitlines()
    assert lines, "vLLM says when it has loaded"
    assert all(line.startswith("[b 1] ") and "Loading weights took" in line for line in lines)
    stream.close()
    assert stream.error == ""


def the_loss_of_the_launchers_machine_changes_nothing(place: Place) -> None:
    place.desk.crash()
    assert place.status()["state"] == "ready"
    greedy(place.head.address, "Two plus two is", num_tokens=2)


def the_death_of_a_worker_ends_it_all(place: Place) -> None:
    """Stock vLLM would stay up, answer /health with 200, and leave the request hanging."""
    victim = place.status()["ranks"][1]["pid"]
    stream = Stream(place.head.address)
    stream.wait_tokens(5)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    assert stream.ended(DOWN_TIMEOUT_S)
    assert stream.error
    assert left_on([place.head, place.follower], DOWN_TIMEOUT_S - (time.monotonic() - began)) == []


def what_is_left_says_why_and_is_cleared(place: Place) -> None:
    status = place.status(code=1)
    first = status["first_failure"]
    assert status["state"] == "failed"
    assert (first["host"], first["ranks"]) == ("b", [1])
    assert first["last_lines"]
    place.elsewhere("stop", str(place.cluster))
    assert_quiet([place.head, place.follower])
    logs = {path.name: path.read_text(encoding="utf-8") for path in (place.folder / "elsewhere").glob("**/*.log")}
    assert set(logs) == {"node-0-a.log", "node-1-b.log"}
    assert all("vLLM" in text or "vllm" in text for text in logs.values())
