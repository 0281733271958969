"""`bench comm` on two hosts: complete rows on stdout, nothing left; a killed rank is named and takes all down."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.runs import DOWN_TIMEOUT_S, READY_TIMEOUT_S, Run, assert_quiet, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, hosts
from tests.testbed.models import smollm2

TOKEN = 2 * 576 * 2  # bytes of a hop of one token of SmolLM2
SIZES = [TOKEN, 16 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20]


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Two hosts of one core each."""
    with hosts(2) as bed:
        yield bed


@contextmanager
def bench(folder: Path, bed: Bed, *options: str) -> Iterator[Run]:
    """A running `cpupp bench comm --quick` on the bed; ended if the test has not."""
    cluster = write_cluster(folder / "c.yaml", smollm2(), ssh_hosts(bed))
    (folder / "run").mkdir()
    run = Run(["bench", "comm", str(cluster), "--quick", *options], bed.env, folder / "run")
    try:
        yield run
    finally:
        run.stop()


def test_every_path_at_every_size(tmp_path: Path, bed: Bed) -> None:
    with bench(tmp_path, bed, "--json") as run:
        assert run.wait(READY_TIMEOUT_S) == 0, run.stderr[-4000:]
    assert_quiet(bed)
    envelope = json.loads(run.stdout)
    assert (envelope["command"], envelope["ok"], envelope["errors"]) == ("bench comm", True, [])
    data = envelope["data"]
    left_out = len(data["left_out"])  # on a busy machine the largest may take too long
    assert left_out <= 1
    found = {(row["bytes"], row["path"]) for row in data["results"]}
    paths = ("cpupp", "vllm_generic", "gloo", "tcp")  # these two have no memory in common
    assert found == {(size, path) for size in SIZES[: len(SIZES) - left_out] for path in paths}
    for row in data["results"]:
        assert (row["op"], row["group"], row["ranks"]) == ("hop", "pp0", [0, 1])
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["runs"] >= 3
    assert [cost["path"] for cost in data["costs"]] == list(paths)
    assert data["token"] == {"hop": TOKEN, "all_reduce": TOKEN // 2, "num_hops": 1, "num_all_reduces": 0}
    assert data["slowest"]["hop"]["ranks"] == [0, 1]


def test_a_killed_rank_is_named_and_nothing_is_left(tmp_path: Path, bed: Bed) -> None:
    with bench(tmp_path, bed) as run:
        while run.process.poll() is None and len([e for e in run.events() if e["event"] == "Spawned"]) < 2:
            time.sleep(0.1)
        victim = next(e["data"]["pid"] for e in run.events() if e["event"] == "Spawned" and e["data"]["node_rank"] == 1)
        run.wait_for("Reported")  # the groups are joined, the measuring begins
        os.kill(victim, signal.SIGKILL)
        assert run.wait(DOWN_TIMEOUT_S) == 1
    assert_quiet(bed)
    assert run.stdout == ""
    first = run.stderr[run.stderr.index("error: ") :].splitlines()[0]
    assert first.startswith("error: rank 1 on b: killed by SIGKILL")
