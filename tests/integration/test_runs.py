"""`cpupp ps`, `status`, `logs` and `stop` as users run them: two real sshd hosts, a scripted vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import assert_quiet, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, hosts
from tests.testbed.fake_engine import fake, make_engine, make_model
from tests.testbed.models import ROOT

LINES = {"lines_per_s": 10.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Two hosts with the scripted engine, and where runs are recorded."""

    bed: Bed
    folder: Path
    python: str
    model: Path

    def cluster(self, name: str, port: int = 8000) -> Path:
        """Write a cluster file whose ranks write numbered lines."""
        entries = [{**entry, "engine": {"env": fake(**LINES)}} for entry in ssh_hosts(self.bed)]
        engine = {"python": self.python, "args": {"max_model_len": 256}}
        return write_cluster(
            self.folder / f"{name}.yaml", self.model, entries, name=name, engine=engine, serve={"port": port}
        )

    def env(self, state: str = "state") -> dict[str, str]:
        """The environment of a user of the bed. state: another one has no records."""
        return {**self.bed.env, "XDG_STATE_HOME": str(self.folder / state)}

    def cpupp(self, *words: str, state: str = "state", code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        argv = [sys.executable, "-m", "cpupp", *words]
        env = self.env(state)
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env, timeout=180, check=False)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def data(self, *words: str, state: str = "state", code: int | None = 0) -> dict[str, Any]:
        """The values of the command's envelope."""
        data: dict[str, Any] = json.loads(self.cpupp(*words, "--json", state=state, code=code).stdout)["data"]
        return data

    def detached(self, name: str, port: int = 8000) -> str:
        """Launch a run that goes on by itself; return its id."""
        self.cpupp("launch", str(self.cluster(name, port)), "--detach")
        (run,) = [run for run in self.data("ps")["runs"] if run["name"] == name]
        return str(run["run"])

    def folder_of(self, run: str) -> Path:
        """The run's record."""
        (folder,) = (self.folder / "state" / "cpupp" / "runs").glob(f"*-{run}")
        return folder


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="cpupp-runs-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        with hosts(2) as bed:
            yield Place(
                bed=bed, folder=folder, python=make_engine(folder / "engine"), model=make_model(folder / "model")
            )
    finally:
        shutil.rmtree(folder)


