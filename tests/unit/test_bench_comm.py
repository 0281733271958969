"""The pure part of `bench comm`: what is measured, what the ranks are told, what the times mean, and how it looks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cpupp.errors import CpuppError
from cpupp.launch.bench_comm import BenchResult
from cpupp.launch.result import RunResult
from cpupp.launch.site import site_files
from cpupp.plan.bench_comm import (
    BUDGET_S,
    HOP_SIZES,
    REDUCE_SIZES,
    bench_commands,
    bench_order,
    bench_rows,
    bench_sizes,
    bench_targets,
    percentile,
    slowest,
    token_bytes,
    token_costs,
)
from cpupp.plan.bench_order import (
    ALL_REDUCE,
    BENCH_ENV,
    HOP,
    BenchDone,
    BenchOrder,
    BenchTimes,
    decode_line,
)
from cpupp.plan.command import make_commands
from cpupp.plan.handoff import ErrorReport, HandoffError, encode_report
from cpupp.plan.plan import Plan, make_plan
from cpupp.render_bench import bench_data, bench_page, size_text, time_text
from tests.unit.factory import cluster, machines

ROW = 512 * 2  # bytes of a token's hidden states in the factory's Llama


def pair() -> Plan:
    """Pipeline 2 on two machines."""
    return make_plan(cluster("a", "b", pipeline=2), machines("a", "b"))


def square() -> Plan:
    """Pipeline 2 x tensor 2 on two machines, a TP group on each."""
    slots = [{"name": n, "slots": 2} for n in "ab"]
    return make_plan(cluster(*slots, pipeline=2, tensor=2, layers=[4, 4]), machines("a", "b"))


def times(op: str, group: str, ranks: Sequence[int], size: int, path: str, *microseconds: float) -> BenchTimes:
    """Times as a rank reports them."""
    found = tuple(round(us * 1000) for us in microseconds)
    return BenchTimes(op=op, group=group, ranks=tuple(ranks), bytes=size, path=path, nanoseconds=found)


def result(*found: BenchTimes) -> BenchResult:
    """A run that went well."""
    run = RunResult(
        outcome="ok",
        exit_code=0,
        first_failure=None,
        consequences=(),
        answer=None,
        folder=Path("/runs/x"),
        ready_seconds=None,
        leftovers=(),
    )
    return BenchResult(run=run, times=found)


def test_every_link_of_neighbours_and_every_tensor_group_is_a_target() -> None:
    found = [(t.op, t.group, t.ranks, t.shared) for t in bench_targets(square())]
    assert found == [
        (HOP, "pp0", (0, 2), False),
        (HOP, "pp1", (1, 3), False),
        (ALL_REDUCE, "tp0", (0, 1), True),
        (ALL_REDUCE, "tp1", (2, 3), True),
    ]


def test_a_link_inside_a_host_may_share_memory() -> None:
    slots = [{"name": n, "slots": 2} for n in "ab"]
    plan = make_plan(cluster(*slots, pipeline=4), machines("a", "b"))
    assert [(t.ranks, t.shared) for t in bench_targets(plan)] == [((0, 1), True), ((1, 2), False), ((2, 3), True)]


def test_one_rank_has_nothing_to_measure() -> None:
    with pytest.raises(CpuppError) as caught:
        bench_targets(make_plan(cluster("a"), machines("a")))
    assert caught.value.code == "BENCH-ALONE"
    assert caught.value.hint


def test_the_sizes_hold_one_token_of_the_model() -> None:
    assert bench_sizes(pair()) == {HOP: (2 * ROW, *HOP_SIZES), ALL_REDUCE: (ROW, *REDUCE_SIZES)}
    offline = make_plan(cluster("a", "b", pipeline=2), {})
    assert bench_sizes(offline) == {HOP: HOP_SIZES, ALL_REDUCE: REDUCE_SIZES}
    assert token_bytes(offline) is None


@pytest.mark.parametrize(("dtype", "size"), [("auto", 2), ("float32", 4), ("bfloat16", 2), ("half", 2)])
def test_a_token_sends_what_the_engine_computes_with(dtype: str, size: int) -> None:
    plan = make_plan(cluster("a", "b", pipeline=2, engine={"args": {"dtype": dtype}}), machines("a", "b"))
    token = token_bytes(plan)
    assert token is not None
    assert (token.hop, token.all_reduce) == (2 * 512 * size, 512 * size)
    assert (token.num_hops, token.num_all_reduces) == (1, 0)


def test_orders_survive_the_way_and_share_the_time() -> None:
    plan = square()
    for rank in range(4):
        order = bench_order(plan, rank, quick=False)
        assert BenchOrder.decode(order.encode()) == order
        assert order.rank == rank
        assert order.address == ("10.0.0.1" if rank < 2 else "10.0.0.2")
        num_blocks = sum(len(order.sizes[t.op]) for t in order.targets)
        assert order.block_s * num_blocks <= BUDGET_S + 1e-9
    quick = bench_order(plan, 0, quick=True)
    assert (quick.block_s, quick.rounds) < (order.block_s, order.rounds)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "rank": 0}'])
def test_an_order_that_cannot_be_read(text: str) -> None:
    with pytest.raises(HandoffError, match="bench order"):
        BenchOrder.decode(text)


def test_a_command_for_every_rank() -> None:
    plan = square()
    commands = bench_commands(plan, make_commands(plan), quick=True)
    assert [(c.node_rank, c.host) for c in commands] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    for command in commands:
        assert command.argv == ("/home/me/venv/bin/python", "-m", "cpupp.rank.bench_comm")
        assert BenchOrder.decode(command.env[BENCH_ENV]).rank == command.node_rank
        assert command.env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "VLLM_CPU_OMP_THREADS_BIND" not in command.env
        assert command.site_env["PYTHONPATH"] == "{site}"


def test_the_site_has_what_the_ranks_import() -> None:
    files = site_files(pair().hosts[0])
    assert {"cpupp/rank/bench_comm.py", "cpupp/rank/bench_paths.py", "cpupp/plan/bench_order.py"} <= set(files)


def test_lines_of_the_reports_file() -> None:
    found = times(HOP, "pp0", (0, 1), 1024, "gloo", 1.5, 2)
    assert decode_line(found.encode()) == found
    assert decode_line(BenchDone(rank=3).encode()) == BenchDone(rank=3)
    error = ErrorReport(pid=1, where="w", message="m")
    assert decode_line(encode_report(error)) == error
    for text in ("", "3", '{"report": "bench"}', '{"report": "bench-done", "x": 1}', '{"report": "else"}'):
        with pytest.raises(HandoffError):
            decode_line(text)


def test_percentiles() -> None:
    assert [percentile([5.0], share) for share in (0, 0.1, 1)] == [5, 5, 5]
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile(range(11), 0.1) == 1
    assert percentile(range(11), 0.9) == 9


def test_rows_have_median_and_spread_and_an_order() -> None:
    rows = bench_rows(
        [
            times(ALL_REDUCE, "tp0", (0, 1), 8192, "cpupp", 5),
            times(HOP, "pp0", (0, 2), 16384, "gloo", *range(1, 12)),
            times(HOP, "pp0", (0, 2), 16384, "cpupp", 80.04),
            times(HOP, "pp0", (0, 2), 65536, "cpupp"),
        ]
    )
    assert [(r.op, r.path) for r in rows] == [(HOP, "cpupp"), (HOP, "gloo"), (ALL_REDUCE, "cpupp")]
    gloo = rows[1]
    assert (gloo.median_us, gloo.p10_us, gloo.p90_us, gloo.runs) == (6, 2, 10, 11)
    assert rows[0].median_us == 80.0


def measured() -> tuple[BenchTimes, ...]:
    """A whole run of the square."""
    hop, reduce = 2 * ROW, ROW
    return (
        times(HOP, "pp0", (0, 2), hop, "cpupp", 100),
        times(HOP, "pp1", (1, 3), hop, "cpupp", 120),
        times(HOP, "pp0", (0, 2), hop, "vllm_generic", 900),
        times(HOP, "pp1", (1, 3), hop, "vllm_generic", 950),
        times(HOP, "pp0", (0, 2), hop, "tcp", 50),
        times(ALL_REDUCE, "tp0", (0, 1), reduce, "cpupp", 5),
        times(ALL_REDUCE, "tp1", (2, 3), reduce, "cpupp", 7),
        times(ALL_REDUCE, "tp0", (0, 1), reduce, "vllm_generic", 250),
        times(ALL_REDUCE, "tp1", (2, 3), reduce, "vllm_generic", 250),
        times(HOP, "pp1", (1, 3), 1 << 20, "cpupp", 1000),
    )


def test_what_a_token_pays() -> None:
    """The slowest link of each step once, and two all-reduces for each of the 4 layers of each of the 2 stages."""
    costs = {c.path: (c.hops_us, c.all_reduces_us, c.total_us) for c in token_costs(square(), bench_rows(measured()))}
    assert costs == {"cpupp": (120, 8 * 5 + 8 * 7, 216), "vllm_generic": (950, 4000, 4950)}


def test_the_slowest_link_is_of_our_path_at_the_smallest_size() -> None:
    rows = bench_rows(measured())
    worst = slowest(rows, HOP)
    assert worst is not None
    assert (worst.ranks, worst.bytes, worst.median_us) == ((1, 3), 2 * ROW, 120)
    assert slowest([r for r in rows if r.op == HOP], ALL_REDUCE) is None


def test_the_page() -> None:
    left = BenchTimes(
        op=HOP, group="pp0", ranks=(0, 2), bytes=64 << 20, path="gloo", nanoseconds=(), note="left out: too long"
    )
    none = BenchTimes(op=HOP, group="pp0", ranks=(0, 2), bytes=0, path="shm", nanoseconds=(), note="without shm")
    text = bench_page(square(), result(*measured(), left, none)).text()
    assert "! hop pp0 without shm" in text
    assert "slowest link: pp1 1<->3 (a - b), gloo: 120.0 us at 2 KiB, 1,049 MB/s at 1 MiB" in text
    assert "slowest group: tp1 2,3 (b), shm: 7.0 us at 1 KiB" in text
    assert "one token of /models/tiny through all stages: 1 hop of 2 KiB and 16 all-reduces of 1 KiB" in text
    assert "    cpupp         216.0 us (120.0 us hops, 96.0 us all-reduces)" in text
    assert "! hop pp0 64 MiB left out: too long" in text
    assert any(line.split()[:2] == ["vllm_generic", "█" * 40] for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 120


def test_the_data() -> None:
    data = bench_data(square(), result(*measured()))
    assert len(data["results"]) == len(measured())
    assert list(data["results"][0]) == [
        "op",
        "group",
        "ranks",
        "bytes",
        "path",
        "median_us",
        "p10_us",
        "p90_us",
        "runs",
    ]
    assert data["results"][0]["ranks"] == [0, 2]
    assert data["slowest"][HOP]["ranks"] == [1, 3]
    assert data["costs"][0] == {"path": "cpupp", "hops_us": 120, "all_reduces_us": 96, "total_us": 216}


def test_texts_of_sizes_and_times() -> None:
    assert [size_text(n) for n in (2304, 1152, 16384, 64 << 20, 1024)] == [
        "2,304 B",
        "1,152 B",
        "16 KiB",
        "64 MiB",
        "1 KiB",
    ]
    assert [time_text(us) for us in (4.94, 999.9, 1520)] == ["4.9 us", "999.9 us", "1.52 ms"]
