"""The split of a step: counted by the worker's clock, read from its file by the agent, averaged by the plan."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cpupp.plan.steps import RankSteps, StepCounts, read_rank_steps, split
from cpupp.rank import step_clock
from cpupp.rank.agent_steps import MAGIC, path_of, read_steps
from cpupp.rank.step_clock import StepClock, talks, waits
from cpupp.rank.vllm_steps import count_steps
from cpupp.render_steps import step_data, step_text


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Time stands still but for what the test lets pass; the clock of the process is a new one."""
    time = Time()
    monkeypatch.setattr(step_clock, "monotonic_ns", time)
    monkeypatch.setattr(step_clock, "CLOCK", StepClock())
    return time


def counted(site: Path, rank: int = 0) -> RankSteps:
    return read_rank_steps(read_steps(str(site)))[rank]


def test_every_nanosecond_of_a_step_is_in_one_part(time: Time, tmp_path: Path) -> None:
    clock = step_clock.CLOCK
    clock.open(str(tmp_path), 3)

    @waits
    def arrival() -> None:
        time.now += 300

    @talks
    def gather() -> None:
        time.now += 20

    @talks
    def receive() -> None:
        time.now += 5
        arrival()
        gather()  # a collective inside: not counted twice

    clock.step(8, 8)
    receive()
    time.now += 1_000
    clock.pause()
    time.now += 70  # the engine
    clock.resume()
    time.now += 7
    clock.pause()
    time.now += 50
    clock.step(100, 2)
    time.now += 4_000
    clock.pause()
    time.now += 900  # the other stages
    clock.step(2, 2)
    clock.pause()
    time.now += 11
    clock.step(2, 2)
    clock.pause()
    found = counted(tmp_path, 3)
    assert found.decode == StepCounts(steps=3, tokens=12, compute_ns=1_007, wire_ns=25, wait_ns=300, idle_ns=81)
    assert found.other == StepCounts(steps=1, tokens=100, compute_ns=4_000, idle_ns=950)
    total = sum(getattr(c, n) for c in (found.decode, found.other) for n in StepCounts.__slots__ if n.endswith("_ns"))
    assert total == time.now - 1_000


def test_an_order_without_tokens_is_no_step(time: Time, tmp_path: Path) -> None:
    step_clock.CLOCK.open(str(tmp_path), 0)
    step_clock.CLOCK.step(0, 0)
    time.now += 9
    step_clock.CLOCK.pause()
    assert counted(tmp_path) == RankSteps(other=StepCounts(compute_ns=9))


def test_what_is_no_file_of_counters_is_passed_over(tmp_path: Path) -> None:
    StepClock().open(str(tmp_path), 0)
    Path(path_of(str(tmp_path), 1)).write_bytes(b"short")
    Path(path_of(str(tmp_path), 2)).write_bytes(MAGIC.replace(b"1", b"9").ljust(104, b"\0"))
    (tmp_path / "steps-x").write_bytes(b"")
    assert list(read_steps(str(tmp_path))) == ["0"]
    assert read_steps(str(tmp_path / "absent")) == {}


def test_vllms_worker_is_counted_once(time: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CPUWorker:
        def execute_model(self, order: SimpleNamespace) -> str:
            time.now += 10
            if order.total_num_scheduled_tokens > 4:
                raise ValueError("too long")
            return "hidden states"

        def sample_tokens(self, grammar: None) -> str:
            time.now += 1
            return "token"

    module = ModuleType("vllm.v1.worker.cpu_worker")
    module.CPUWorker = CPUWorker  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.cpu_worker", module)
    monkeypatch.setattr("cpupp.rank.vllm_steps.CLOCK", step_clock.CLOCK)
    for _ in range(2):
        count_steps(str(tmp_path / "reports"), 0)
    worker = CPUWorker()
    assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"a": 1})) == (
        "hidden states"
    )
    assert worker.sample_tokens(None) == "token"
    with pytest.raises(ValueError, match="too long"):
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=5, num_scheduled_tokens={"a": 5}))
    found = counted(tmp_path)
    assert found.decode == StepCounts(steps=1, tokens=1, compute_ns=11)
    assert found.other == StepCounts(steps=1, tokens=5, compute_ns=10)


def test_a_split_is_the_average_of_the_steps_between_two_looks() -> None:
    before = StepCounts(steps=10, tokens=10, compute_ns=5, wire_ns=5, wait_ns=5, idle_ns=5)
    after = StepCounts(steps=14, tokens=42, compute_ns=120_000_005, wire_ns=4_000_005, wait_ns=60_000_005, idle_ns=5)
    found = split(after.since(before))
    assert found is not None
    assert step_data(found) == {
        "steps": 4,
        "batch": 8.0,
        "step_ms": 46.0,
        "compute_ms": 30.0,
        "wire_ms": 1.0,
        "wait_ms": 15.0,
        "idle_ms": 0.0,
    }
    assert step_text(found) == "46.0 ms: 65% compute, 2% wire, 33% waiting, 0% engine"
    assert before.since(after) == before, "a worker that started anew counts from zero"
    assert split(after.since(after)) is None
    assert step_data(None) is None


@pytest.mark.parametrize("data", [None, [], {"x": {}}, {"0": None}, {"0": {"decode": {"steps": "many"}, "other": 3}}])
def test_counters_of_another_agent_are_read_with_care(data: object) -> None:
    assert set(read_rank_steps(data).values()) <= {RankSteps()}
