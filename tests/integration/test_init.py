"""`cpupp init` over two SSH hosts: the file that it writes plans at once, and it replaces nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.bed import Bed, hosts
from tests.testbed.models import ROOT, smollm2


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with hosts(2) as made:
        for host in made:
            host.run(["ln", "-s", sys.prefix, str(host.home / "venv")])
        yield made


def cpupp(bed: Bed, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user of the bed."""
    command = [sys.executable, "-m", "cpupp", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**bed.env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_written_file_plans_at_once(bed: Bed, tmp_path: Path) -> None:
    done = cpupp(bed, tmp_path, "init", "a", "b", "--model", str(smollm2()), "-o", "mine.yaml")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=./cpupp.schema.json\n")
    assert (tmp_path / "cpupp.schema.json").is_file()
    assert "vLLM 0." in text
    assert "python: ~/venv/bin/python" in text
    assert f"address: {bed[1].address}" in text
    planned = cpupp(bed, tmp_path, "plan", "mine.yaml", "--svg", "map.svg")
    assert planned.returncode == 0, planned.stderr
    assert "pipeline 2 x tensor 1 = 2 ranks on 2 hosts" in planned.stdout
    assert "Map" in planned.stdout
    assert (tmp_path / "map.svg").read_text().startswith("<svg ")
    assert [host.wait_quiet() for host in bed] == [[], []]


def test_nothing_is_replaced_unasked_and_a_lost_host_writes_nothing(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("mine")
    done = cpupp(bed, tmp_path, "init", "a")
    assert done.returncode == 2
    assert "cluster.yaml: exists" in done.stderr
    lost = cpupp(bed, tmp_path, "init", "a", f"root@{bed[1].address}:1", "-o", "other.yaml")
    assert lost.returncode == 5
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]
    assert (tmp_path / "cluster.yaml").read_text() == "mine"
