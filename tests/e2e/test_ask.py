"""`launch --ask`: a real answer on stdout; two entries that are one machine are seen as one, and share its memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.e2e.runs import assert_quiet, launched, ssh_hosts, write_cluster
from tests.testbed.bed import HostOptions, hosts
from tests.testbed.models import smollm2


def test_one_answer_from_two_entries_that_are_one_machine(tmp_path: Path) -> None:
    """Two names for one host: the plan says so, and the ranks share memory."""
    with hosts(HostOptions(cores=[0, 1])) as bed:
        twice = [{**ssh_hosts(bed)[0], "name": name} for name in ("left", "right")]
        cluster = write_cluster(tmp_path / "c.yaml", smollm2(), twice, engine={"packed_weights": "auto"})
        question = "In one sentence, what is a computer network?"
        with launched(tmp_path, bed, cluster, "--ask", question, "--max-tokens", "48") as run:
            assert run.wait() == 0, run.stderr[-4000:]
        assert_quiet(bed)
    result = json.loads(next(run.state.glob("cpupp/runs/*/result.json")).read_text(encoding="utf-8"))
    answer = result["answer"]
    assert run.stdout.strip() == answer["text"]
    assert "network" in run.stdout
    assert "tokens per second" in run.stderr
    assert answer["prompt_tokens"] > 0
    assert 0 < answer["completion_tokens"] <= 48
    assert "left and right are one machine" in run.stderr
    packs = torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert ["linear layers run on packed weights" in log for log in run.logs().values()] == [packs] * 2
    reports = [e["data"]["report"] for e in run.events() if e["event"] == "Reported"]
    assert {r["backend"] for r in reports if "backend" in r} == {"shm"}
