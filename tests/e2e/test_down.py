"""However a run ends, within ten seconds nothing of it is left on any host, and the record says why it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import DOWN_TIMEOUT_S, Run, assert_quiet, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, hosts
from tests.testbed.models import smollm2


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Two hosts, used by one run after the other: each must find them clean."""
    with hosts(2) as bed:
        yield bed


def main_of(run: Run, node_rank: int) -> int:
    """Pid of a vLLM node's main process."""
    spawned = [e["data"] for e in run.events() if e["event"] == "Spawned"]
    return next(int(s["pid"]) for s in spawned if s["node_rank"] == node_rank)


def first_error(run: Run) -> str:
    """The line that names what failed first."""
    return next(line for line in run.stderr.splitlines() if line.startswith("error: "))


def test_killed_main_process_of_the_head_while_loading(tmp_path: Path, bed: Bed) -> None:
    cluster = write_cluster(tmp_path / "c.yaml", smollm2(), ssh_hosts(bed))
    with launched(tmp_path, bed, cluster) as run:
        run.wait_for("Spawned")
        while len([e for e in run.events() if e["event"] == "Spawned"]) < 2:
            time.sleep(0.1)
        time.sleep(6)  # engine core and worker are being started
        os.kill(main_of(run, 0), signal.SIGKILL)
        assert run.wait(DOWN_TIMEOUT_S) == 1
        assert_quiet(bed)
    assert first_error(run).startswith("error: rank 0 on a: killed by SIGKILL")


def test_sigterm_before_ready(tmp_path: Path, bed: Bed) -> None:
    cluster = write_cluster(tmp_path / "c.yaml", smollm2(), ssh_hosts(bed))
    with launched(tmp_path, bed, cluster) as run:
        run.wait_for("Spawned")
        time.sleep(4)
        assert run.stop(signal.SIGTERM) == 143
        assert_quiet(bed)


def test_stopped_main_process_of_the_follower_while_starting(tmp_path: Path, bed: Bed) -> None:
    """It lives, and its ranks would never join: said after seconds, not when the time is over."""
    cluster = write_cluster(tmp_path / "c.yaml", smollm2(), ssh_hosts(bed))
    with launched(tmp_path, bed, cluster) as run:
        while len([e for e in run.events() if e["event"] == "Spawned"]) < 2:
            time.sleep(0.1)
        os.kill(main_of(run, 1), signal.SIGSTOP)
        assert run.wait(DOWN_TIMEOUT_S) == 1
        assert_quiet(bed)
    assert first_error(run).startswith("error: rank 1 on b: process ")
    assert "is stopped (SIGSTOP)" in first_error(run)
