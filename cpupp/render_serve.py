"""`cpupp bench serve` as text: the table, bars, where a decode step goes, by hand beside it; and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpupp.plan.bench_serve import BY_HAND, CPUPP, VLLM, Percentiles, Ratio, ServeOrder, ServeRow, Start
from cpupp.render import WIDTH, Page
from cpupp.render_bench import BAR
from cpupp.render_sizes import count
from cpupp.render_steps import step_data

_SIDES = {CPUPP: "cpupp", BY_HAND: "by hand"}
_STYLES = {CPUPP: "green", BY_HAND: "red"}
_NEVER = "figures of the two clients (plain, vllm) must never be compared with each other"
_COSTS = "`vllm bench serve` runs on the head and takes its time from the cores that the server needs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """What was measured. rows: of each side that was; starts, ratios: of `--against by-hand`, or of one launch."""

    name: str
    order: ServeOrder
    rows: Mapping[str, Sequence[ServeRow]]
    starts: Sequence[Start] = ()
    ratios: Sequence[Ratio] = ()

    def all_rows(self) -> list[ServeRow]:
        """The rows of both sides, ours first."""
        return [row for side in (CPUPP, BY_HAND) for row in self.rows.get(side, ())]


def serve_page(report: ServeReport, width: int = WIDTH) -> Page:
    """Lay out everything."""
    order = report.order
    page = Page(width)
    how = "" if order.client == VLLM or order.stream else ", without streaming"
    page.line(
        f"{report.name}: {order.prompt_tokens} tokens in, {order.output_tokens} out, client {order.client}{how}", "bold"
    )
    _table(page, report)
    for text in _notes(report):
        page.prose(text, hang="! ", style="yellow")
    _bars(page, report)
    _splits(page, report)
    _starts(page, report)
    _ratios(page, report)
    return page


def _table(page: Page, report: ServeReport) -> None:
    several = len([side for side in report.rows if report.rows[side]]) > 1
    cells, times = [], []
    for row in report.all_rows():
        far = f"{row.rate / row.roofline:.0%}" if row.roofline else ""
        which = (_SIDES[row.side] if several else "", str(row.concurrency))
        times.append((*which, *_three(row.ttft), *_three(row.tpot)))
        cells.append(
            (
                *which,
                f"{row.rate:,.1f}",
                "" if row.prefill_rate is None else f"{row.prefill_rate:,.0f}",
                "" if row.roofline is None else f"{row.roofline:,.0f}",
                far,
                str(row.failed or ""),
            )
        )
    first = ("server", "at a time")
    page.table((*first, "tokens/s", "prefill tokens/s", "roofline", "of it", "failed"), cells)
    if any(row.roofline for row in report.all_rows()):
        page.prose(
            "roofline: tokens/s that the measured memory bandwidth of the hosts allows for the bytes of weights and KV "
            "cache that a token needs; arithmetic and links are free there",
            style="dim",
        )
    if any(cell for row in times for cell in row[len(first) :]):
        page.heading("Until the first token (TTFT) and for each further one (TPOT), in ms")
        page.table((*first, "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99"), times)


def _three(values: Percentiles | None) -> tuple[str, str, str]:
    if values is None:
        return "", "", ""
    return f"{values.p50:,.1f}", f"{values.p90:,.1f}", f"{values.p99:,.1f}"


def _notes(report: ServeReport) -> list[str]:
    notes = [f"{_COSTS}; {_NEVER}" if report.order.client == VLLM else _NEVER]
    failed = sum(row.failed for row in report.all_rows())
    if failed:
        notes.append(f"{count(failed, 'request')} failed: the rates are of those that were answered")
    return notes


def _bars(page: Page, report: ServeReport) -> None:
    rows = sorted(report.all_rows(), key=lambda row: (row.concurrency, row.side != CPUPP))
    longest = max((row.rate for row in rows), default=0.0) or 1.0
    several = len({row.side for row in rows}) > 1
    page.heading("Output tokens per second by requests at a time")
    last = 0
    for row in rows:
        label = str(row.concurrency) if row.concurrency != last else ""
        last = row.concurrency
        side = f"{_SIDES[row.side]:<8}" if several else ""
        bar = "█" * max(1, round(BAR * row.rate / longest))
        page.line(f"  {label:>5}  {side}{bar} {row.rate:,.1f}", _STYLES[row.side])


def _splits(page: Page, report: ServeReport) -> None:
    cells = []
    alone = all(stage.place.rank == stage.place.stage for row in report.all_rows() for stage in row.stages)
    for row in report.all_rows():
        for number, stage in enumerate(row.stages):
            step = stage.step
            parts = (step.compute_ms, step.wire_ms, step.wait_ms, step.idle_ms)
            rank = "" if alone else str(stage.place.rank)
            cells.append(
                (
                    str(row.concurrency) if number == 0 else "",
                    "" if stage.place.stage is None else str(stage.place.stage),
                    rank,
                    stage.place.host,
                    f"{step.batch:.1f}",
                    _ms(step.step_ms),
                    *(f"{_ms(part)} {part / step.step_ms if step.step_ms else 0.0:3.0%}" for part in parts),
                )
            )
    if cells:
        page.heading("Where a decode step goes, in ms")
        header = ("at a time", "stage", "rank", "host", "batch", "step")
        page.table((*header, "compute", "wire", "waiting", "engine"), cells)
        page.prose(
            "waiting: for the stage before; engine: until the engine orders the next step, for the first stage the "
            "others' time too",
            style="dim",
        )


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _starts(page: Page, report: ServeReport) -> None:
    if not report.starts:
        return
    page.heading("Starts")
    for start in report.starts:
        text = "never" if start.ready_s is None else f"{start.ready_s:.1f} s"
        health = "" if start.healthy_s is None else f" (/health after {start.healthy_s:.1f} s)"
        page.line(f"  round {start.round + 1}  {_SIDES[start.side]:<8}  first answer: {text}{health}")
        if start.error:
            page.prose(start.error.splitlines()[0], indent="      ", style="yellow")


def _ratios(page: Page, report: ServeReport) -> None:
    if not report.ratios:
        return
    page.heading("Every turn's output tokens/s")
    for row in sorted(report.all_rows(), key=lambda row: (row.concurrency, row.side != CPUPP)):
        figures = " ".join(f"{rate:,.1f}" for rate in row.rates)
        page.line(f"  {row.concurrency:>5}  {_SIDES[row.side]:<8}  {figures}")
        if row.prefill_rates:
            figures = " ".join(f"{rate:,.0f}" for rate in row.prefill_rates)
            page.line(f"         prefill   {figures}", "dim")
    page.heading("Ratios of medians, cpupp to by hand")
    names = {
        "ready": "seconds until ready (lower is better)",
        "output": "output tokens/s",
        "prefill": "prefill tokens/s",
    }
    for ratio in report.ratios:
        where = f" at {ratio.concurrency}" if ratio.concurrency else ""
        page.line(
            f"  {ratio.ratio:5.2f}  {names[ratio.what]}{where}: {ratio.cpupp:,.1f} to {ratio.by_hand:,.1f}", "bold"
        )


def serve_data(report: ServeReport) -> dict[str, Any]:
    """The report as JSON values."""
    order = report.order
    return {
        "name": report.name,
        "client": order.client,
        "stream": order.stream or order.client == VLLM,
        "prompt_tokens": order.prompt_tokens,
        "output_tokens": order.output_tokens,
        "turns": order.turns,
        "waves": order.waves,
        "results": [_row_data(row) for row in report.all_rows()],
        "starts": [
            {
                "side": start.side,
                "round": start.round + 1,
                "ready_seconds": _rounded(start.ready_s),
                "healthy_seconds": _rounded(start.healthy_s),
                "error": start.error,
            }
            for start in report.starts
        ],
        "ratios": [
            {
                "what": ratio.what,
                "concurrency": ratio.concurrency or None,
                "cpupp": _rounded(ratio.cpupp),
                "by_hand": _rounded(ratio.by_hand),
                "ratio": _rounded(ratio.ratio),
            }
            for ratio in report.ratios
        ],
    }


def _row_data(row: ServeRow) -> dict[str, Any]:
    return {
        "side": row.side,
        "concurrency": row.concurrency,
        "requests": row.requests,
        "failed": row.failed,
        "output_tokens_per_second": _rounded(row.rate),
        "output_tokens_per_second_turns": [_rounded(rate) for rate in row.rates],
        "prefill_tokens_per_second": _rounded(row.prefill_rate),
        "prefill_tokens_per_second_turns": [_rounded(rate) for rate in row.prefill_rates],
        "ttft_ms": _percentiles(row.ttft),
        "tpot_ms": _percentiles(row.tpot),
        "roofline_tokens_per_second": _rounded(row.roofline),
        "roofline_share": _rounded(row.rate / row.roofline if row.roofline else None),
        "stages": [
            {"stage": s.place.stage, "rank": s.place.rank, "host": s.place.host, **(step_data(s.step) or {})}
            for s in row.stages
        ],
    }


def _percentiles(values: Percentiles | None) -> dict[str, Any] | None:
    return None if values is None else {name: round(value, 3) for name, value in asdict(values).items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
