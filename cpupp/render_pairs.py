"""The ways between hosts as a matrix (round trip and bandwidth), or as a list of the worst where there are many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpupp.plan.pairs import PairFacts
from cpupp.render import Page

LARGEST_MATRIX = 16
LARGEST_JOINT = 6
"""Hosts up to which one cell has both figures; beyond, each has a matrix of its own."""
NUM_WORST = 16


def add_pairs(page: Page, pairs: Sequence[PairFacts]) -> None:
    """Add what was measured; nothing when there are no pairs."""
    if not pairs:
        return
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.src, pair.dst)))
    if len(names) <= LARGEST_JOINT:
        page.heading("Network, from row to column: round trip in ms / Gbit/s of one stream")
        _matrix(page, names, pairs, lambda pair: f"{_latency(pair)} / {_rate(pair)}")
    elif len(names) <= LARGEST_MATRIX:
        page.heading("Network, from row to column: round trip in ms")
        _matrix(page, names, pairs, _latency)
        page.heading("Network, from row to column: Gbit/s of one stream")
        _matrix(page, names, pairs, _rate)
    else:
        page.heading(f"Network, the worst of {len(pairs)} ways: round trip in ms, Gbit/s of one stream")
        worst = sorted(pairs, key=lambda pair: (_closed(pair) == "", pair.bytes_per_s or 0.0))[:NUM_WORST]
        rows = [(f"{pair.src} -> {pair.dst}", _closed(pair) or _latency(pair), _rate(pair)) for pair in worst]
        page.table(("way", "ms", "Gbit/s"), rows)


def _matrix(page: Page, names: Sequence[str], pairs: Sequence[PairFacts], cell: Callable[[PairFacts], str]) -> None:
    ways = {(pair.src, pair.dst): pair for pair in pairs}
    heads = list(names) if len(names) <= LARGEST_JOINT else [str(number) for number in range(1, len(names) + 1)]
    rows = []
    for head, src in zip(heads, names, strict=True):
        label = src if head == src else f"{head} {src}"
        found = [ways.get((src, dst)) for dst in names]
        rows.append((label, *("-" if pair is None else _closed(pair) or cell(pair) for pair in found)))
    page.table(("", *heads), rows)


def _closed(pair: PairFacts) -> str:
    """How the way is closed, empty when it is open."""
    port = pair.blocked("high")
    return port.state if port is not None else ""


def _latency(pair: PairFacts) -> str:
    return "?" if pair.latency_s is None else f"{pair.latency_s * 1000:.2f}"


def _rate(pair: PairFacts) -> str:
    if pair.bytes_per_s is None:
        return "?"
    rate = pair.bytes_per_s * 8 / 1e9
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 1 else f"{rate:.2f}"
