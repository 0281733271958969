"""Attempts, deadlines and detached runs by the real command over real SSH; a scripted engine stands for vLLM."""

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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import PORT, Run, assert_quiet, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, hosts
from tests.testbed.fake_engine import fake, make_engine, make_model
from tests.testbed.models import ROOT

SOON = {"policy": "on-failure", "max": 2, "backoff": 0.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Two hosts, used by one run after the other, and what a cluster file needs beside them."""

    bed: Bed
    python: str
    model: Path

    def cluster(self, folder: Path, script: dict[str, str] | None = None, **more: Any) -> Path:
        """Write a cluster file. script: what the second host's engine does wrong."""
        entries = ssh_hosts(self.bed)
        entries[1]["engine"] = {"env": script or {}}
        engine = {"python": self.python, "args": {"max_model_len": 256}}
        return write_cluster(folder / "c.yaml", self.model, entries, engine=engine, **more)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The hosts with the scripted engine, in a folder that they see."""
    folder = Path(tempfile.mkdtemp(prefix="cpupp-fake-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        with hosts(2) as bed:
            yield Place(bed=bed, python=make_engine(folder / "engine"), model=make_model(folder / "model"))
    finally:
        shutil.rmtree(folder)


def record(run: Run, name: str) -> Any:
    """A JSON file of the run's folder."""
    (path,) = run.state.glob(f"cpupp/runs/*/{name}")
    return json.loads(path.read_text())


def wait_for(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def worker_of(run: Run, rank: int) -> int:
    """Pid of the worker process of a rank, from its last announcement."""
    reports = [e["data"]["report"] for e in run.events() if e["event"] == "Reported"]
    return next(int(r["pid"]) for r in reversed(reports) if r.get("rank") == rank)


def num_ready(run: Run) -> int:
    """How often the model became ready."""
    return sum(event["event"] == "ready" for event in run.events())


def ask(address: str, num_tokens: int) -> str:
    """How one completion ends: `answered`, or the error's name."""
    body = {"model": "m", "prompt": "Hello", "max_tokens": num_tokens}
    request = urllib.request.Request(
        f"http://{address}:{PORT}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
            json.load(reply)
    except (OSError, urllib.error.HTTPError) as error:
        return type(error).__name__
    return "answered"


def test_a_killed_worker_brings_the_whole_gang_again(tmp_path: Path, place: Place) -> None:
    cluster = place.cluster(tmp_path, restart=SOON)
    with launched(tmp_path, place.bed, cluster) as run:
        run.wait_for("ready")
        first_port = record(run, "plan.json")["plan"]["master_port"]
        ends: list[tuple[str, float]] = []
        client = threading.Thread(target=lambda: ends.append((ask(place.bed[0].address, 240), time.monotonic())))
        os.kill(worker_of(run, 1), signal.SIGSTOP)  # the request hangs as in a collective that lacks a rank
        client.start()
        time.sleep(0.3)
        killed = time.monotonic()
        os.kill(worker_of(run, 1), signal.SIGKILL)
        wait_for(lambda: record(run, "run.json")["status"] == "degraded", 1.5)
        wait_for(lambda: num_ready(run) == 2)
        client.join(10)
        assert ends[0][0] != "answered"
        assert ends[0][1] - killed < 6
        assert (record(run, "run.json")["status"], record(run, "run.json")["attempt"]) == ("ready", 2)
        assert record(run, "plan.json")["plan"]["master_port"] != first_port
        assert ask(place.bed[0].address, 2) == "answered"
        assert run.stop() == 130
    assert_quiet(place.bed)
    (folder,) = run.state.glob("cpupp/runs/*")
    names = {str(path.relative_to(folder / "logs")) for path in (folder / "logs").rglob("*.log")}
    assert names == {f"{where}node-{n}.log" for where in ("", "attempt-2/") for n in ("0-a", "1-b")}
    result = record(run, "result.json")
    assert result["leftovers"] == []
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["failed", "interrupted"]
    first = result["attempts"][0]["failures"][0]
    assert (first["code"], first["host"], first["ranks"]) == ("RANK-DIED", "b", [1])


def test_a_lost_host_is_connected_to_again(tmp_path: Path, place: Place) -> None:
    cluster = place.cluster(tmp_path, restart=SOON)
    with launched(tmp_path, place.bed, cluster) as run:
        run.wait_for("ready")
        (agent,) = agents(place.bed, 1)
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: num_ready(run) == 2, 30)
        assert run.stop(signal.SIGTERM) == 143
    assert_quiet(place.bed)
    result = record(run, "result.json")
    assert result["attempts"][0]["failures"][0]["code"] == "HOST-LOST"
    assert result["leftovers"] == []


def test_a_detached_run_serves_on_and_can_be_stopped(tmp_path: Path, place: Place) -> None:
    with launched(tmp_path, place.bed, place.cluster(tmp_path), "--detach") as run:
        assert run.wait(60) == 0
        kept = record(run, "run.json")
        assert (kept["status"], kept["detached"]) == ("ready", True)
        assert f"cpupp stop {kept['run']}" in run.stderr
        assert not list(run.state.glob("cpupp/runs/*/result.json"))  # it has not ended
        time.sleep(1)
        assert ask(place.bed[0].address, 2) == "answered"
        stopped = cpupp(run, place.bed, "stop", kept["run"])
    assert stopped.returncode == 0, stopped.stderr
    assert_quiet(place.bed)


def test_what_nobody_would_watch_is_not_left_alone(tmp_path: Path, place: Place) -> None:
    cluster = place.cluster(tmp_path)
    cluster.write_text(cluster.read_text().replace("engine:\n  python", "engine:\n  communicator: stock\n  python"))
    with launched(tmp_path, place.bed, cluster, "--detach") as run:
        assert run.wait(60) == 3
    assert "engine.communicator stock cannot go on without its launcher" in run.stderr
    assert not run.state.exists()


def test_a_run_whose_record_cannot_say_so_is_not_left_alone(tmp_path: Path, place: Place) -> None:
    with launched(tmp_path, place.bed, place.cluster(tmp_path), "--detach") as run:
        run.wait_for("Spawned")
        (folder,) = run.state.glob("cpupp/runs/*")
        (folder / "run.json.new").mkdir()  # as a full disk
        assert run.wait(60) == 1
    assert "the record of this run cannot be written" in run.stderr
    assert "the run cannot go on alone: the run's folder cannot be written" in run.stderr
    assert_quiet(place.bed)


def cpupp(run: Run, bed: Bed, *words: str) -> subprocess.CompletedProcess[str]:
    """Another command of the same user."""
    return subprocess.run(
        [sys.executable, "-m", "cpupp", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=ROOT,
        env={**bed.env, "XDG_STATE_HOME": str(run.state)},
    )


def agents(bed: Bed, index: int) -> list[int]:
    """Pids of the agents on a host: the processes that sshd's shells started, not their keepers."""
    found = {process.pid: process for process in bed[index].processes()}
    return [pid for pid, process in found.items() if "cpupp-agent" in process.command]


def test_the_same_failure_twice_before_ready_is_final(tmp_path: Path, place: Place) -> None:
    script = fake(exit={"phase": "load", "code": 3, "words": "no such tensor"})
    cluster = place.cluster(tmp_path, script, restart={**SOON, "max": 9})
    with launched(tmp_path, place.bed, cluster) as run:
        assert run.wait(60) == 1
    assert_quiet(place.bed)
    result = record(run, "result.json")
    assert len(result["attempts"]) == 2
    assert "attempts 1 and 2 failed alike" in result["not_restarted"]
    assert "failed alike" in run.stderr
    assert result["first_failure"]["host"] == "b"
    assert record(run, "run.json")["status"] == "failed"


def test_a_rank_that_never_joins_is_named_by_its_deadline(tmp_path: Path, place: Place) -> None:
    cluster = place.cluster(tmp_path, fake(hang="join"), deadlines={"join": 2})
    with launched(tmp_path, place.bed, cluster) as run:
        assert run.wait(60) == 6
    assert_quiet(place.bed)
    first = record(run, "result.json")["first_failure"]
    assert (first["host"], first["ranks"], first["code"]) == ("b", [1], "DEADLINE-JOIN")
    assert "not joined within 2 s" in first["message"]
    assert any("hangs at join" in line for line in first["last_lines"])
    assert "joined within 2 s" in run.stderr
