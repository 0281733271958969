"""What a user gets wrong: one clear error each, the right exit code, nothing left, long before a model loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import PORT, assert_quiet, launch, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, hosts
from tests.testbed.models import smollm2

QUICK_S = 60


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Two hosts, which no refusal may change."""
    with hosts(2) as bed:
        yield bed


def errors(stderr: str) -> str:
    """The error part of what was printed, without the lines of progress before it."""
    return stderr[stderr.index("error") :]


def test_model_folder_missing_on_one_host(tmp_path: Path, bed: Bed) -> None:
    (bed[0].path(bed[0].home) / "model").symlink_to(smollm2())
    cluster = write_cluster(tmp_path / "c.yaml", Path("~/model"), ssh_hosts(bed))
    run = launch(tmp_path, bed, cluster)
    assert run.wait(QUICK_S) == 3
    assert "host b: model ~/model: " in errors(run.stderr)
    assert "host a" not in errors(run.stderr)
    assert "Traceback" not in run.stderr
    assert_quiet(bed)


def test_wrong_python(tmp_path: Path, bed: Bed) -> None:
    both = ssh_hosts(bed)
    both[1]["engine"] = {"python": "~/venv/bin/python"}
    run = launch(tmp_path, bed, write_cluster(tmp_path / "c.yaml", smollm2(), both))
    assert run.wait(QUICK_S) == 3
    assert "host b: engine.python" in errors(run.stderr)
    assert "venv/bin/python" in errors(run.stderr)
    assert_quiet(bed)


def test_unreachable_host(tmp_path: Path, bed: Bed) -> None:
    both = ssh_hosts(bed)
    both[1]["ssh"] = f"root@{bed[1].address}:2201"
    run = launch(tmp_path, bed, write_cluster(tmp_path / "c.yaml", smollm2(), both))
    assert run.wait(QUICK_S) == 5
    words = f"error: b: cannot connect to root@{bed[1].address}:2201: Connection refused"
    assert errors(run.stderr).splitlines()[0] == words
    assert_quiet(bed)


def test_taken_port(tmp_path: Path, bed: Bed) -> None:
    code = f"import socket, time; s = socket.create_server(('', {PORT})); print('up', flush=True); time.sleep(600)"
    holder = bed[0].popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        run = launch(tmp_path, bed, write_cluster(tmp_path / "c.yaml", smollm2(), ssh_hosts(bed)))
        assert run.wait(QUICK_S) == 3
        assert f"host a: serve.port {PORT} is taken by" in errors(run.stderr)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close() if holder.stdout else None
    assert_quiet(bed)
