"""Field cases of memory, threads and preloads that no other test file has (others carry their number there)."""

from __future__ import annotations

import pytest

from cpupp.plan.command import make_commands
from cpupp.plan.diagnose import diagnose
from cpupp.plan.plan import make_plan
from cpupp.plan.rules import rule_problems
from tests.unit import published
from tests.unit.factory import GIB, cluster, cpus, engine, host, machines


def findings(code: str, facts: dict[str, object]) -> list[tuple[str, str, str]]:
    """Severity, host and title of one check's findings."""
    report = diagnose(cluster(*facts, pipeline=len(facts)), facts)  # type: ignore[arg-type]
    return [(f.severity, f.host, f.title) for f in report.findings if f.code == code]


@pytest.mark.parametrize("missing", ["tcmalloc", "iomp"])
def test_a_library_that_one_host_lacks_is_found_there_and_preloaded_elsewhere(missing: str) -> None:
    """vllm #37561, #44191."""
    lacking = host("b", 2, engine=engine(**{missing: ""}))
    facts = {"a": host("a", 1), "b": lacking}
    found = findings("PRELOAD", dict(facts))
    assert [f for f in found if f[0] == "warning"] == [f for f in found if f[1] == "b"]
    assert any(missing in f[2] for f in found)
    plan = make_plan(cluster("a", "b", pipeline=2), facts)
    assert any(text.startswith("host b:") and missing in text for text in plan.warnings)
    first, second = (c.env["LD_PRELOAD"].split(":") for c in make_commands(plan))
    assert (len(first), len(second)) == (2, 1)
    assert not any(missing in path for path in second)


def test_a_host_that_cannot_compile_is_told_before_the_weights_are_loaded() -> None:
    facts = {"a": host("a", 1), "b": host("b", 2, engine=engine(compiler="", python_h=""))}
    text = "host b: no g++ and no Python.h: vLLM cannot compile the model there"
    compiled = make_plan(cluster("a", "b", pipeline=2), facts)
    eager = make_plan(cluster("a", "b", pipeline=2, engine={"args": {"enforce_eager": True}}), facts)
    assert [any(text in warning for warning in plan.warnings) for plan in (compiled, eager)] == [True, False]


def test_a_preload_path_of_one_machine_is_not_used_on_another() -> None:
    """gpustack #5660: every host preloads what was found on it."""
    other = engine(tcmalloc="/opt/lib/libtcmalloc.so.4", iomp="/opt/venv/lib/libiomp5.so")
    plan = make_plan(cluster("a", "b", pipeline=2), {"a": host("a", 1), "b": host("b", 2, engine=other)})
    first, second = (c.env["LD_PRELOAD"] for c in make_commands(plan))
    assert second == "/opt/lib/libtcmalloc.so.4:/opt/venv/lib/libiomp5.so"
    assert "/opt" not in first


def test_the_isa_of_each_host_is_shown_and_a_mix_is_said() -> None:
    """vllm #18660."""
    facts = {"a": host("a", 1), "b": host("b", 2, isa=("avx2",))}
    report = diagnose(cluster("a", "b", pipeline=2), facts)
    isa = [f for f in report.findings if "ISA" in f.code or "avx" in f"{f.title} {f.evidence}"]
    assert {f.host for f in isa} >= {"a", "b"} or any("a" in f.evidence and "b" in f.evidence for f in isa)
    assert any(f.severity == "warning" for f in isa)


def test_a_quota_bounds_the_cores_of_the_ranks() -> None:
    plan = make_plan(cluster("a"), {"a": host("a", 1, cpus=cpus(16), cpu_quota=4.0)})
    assert plan.ranks[0].cores == (0, 1, 2)  # and one for the engine


def test_a_quota_takes_cores_of_every_numa_node_that_has_a_rank() -> None:
    facts = {"a": host("a", 1, cpus=cpus(16, numa=2), cpu_quota=6.0)}
    plan = make_plan(cluster({"name": "a", "slots": 2}, tensor=2), facts)
    assert [rank.cores for rank in plan.ranks] == [(0, 1), (8, 9, 10)]  # core 2 is the engine's


def test_a_rank_over_two_numa_nodes_is_bound_to_the_first_and_the_plan_says_so() -> None:
    """vllm #15800: vLLM binds all its memory to that node, so half of the machine is out of reach."""
    model = published.llama(published.LLAMA_70B)
    facts = machines("a", memory_total=220 * GIB, cpus=cpus(16, numa=2), model=model)
    args = {"max_model_len": 4096, "max_num_batched_tokens": 2048}
    with pytest.raises(Exception, match=r"host a: NUMA node 0\(110\.0 GiB\) < weights\(131\.4\)"):
        make_plan(cluster("a", engine={"args": args}), facts)
    plan = make_plan(cluster({"name": "a", "slots": 2}, tensor=2, engine={"args": args}), facts)
    assert [rank.cores[0] for rank in plan.ranks] == [0, 8]
    small = make_plan(cluster("a"), machines("a", cpus=cpus(16, numa=2)))
    text = "a: rank 0 has cores of NUMA nodes 0 and 1, but vLLM binds its memory to node 0 alone"
    assert any(warning.startswith(text) for warning in small.warnings)


@pytest.mark.parametrize("key", ["pipeline", "tensor"])
def test_auto_beside_a_size_is_refused(key: str) -> None:
    data = {
        "name": "t",
        "model": {"path": "m"},
        "parallel": {"auto": True, key: 2},
        "hosts": [{"name": "a", "ssh": "a"}],
    }
    (problem,) = rule_problems(data)
    assert (problem.path, problem.message) == (("parallel", key), "auto chooses this itself")
