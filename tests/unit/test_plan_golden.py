"""The whole page of every ready file, offline and with invented facts, compared with tests/golden."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cpupp.launch.config import load_cluster
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.command import make_commands
from cpupp.plan.facts import HostFacts
from cpupp.plan.plan import make_plan
from cpupp.render_plan import plan_data, plan_page
from tests.unit import factory

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
MODELS = {
    "Qwen2.5-14B-Instruct": factory.model_folder(factory.QWEN_14B, layer=550_000_000),
    "Llama-3.1-70B-Instruct": factory.model_folder(factory.LLAMA_70B, layer=1_711_308_800),
    "smollm2-135m": factory.model_folder(factory.SMOLLM2, layer=7_080_192),
}


def invented(spec: ClusterSpec) -> dict[str, HostFacts]:
    """Facts for every host of a file: servers of 32 cores and two NUMA nodes; local entries are one small machine."""
    name = spec.model.path.rpartition("/")[2]
    model = replace(MODELS[name], path=spec.model.path)
    if all(host.local for host in spec.hosts):
        return factory.one_machine(*(h.name for h in spec.hosts), model=model, ssh_address="", cpus=factory.cpus(2))
    facts = {}
    for number, entry in enumerate(spec.hosts, start=1):
        address = entry.address or f"10.0.0.{number}"
        facts[entry.name] = factory.host(
            entry.name,
            number,
            model=model,
            memory_total=256 * factory.GIB,
            cpus=factory.cpus(32, numa=2, smt=2),
            interfaces=(factory.interface("lo", "127.0.0.1"), factory.interface("ens1", address)),
            ssh_address=address,
        )
    return facts


def test_there_is_a_file_for_every_shape() -> None:
    assert len(FILES) >= 7


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("how", ["offline", "facts"])
def test_page(path: Path, how: str, golden: Callable[[str, str], None]) -> None:
    spec = load_cluster(path)
    plan = make_plan(spec, {} if how == "offline" else invented(spec))
    golden(f"plans/{path.stem}.{how}.txt", plan_page(plan, make_commands(plan)).text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_same_spec_and_facts_give_the_same_bytes(path: Path) -> None:
    def whole() -> str:
        spec = load_cluster(path)
        plan = make_plan(spec, invented(spec))
        commands = make_commands(plan)
        return json.dumps(plan_data(plan, commands)) + plan_page(plan, commands).text()

    assert whole() == whole()


def test_no_golden_without_its_file() -> None:
    expected = {f"{path.stem}.{how}.txt" for path in FILES for how in ("offline", "facts")}
    assert {path.name for path in (ROOT / "tests/golden/plans").iterdir()} == expected
