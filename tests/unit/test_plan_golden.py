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
from cpupp.plan.facts import BandwidthFacts, CpuFacts, HostFacts
from cpupp.plan.plan import make_plan
from cpupp.render_plan import plan_data, plan_page
from tests.unit import factory, published

ROOT = Path(__file__).parents[2]
MAX_COMMANDS = 6  # more of them say nothing new
FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
MODELS = {
    "Qwen2.5-14B-Instruct": factory.model_folder(factory.QWEN_14B, layer=550_000_000),
    "Llama-3.1-70B-Instruct": published.llama(published.LLAMA_70B),
    "smollm2-135m": factory.model_folder(factory.SMOLLM2, layer=7_080_192),
    "Llama-3.1-405B-Instruct": published.llama(published.LLAMA_405B),
    "DeepSeek-R1": published.deepseek(published.DEEPSEEK_R1),
    "Qwen3-235B-A22B": published.qwen3_moe(published.QWEN3_235B),
}
GB = 10**9
SERVER = {"memory": 256, "cores": 32, "numa": 2, "bandwidth": 0}
# Of every host: GiB of memory, cores, NUMA nodes, GB/s of each node (0: not measured).
SHAPES = {
    "llama-70b-8-hosts": {"memory": 32, "cores": 16, "numa": 1, "bandwidth": 40},
    "llama-405b-16-hosts": {"memory": 96, "cores": 48, "numa": 2, "bandwidth": 110},
    "deepseek-r1-16-hosts": {"memory": 64, "cores": 64, "numa": 1, "bandwidth": 300},
    "qwen3-235b-8-hosts": {"memory": 96, "cores": 32, "numa": 2, "bandwidth": 80},
}
# What some hosts of a file have instead: two of the small ones are older.
OLDER = {
    "llama-70b-8-hosts": {name: {"memory": 16, "cores": 8, "numa": 1, "bandwidth": 25} for name in ("n7", "n8")},
}


def invented(path: Path, spec: ClusterSpec) -> dict[str, HostFacts]:
    """Facts for every host of a file: servers (see SHAPES); local entries are one small machine."""
    name = spec.model.path.rpartition("/")[2]
    model = replace(MODELS[name], path=spec.model.path)
    if all(host.local for host in spec.hosts):
        return factory.one_machine(*(h.name for h in spec.hosts), model=model, ssh_address="", cpus=factory.cpus(2))
    facts = {}
    for number, entry in enumerate(spec.hosts, start=1):
        address = entry.address or f"10.0.0.{number}"
        shape = OLDER.get(path.stem, {}).get(entry.name) or SHAPES.get(path.stem, SERVER)
        cores = factory.cpus(shape["cores"], numa=shape["numa"], smt=2)
        facts[entry.name] = factory.host(
            entry.name,
            number,
            model=model,
            memory_total=shape["memory"] * factory.GIB,
            cpus=cores,
            bandwidth=measured(cores, shape["bandwidth"] * GB),
            interfaces=(factory.interface("lo", "127.0.0.1"), factory.interface("ens1", address)),
            ssh_address=address,
        )
    return facts


def measured(found: tuple[CpuFacts, ...], per_node: int) -> tuple[BandwidthFacts, ...]:
    """The first hardware thread of every core, all at once."""
    first = {(cpu.socket, cpu.core): cpu for cpu in reversed(found)}.values()
    nodes = {
        numa: tuple(sorted(cpu.cpu for cpu in first if cpu.numa == numa))
        for numa in dict.fromkeys(cpu.numa for cpu in found)
    }
    return tuple(
        BandwidthFacts(numa=numa, cpus=cpus, bytes_per_s=per_node, cpu_share=1.0)
        for numa, cpus in nodes.items()
        if per_node
    )


def test_there_is_a_file_for_every_shape() -> None:
    assert len(FILES) >= 7


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("how", ["offline", "facts"])
def test_page(path: Path, how: str, golden: Callable[[str, str], None]) -> None:
    spec = load_cluster(path)
    plan = make_plan(spec, {} if how == "offline" else invented(path, spec))
    commands = make_commands(plan)
    page = plan_page(plan, commands[:MAX_COMMANDS], with_commands=len(commands) <= MAX_COMMANDS)
    golden(f"plans/{path.stem}.{how}.txt", page.text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_same_spec_and_facts_give_the_same_bytes(path: Path) -> None:
    def whole() -> str:
        spec = load_cluster(path)
        plan = make_plan(spec, invented(path, spec))
        commands = make_commands(plan)
        return json.dumps(plan_data(plan, commands)) + plan_page(plan, commands).text()

    assert whole() == whole()


def test_no_golden_without_its_file() -> None:
    expected = {f"{path.stem}.{how}.txt" for path in FILES for how in ("offline", "facts")}
    assert {path.name for path in (ROOT / "tests/golden/plans").iterdir()} == expected