def wait_for(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def following(place: Place, state: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A command that goes on by itself; ended when left."""
    argv = [sys.executable, "-m", "cpupp", *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=place.env(state)) as process:
        try:
            yield process
        finally:
            process.kill()


def numbers(text: str, rank: int) -> list[int]:
    """The numbers of the numbered lines of a rank, in order."""
    worker = f"(Worker_PP{rank} "
    return [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if worker in line and "numbered line" in line]


def test_a_detached_run_is_seen_read_and_stopped(place: Place) -> None:
    run = place.detached("one")
    status = place.data("status", run)
    assert (status["state"], status["detached"], status["unreachable"]) == ("ready", True, [])
    assert [(rank["rank"], rank["stage"], rank["host"], rank["alive"]) for rank in status["ranks"]] == [
        (0, 0, "a", True),
        (1, 1, "b", True),
    ]
    assert all(rank["pid"] and rank["rss_bytes"] and rank["cpu"] is not None for rank in status["ranks"])
    assert all(rank["log_age_seconds"] < 30 for rank in status["ranks"])
    assert (status["load"]["running"], status["load"]["generated_tokens_per_second"]) == (0, 0.0)

    # From a machine that has no record: the cluster file is enough.
    lost = place.data("status", str(place.cluster("one")), state="empty")
    assert (lost["run"], lost["state"], [rank["stage"] for rank in lost["ranks"]]) == (run, "ready", [0, 1])

    with following(place, "state", "logs", run, "-f", "--grep", "numbered|Shutting") as follower:
        assert follower.stdout is not None
        first = follower.stdout.readline()
        assert first.startswith(("[a 0] ", "[b 1] "))
        stopped = place.data("stop", run, "--grace", "1")["runs"][0]
        assert (stopped["state"], stopped["by"]) == ("stopped", "hosts")
        assert [host["found"] for host in stopped["hosts"]] == [1, 1]
        followed = first + follower.stdout.read()
        assert follower.wait(60) == 0

    kept = place.cpupp("logs", run).stdout
    for rank in (0, 1):
        found = numbers(kept, rank)
        assert found == list(range(1, len(found) + 1)), "the record and what the hosts kept fit together"
        assert numbers(followed, rank) == found, "who followed has every line"
    assert_quiet(place.bed)
    again = place.data("stop", run)["runs"][0]
    assert (again["state"], again["by"]) == ("stopped", "nobody")
    assert place.data("status", run, code=1)["state"] == "stopped"
    assert place.data("ps")["runs"] == []


def test_two_runs_on_the_same_hosts_and_a_lost_record(place: Place) -> None:
    first, second = place.detached("left", 8001), place.detached("right", 8002)
    assert {run["run"] for run in place.data("ps")["runs"]} == {first, second}
    assert "RUN-AMBIGUOUS" in place.cpupp("status", "--json", code=2).stdout
    shutil.rmtree(place.folder_of(first))
    assert place.data("stop", str(place.cluster("left", 8001)), "--grace", "0")["runs"][0]["run"] == first
    assert numbers((place.folder_of(first) / "logs" / "node-1-b.log").read_text(), 1), "what the host kept is here"
    assert place.data("status", second)["state"] == "ready"

    # A rank dies: the first failure has its name, and the logs of the failed run are fetched by `stop`.
    victim = place.data("status", "right")["ranks"][1]["pid"]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: place.data("status", second, code=1)["state"] in ("degraded", "failed"))
    failed = place.data("status", second, code=1)
    assert (failed["first_failure"]["host"], failed["first_failure"]["ranks"]) == ("b", [1])
    assert place.data("stop", "--all", "--grace", "0")["runs"][0]["state"] == "failed"
    assert_quiet(place.bed)


def test_a_host_that_is_down_is_finished_by_the_next_stop(place: Place) -> None:
    run = place.detached("cut", 8003)
    a, b = place.bed
    b.link.down()
    try:
        stop = place.data("stop", run, "--grace", "0", code=5)["runs"][0]
        assert (stop["state"], [host["reached"] for host in stop["hosts"]]) == ("stopping", [True, False])
        assert place.data("status", run, code=5)["unreachable"] == ["b"]
    finally:
        b.link.up()
    # Failed where the stop came so late that the hosts had missed each other before.
    missed = place.data("status", run, code=None).get("first_failure") or {}
    state = place.data("stop", run, "--grace", "0")["runs"][0]["state"]
    assert state == ("failed" if missed.get("code") in ("PEER-LOST", "AGENT-LOST") else "stopped")
    assert_quiet([a, b])


def test_an_attached_run_from_another_terminal(place: Place, tmp_path: Path) -> None:
    with launched(tmp_path, place.bed, place.cluster("two", 8004)) as launch:
        launch.wait_for("ready")
        state = str(launch.state)
        assert place.data("status", "two", state=state)["state"] == "ready"
        assert numbers(place.cpupp("logs", "--rank", "1", state=state).stdout, 1)[0] == 1
        with following(place, state, "status", "--watch") as watch:
            assert watch.stdout is not None
            assert ": ready, launcher pid" in watch.stdout.readline()
            stop = place.data("stop", state=state)["runs"][0]
            assert (stop["by"], stop["state"]) == ("launcher", "stopped")
            assert launch.wait() == 143
            assert ": stopped" in watch.stdout.read()
            assert watch.wait(60) == 1
    assert_quiet(place.bed)


def test_a_killed_launcher_leaves_a_crashed_run(place: Place, tmp_path: Path) -> None:
    with launched(tmp_path, place.bed, place.cluster("three", 8005)) as launch:
        launch.wait_for("ready")
        launch.process.kill()
        launch.process.wait()
        state = str(launch.state)
        (run,) = place.data("ps", "--all", state=state)["runs"]
        assert run["state"] == "crashed"
        assert place.data("stop", "--grace", "0", state=state)["runs"][0]["state"] == "failed"
        assert_quiet(place.bed)
