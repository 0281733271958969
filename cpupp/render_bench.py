"""`cpupp bench comm` as text: progress, the table, bars, what a token pays, the slowest link; and as JSON values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from cpupp.launch.bench_comm import BenchResult
from cpupp.plan.bench_comm import BenchRow, TokenCost, bench_rows, slowest, token_bytes, token_costs
from cpupp.plan.bench_order import ALL_REDUCE, HOP
from cpupp.plan.plan import Plan
from cpupp.printer import Printer
from cpupp.render import WIDTH, Page, page_width, visible, write
from cpupp.render_sizes import count

BAR = 40
_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_NAMES = {
    "cpupp": "this communicator, as `engine.communicator: links` runs it",
    "vllm_generic": "the installed vLLM's own generic path",
    "gloo": "one plain gloo send and receive (or all-reduce)",
    "tcp": "a raw TCP socket",
    "shm": "vLLM's bare SHM operation",
}
_STYLES = {"cpupp": "green", "vllm_generic": "red"}


class BenchView:
    """Progress on stderr. A reader that pauses holds up nothing."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._printer = Printer(lambda lines: write(stream, "".join(f"{text}\n" for text, _ in lines)))

    def tell(self, text: str) -> None:
        """Show one line."""
        self._printer.put([(visible(text), "")])

    def close(self) -> None:
        """Print what waits."""
        self._printer.close()


def bench_page(plan: Plan, result: BenchResult, width: int = WIDTH) -> Page:
    """Lay out everything that was measured."""
    rows = bench_rows(result.times)
    page = Page(width)
    page.line(
        f"cluster {plan.name}: {count(len(rows), 'row')}, microseconds one way (hop) or in all (all_reduce)", "bold"
    )
    _table(page, plan, rows)
    for path in dict.fromkeys(row.path for row in rows):
        page.prose(_NAMES[path], hang=path.ljust(14), style="dim")
    for text in _left_out(result):
        page.prose(text, hang="! ", style="yellow")
    for op in (HOP, ALL_REDUCE):
        worst = slowest(rows, op)
        if worst is not None:
            _bars(page, plan, [r for r in rows if (r.op, r.group, r.ranks) == (op, worst.group, worst.ranks)])
    _costs(page, plan, rows)
    _slowest(page, plan, rows)
    return page


def _table(page: Page, plan: Plan, rows: Sequence[BenchRow]) -> None:
    page.heading("Times")
    gloo = {(r.op, r.group, r.ranks, r.bytes): r.median_us for r in rows if r.path == "gloo"}
    cells = []
    for row in rows:
        base = gloo.get((row.op, row.group, row.ranks, row.bytes))
        figures = [f"{value:,.1f}".rjust(10) for value in (row.median_us, row.p10_us, row.p90_us)]
        ratio = f"{row.median_us / base:.2f}".rjust(6) if base else ""
        place = (row.op, row.group, _place(plan, row), size_text(row.bytes))
        cells.append((*place, row.path, *figures, str(row.runs).rjust(4), ratio))
    page.table(
        ("op", "group", "ranks", "bytes", "path", "    median", "       p10", "       p90", "runs", "x gloo"), cells
    )


def _place(plan: Plan, row: BenchRow) -> str:
    hosts = list(dict.fromkeys(plan.ranks[rank].host for rank in row.ranks))
    ranks = "<->".join(map(str, row.ranks)) if row.op == HOP else ",".join(map(str, row.ranks))
    return f"{ranks} ({' - '.join(hosts)})"


def _bars(page: Page, plan: Plan, rows: Sequence[BenchRow]) -> None:
    first = rows[0]
    page.heading(f"{first.op} {first.group} {_place(plan, first)}: median, shorter is better")
    for size in dict.fromkeys(row.bytes for row in rows):
        block = [row for row in rows if row.bytes == size]
        longest = max(row.median_us for row in block) or 1.0
        for index, row in enumerate(block):
            label = size_text(size) if index == 0 else ""
            bar = "█" * max(1, round(BAR * row.median_us / longest))
            text = f"  {label:>9}  {row.path:<12}  {bar} {time_text(row.median_us)}"
            page.line(text, _STYLES.get(row.path, ""))


