"""`launch --ask`: a real answer on stdout, made by both hosts, over the wire between them, whatever their names are."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.e2e.runs import READY_TIMEOUT_S, assert_quiet, launched, ssh_hosts, write_cluster
from tests.testbed.bed import Bed, HostOptions, hosts
from tests.testbed.models import smollm2

HIDDEN = 576
BYTES_PER_TOKEN = 2 * HIDDEN * 2
"""A stage of a Llama sends hidden states and residual, bfloat16 both."""


class Watch:
    """What the hosts did over time: (clock, bytes sent by a, bytes sent by b, CPU seconds of a and of b)."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.samples: list[tuple[float, int]] = []
        self.cpu = [0.0, 0.0]

    def look(self) -> None:
        """Take a sample."""
        self.samples.append((time.time(), self.bed[0].bytes_sent()))
        self.cpu = [max(old, host.cpu_seconds()) for old, host in zip(self.cpu, self.bed, strict=True)]

    def sent_between(self, start: float, end: float) -> int:
        """Bytes that host a sent, by the samples around these times."""
        before = max((s for s in self.samples if s[0] <= start), default=self.samples[0])
        after = min((s for s in self.samples if s[0] >= end), default=self.samples[-1])
        return after[1] - before[1]


def test_one_answer_from_two_hosts_of_one_name(tmp_path: Path) -> None:
    """Equal hostnames and an equal VLLM_DIST_IDENT must not make two machines one (vllm #46716, ROCm/mori #74)."""
    with hosts(2, every=HostOptions(hostname="node")) as bed:
        env = {"VLLM_DIST_IDENT": "same-on-both"}
        cluster = write_cluster(tmp_path / "c.yaml", smollm2(), ssh_hosts(bed), engine={"env": env})
        watch = Watch(bed)
        question = "In one sentence, what is a computer network?"
        with launched(tmp_path, bed, cluster, "--ask", question, "--max-tokens", "48") as run:
            limit = time.monotonic() + READY_TIMEOUT_S
            while run.process.poll() is None and time.monotonic() < limit:
                watch.look()
                time.sleep(0.05)
            assert run.wait() == 0, run.stderr[-4000:]
        assert_quiet(bed)
        events = {event["event"]: event for event in run.events()}
        result = json.loads(next(run.state.glob("cpupp/runs/*/result.json")).read_text(encoding="utf-8"))
        answer = result["answer"]
        assert run.stdout.strip() == answer["text"]
        assert "network" in run.stdout
        assert "tokens per second" in run.stderr
        tokens = answer["prompt_tokens"] + answer["completion_tokens"] - 1
        carried = watch.sent_between(events["ready"]["time"], events["Asked"]["time"])
        assert carried >= tokens * BYTES_PER_TOKEN, f"{carried} bytes for {tokens} tokens"
        assert min(watch.cpu) > 1.0
        reports = [e["data"]["report"] for e in run.events() if e["event"] == "Reported"]
        assert {r["backend"] for r in reports if "backend" in r} == {"gloo"}


def test_two_entries_that_are_one_machine(tmp_path: Path) -> None:
    """Two names for one host: the plan says so, and the ranks share memory."""
    with hosts(HostOptions(cores=[0, 1])) as bed:
        twice = [{"name": name, "ssh": bed[0].ssh} for name in ("left", "right")]
        cluster = write_cluster(tmp_path / "c.yaml", smollm2(), twice)
        with launched(tmp_path, bed, cluster, "--ask", "Say hello.", "--max-tokens", "8") as run:
            assert run.wait() == 0, run.stderr[-4000:]
        assert_quiet(bed)
        assert "left and right are one machine" in run.stderr
        reports = [e["data"]["report"] for e in run.events() if e["event"] == "Reported"]
        assert {r["backend"] for r in reports if "backend" in r} == {"shm"}
