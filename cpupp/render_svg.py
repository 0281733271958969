"""The map of a plan as an SVG for a wiki: plain rectangles, lines and text; no script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from cpupp.plan.map import MapBox, MapLink, MapRow, make_map
from cpupp.plan.plan import Plan
from cpupp.render import visible
from cpupp.render_map import (
    between_lines,
    box_title,
    layers_text,
    pairs_text,
    rank_text,
    stage_title,
)
from cpupp.render_sizes import count

EDGE, GAP, DOWN = 28, 150, 62
"""Margins, and the room between boxes of a row and between rows, for the links and their labels."""
LINE, PAD, HEAD = 20, 14, 34
"""Height of a line of text, room inside a box's walls, height of a box's title."""
LETTER = 7.3
"""Width of a character of the fixed font at 12 px, with a reserve for fonts wider than DejaVu Sans Mono."""
LONGEST = 80
_INK, _FAINT, _PAPER = "#1f2933", "#616e7c", "#ffffff"
_COLOUR = {"shm": "#1b7f3b", "gloo": "#1769aa"}
_TINT = ("#eef4fb", "#f3f8ee", "#fdf6ec", "#f6f0fa")
_SIGNS = {"to": "→"}
_MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"
_SANS = "DejaVu Sans, Helvetica, Arial, sans-serif"


def map_svg(plan: Plan) -> str:
    """The whole file. Names are escaped, and secrets hidden as they are everywhere."""
    rows = make_map(plan)
    wide = max(_box_width(box) for row in rows for box in row.boxes)
    labels = max((_text_width(_down_text(link)) for row in rows for link in row.down), default=0.0)
    across = max(_row_width(row, wide) for row in rows)
    width = max(across, 2 * (labels + 14), _text_width(_subtitle(plan)), 520) + 2 * EDGE
    parts: list[str] = []
    top = 96.0
    for row, below in zip(rows, [*rows[1:], None], strict=True):
        height = max(_box_height(box) for box in row.boxes)
        parts += _row(row, (width - _row_width(row, wide)) / 2, top, wide, height)
        top += height
        if row.down and below is not None:
            parts += _down(row.down, _ways(row, below, width, wide), top)
            top += DOWN + LINE * (len(row.down) - 1)
    parts += _legend(EDGE, top + 40)
    return _file(plan, width, top + 64, parts)


def _ways(row: MapRow, below: MapRow, width: float, wide: float) -> list[tuple[float, float]]:
    """Where the arrows from one row to the next begin and end, from the middle of a box to that of another."""
    start, end = _middles(row, width, wide), _middles(below, width, wide)
    pairs = [pair for link in row.down for pair in link.pairs]
    found = {(start.get(src, width / 2), end.get(dst, width / 2)) for src, dst in pairs}
    return sorted(found)


def _middles(row: MapRow, width: float, wide: float) -> dict[int, float]:
    """Rank -> the middle of its box; ranks in the midst of folded hosts are left out."""
    left = (width - _row_width(row, wide)) / 2
    return {
        rank.rank: left + number * (wide + GAP) + wide / 2
        for number, box in enumerate(row.boxes)
        for part in (*box.stages, *box.last_stages)
        for rank in part.ranks
    }


def _file(plan: Plan, width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    title = _plain(f"{plan.name}: pipeline {plan.pipeline} x tensor {plan.tensor}")
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{title}</title>",
        f'<rect width="100%" height="100%" fill="{_PAPER}"/>',
        _text(EDGE, 40, f"cluster {plan.name}", size=20, bold=True, font=_SANS),
        _text(EDGE, 64, _subtitle(plan), colour=_FAINT, size=13, font=_SANS),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _subtitle(plan: Plan) -> str:
    ranks, hosts = count(len(plan.ranks), "rank"), count(len(plan.hosts), "host")
    return f"{_short(plan.model)}: pipeline {plan.pipeline} x tensor {plan.tensor}, {ranks} on {hosts}"


def _row_width(row: MapRow, wide: float) -> float:
    return wide * len(row.boxes) + GAP * (len(row.boxes) - 1)


def _lines(box: MapBox) -> Iterator[tuple[str, str]]:
    """What stands in a box, line by line: the kind of line, and its text."""
    for part, last in zip(box.stages, box.last_stages, strict=True):
        number = len(box.hosts)
        yield "stage", stage_title(part, last, number) + layers_text(part, last, number)
        for rank, end in zip(part.ranks, last.ranks, strict=True):
            yield "rank", rank_text(rank, end, number)
        if part.group:
            yield part.group, f"{part.group} between its {count(len(part.ranks), 'rank')}"
        if part.onward:
            yield part.onward, f"↓ {part.onward} to stage {part.stage + 1}"
    for link in between_lines(box.between):
        yield link.transport, f"↓ {link.transport} from each to the next"


def _box_width(box: MapBox) -> float:
    title, notes = box_title(box, "…")
    longest = max(_text_width(_short(text)) + _shift(kind) for kind, text in _lines(box))
    return max(longest, _text_width(_short(title)) * 1.25 + _text_width(_short(notes)) + 24, 240) + 2 * PAD


def _shift(kind: str) -> float:
    """How far a line is set in."""
    return 0 if kind == "stage" else 12


def _box_height(box: MapBox) -> float:
    return HEAD + LINE * sum(1 for _ in _lines(box)) + PAD


def _row(row: MapRow, left: float, top: float, width: float, height: float) -> Iterator[str]:
    for number, box in enumerate(row.boxes):
        yield from _box(box, left, top, width, height)
        if number < len(row.beside):
            yield from _beside(row.beside[number], left + width, top + height / 2)
        left += width + GAP


def _box(box: MapBox, left: float, top: float, width: float, height: float) -> Iterator[str]:
    title, notes = box_title(box, "…")
    for shift in (10, 5) if len(box.hosts) > 1 else ():
        yield _rect(left + shift, top + shift, width, height, _PAPER)
    yield _rect(left, top, width, height, _TINT[box.stages[0].stage % len(_TINT)] if len(box.hosts) == 1 else "#f5f7fa")
    yield _text(left + PAD, top + 23, _short(title), size=15, bold=True, full=title)
    yield _text(left + width - PAD, top + 23, _short(notes), colour=_FAINT, anchor="end", full=notes)
    y = top + HEAD + 12
    for kind, text in _lines(box):
        colour = _COLOUR.get(kind, _INK)
        yield _text(left + PAD + _shift(kind), y, _short(text), colour=colour, bold=kind == "stage", full=text)
        y += LINE


def _beside(links: Sequence[MapLink], left: float, middle: float) -> Iterator[str]:
    """Links to the box at the right, each with its label above."""
    y = middle - (len(links) - 1) * LINE
    for link in links:
        colour = _COLOUR[link.transport]
        yield _line(left + 6, y, left + GAP - 6, y, link.transport)
        yield _arrow(left + GAP - 6, y, "right", colour)
        if not link.hop:
            yield _arrow(left + 6, y, "left", colour)
        label = link.label.replace(" -> ", "→")
        yield _text(left + GAP / 2, y - 6, f"{link.transport} {label}", colour=colour, anchor="middle")
        y += 2 * LINE


def _down(links: Sequence[MapLink], ways: Sequence[tuple[float, float]], top: float) -> Iterator[str]:
    """Arrows to the row below, and a label for each link beside the first of them."""
    bottom = top + DOWN + LINE * (len(links) - 1) - 4
    transport = links[0].transport if len({link.transport for link in links}) == 1 else "gloo"
    for start, end in ways:
        yield _line(start, top + 14, end, bottom, transport)
        yield _arrow(end, bottom, "down", _COLOUR[transport])
    y = (top + bottom) / 2 - LINE * (len(links) - 1) / 2 + 6
    for link in links:
        yield _text(max(ways[0]) + 14, y, _down_text(link), colour=_COLOUR[link.transport])
        y += LINE


def _down_text(link: MapLink) -> str:
    return f"{link.transport}  {link.label.replace('->', '→')}  (ranks {pairs_text(link, _SIGNS)})"


def _legend(left: float, y: float) -> Iterator[str]:
    for number, (transport, words) in enumerate((("shm", "shared memory"), ("gloo", "network"))):
        x = left + 190 * number
        yield _line(x, y - 4, x + 34, y - 4, transport)
        yield _text(x + 42, y, f"{transport}: {words}", colour=_COLOUR[transport])


def _rect(left: float, top: float, width: float, height: float, fill: str) -> str:
    place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="8" fill="{fill}" stroke="#9aa5b1" stroke-width="1.2"/>'


def _line(x1: float, y1: float, x2: float, y2: float, transport: str) -> str:
    dashes = ' stroke-dasharray="7 4"' if transport == "gloo" else ""
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{_COLOUR[transport]}" stroke-width="2"{dashes}/>'


def _arrow(x: float, y: float, way: str, colour: str) -> str:
    """A head whose tip is here."""
    back = {"down": ((-6, -10), (6, -10)), "right": ((-10, -6), (-10, 6)), "left": ((10, -6), (10, 6))}[way]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in ((0, 0), *back))
    return f'<polygon points="{points}" fill="{colour}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    colour: str = _INK,
    size: int = 12,
    bold: bool = False,
    anchor: str = "start",
    font: str = _MONO,
    full: str = "",
) -> str:
    """One line of text; full: what it was before it was cut, shown by browsers under the pointer."""
    weight = ' font-weight="bold"' if bold else ""
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    hint = f"<title>{_plain(full)}</title>" if full and full != text else ""
    style = f'font-family="{font}" font-size="{size}"{weight} fill="{colour}" xml:space="preserve"'
    return f"<text {at} {style}>{hint}{_plain(text)}</text>"


def _plain(text: str) -> str:
    return escape(visible(text), quote=True)


def _short(text: str) -> str:
    """The text with its middle left out where it is too long for a box."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]}…{text[-(LONGEST // 2 - 1) :]}"


def _text_width(text: str) -> float:
    return len(text) * LETTER
