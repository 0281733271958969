"""Token for token the answers of stock vLLM with pipeline 1, whatever the hosts and transports are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import PROMPTS, assert_quiet, differences, greedy, launched, ssh_hosts, stock_answers, write_cluster
from tests.testbed.bed import HostOptions, hosts
from tests.testbed.host import Host
from tests.testbed.models import random_llama, smollm2

Answers = list[list[int]]


Folders = pytest.TempPathFactory

COMPILED_DTYPE = "float32"
"""A compiled model fuses across layers, and a stage boundary cuts one fusion: in bfloat16 some sums round once more,
with stock communication too, and a greedy choice between two near tokens can turn. In float32 only a fault turns it."""

FEW = 6
"""Prompts of the other layouts, where two hosts have answered all: every one of 64 tokens takes the layout's links."""

STEP = 512
"""Tokens of the largest step: a compiled start runs one, and on one core that takes a minute at vLLM's default."""


def _eager(folders: Folders) -> Answers:
    return stock_answers(folders.mktemp("eager"), smollm2(), eager=True, cores=(0,), port=8121)


def _compiled(folders: Folders) -> Answers:
    return stock_answers(
        folders.mktemp("compiled"), smollm2(), eager=False, cores=(1,), port=8122, dtype=COMPILED_DTYPE
    )


def _random(folders: Folders) -> Answers:
    return stock_answers(folders.mktemp("random"), random_llama(), eager=True, cores=(0, 1), port=8123, num_prompts=FEW)


MAKERS = {"stock_compiled": _compiled, "stock_eager": _eager, "stock_random": _random}


@pytest.fixture(scope="session")
def stock(request: pytest.FixtureRequest, tmp_path_factory: Folders) -> dict[str, Answers]:
    """The answers of stock vLLM that the chosen tests compare with, made side by side: each is bound to its core."""
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(make, tmp_path_factory) for name, make in MAKERS.items() if name in needed}
        return {name: future.result() for name, future in futures.items()}


@pytest.fixture
def stock_eager(stock: dict[str, Answers]) -> Answers:
    """Stock vLLM, pipeline 1, eager."""
    return stock["stock_eager"]


@pytest.fixture
def stock_compiled(stock: dict[str, Answers]) -> Answers:
    """Stock vLLM, pipeline 1, compiled."""
    return stock["stock_compiled"]


@pytest.fixture
def stock_random(stock: dict[str, Answers]) -> Answers:
    """Stock vLLM, pipeline 1 and tensor 2 (whose partial sums round differently), eager, a small random Llama."""
    return stock["stock_random"]


def answers_of(head: Host, num_prompts: int = len(PROMPTS)) -> Answers:
    """The answers of a served model, over its real API."""
    return [greedy(head.address, prompt) for prompt in PROMPTS[:num_prompts]]


def transports(events: Sequence[dict[str, Any]]) -> set[str]:
    """Backends that the ranks announced."""
    return {r["backend"] for r in reports(events) if "backend" in r}


def reports(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Everything that the processes of vLLM reported."""
    return [e["data"]["report"] for e in events if e["event"] == "Reported"]


def test_two_hosts_eager(tmp_path: Path, stock_eager: Answers) -> None:
    with hosts(2) as bed:
        cluster = write_cluster(tmp_path / "c.yaml", smollm2(), ssh_hosts(bed))
        with launched(tmp_path, bed, cluster) as run:
            run.wait_for("ready")
            assert differences(answers_of(bed[0]), stock_eager) == []
            assert transports(run.events()) == {"gloo"}
            importers = {r["pid"] for r in reports(run.events()) if "vllm" in r}
            assert len(importers) == 2, "one process of each vLLM node imports vLLM, the others are its forks"
            assert run.stop() == 130
        assert_quiet(bed)


def test_two_hosts_compiled(tmp_path: Path, stock_compiled: Answers) -> None:
    with hosts(2) as bed:
        cluster = write_cluster(
            tmp_path / "c.yaml",
            smollm2(),
            ssh_hosts(bed),
            engine={"args": {"enforce_eager": False, "dtype": COMPILED_DTYPE, "max_num_batched_tokens": STEP}},
        )
        for name, loaded, num_prompts in (("cold", 0, len(PROMPTS)), ("warm", 1, 4)):
            with launched(tmp_path / name, bed, cluster) as run:
                run.wait_for("ready")
                assert differences(answers_of(bed[0], num_prompts), stock_compiled[:num_prompts]) == []
                assert run.stop() == 130
            assert [log.count("Directly load AOT compilation") for log in run.logs().values()] == [loaded] * 2
        assert_quiet(bed)


def test_one_host_two_slots_by_shm(tmp_path: Path, stock_eager: Answers) -> None:
    with hosts(HostOptions(cores=[0, 1])) as bed:
        cluster = write_cluster(tmp_path / "c.yaml", smollm2(), ssh_hosts(bed, [2]))
        with launched(tmp_path, bed, cluster) as run:
            run.wait_for("ready")
            assert differences(answers_of(bed[0], FEW), stock_eager[:FEW]) == []
            assert transports(run.events()) == {"shm"}
            run.stop()
        assert_quiet(bed)


def test_three_stages_on_two_and_one_slots(tmp_path: Path, stock_eager: Answers) -> None:
    """Unequal slots: the first host carries two vLLM nodes, which share memory; the third is remote."""
    with hosts(2) as bed:
        cluster = write_cluster(tmp_path / "c.yaml", smollm2(), ssh_hosts(bed, [2, 1]))
        with launched(tmp_path, bed, cluster) as run:
            run.wait_for("ready")
            assert differences(answers_of(bed[0], FEW), stock_eager[:FEW]) == []
            assert transports(run.events()) == {"mixed"}
            run.stop()
        assert_quiet(bed)


def test_tensor_two_pipeline_two(tmp_path: Path, stock_random: Answers) -> None:
    with hosts(2) as bed:
        cluster = write_cluster(
            tmp_path / "c.yaml", random_llama(), ssh_hosts(bed, [2, 2]), parallel={"pipeline": 2, "tensor": 2}
        )
        with launched(tmp_path, bed, cluster) as run:
            run.wait_for("ready")
            assert differences(answers_of(bed[0], FEW), stock_random) == []
            assert transports(run.events()) == {"shm", "gloo"}
            run.stop()
        assert_quiet(bed)