def _left_out(result: BenchResult) -> list[str]:
    notes = [t for t in result.times if not t.nanoseconds and t.note]
    sizes = {t: f" {size_text(t.bytes)}" if t.bytes else "" for t in notes}  # no bytes: of all sizes
    return list(dict.fromkeys(f"{t.op} {t.group}{sizes[t]} {t.note}" for t in notes))


def _costs(page: Page, plan: Plan, rows: Sequence[BenchRow]) -> None:
    page.heading("What a token pays")
    token, costs = token_bytes(plan), token_costs(plan, rows)
    if token is None:
        page.prose("unknown: the model could not be read on any host")
        return
    parts = []
    if token.num_hops:
        parts.append(f"{count(token.num_hops, 'hop')} of {size_text(token.hop)}")
    if token.num_all_reduces:
        parts.append(f"{count(token.num_all_reduces, 'all-reduce')} of {size_text(token.all_reduce)}")
    page.prose(f"one token of {plan.served_name} through all stages: {' and '.join(parts)}")
    for cost in costs:
        page.line(f"    {cost.path:<12}  {time_text(cost.total_us)}{_split(cost)}", _STYLES.get(cost.path, ""))


def _split(cost: TokenCost) -> str:
    if not cost.hops_us or not cost.all_reduces_us:
        return ""
    return f" ({time_text(cost.hops_us)} hops, {time_text(cost.all_reduces_us)} all-reduces)"


def _slowest(page: Page, plan: Plan, rows: Sequence[BenchRow]) -> None:
    for op, name in ((HOP, "slowest link"), (ALL_REDUCE, "slowest group")):
        row = slowest(rows, op)
        if row is None:
            continue
        large = max((r for r in rows if (r.op, r.ranks, r.path) == (op, row.ranks, row.path)), key=lambda r: r.bytes)
        rate = large.bytes / large.median_us if large.median_us else 0.0  # bytes a microsecond are MB/s
        speed = f"{time_text(row.median_us)} at {size_text(row.bytes)}, {rate:,.0f} MB/s at {size_text(large.bytes)}"
        page.line()
        page.line(f"{name}: {row.group} {_place(plan, row)}, {_transport(plan, row)}: {speed}", "bold")


def _transport(plan: Plan, row: BenchRow) -> str:
    group = next(g for g in plan.groups if g.name == row.group)
    if row.op != HOP:
        return group.backend
    return next(link.transport for link in group.links if (link.src, link.dst) == row.ranks)


def bench_data(plan: Plan, result: BenchResult) -> dict[str, Any]:
    """The result as JSON values."""
    rows = bench_rows(result.times)
    token = token_bytes(plan)
    worst = {op: slowest(rows, op) for op in (HOP, ALL_REDUCE)}
    return {
        "outcome": result.run.outcome,
        "results": [_row_data(row) for row in rows],
        "left_out": _left_out(result),
        "token": None if token is None else asdict(token),
        "costs": [{**asdict(cost), "total_us": round(cost.total_us, 1)} for cost in token_costs(plan, rows)],
        "slowest": {op: None if row is None else _row_data(row) for op, row in worst.items()},
        "folder": str(result.run.folder),
    }


def _row_data(row: BenchRow) -> dict[str, Any]:
    return {**asdict(row), "ranks": list(row.ranks)}


def size_text(size: int) -> str:
    """`16 KiB`; `2,304 B` for what is no whole number of KiB."""
    unit, name = next((unit, name) for unit, name in _UNITS if size % unit == 0 and size >= unit)
    return f"{size // unit:,} {name}"


def time_text(microseconds: float) -> str:
    """`83.1 us`, `1.52 ms`."""
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def show_bench(plan: Plan, result: BenchResult) -> None:
    """Write the page to stdout."""
    bench_page(plan, result, page_width(sys.stdout)).show(sys.stdout)
