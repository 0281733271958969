"""The map of a plan as text: a box for each host, its stages and ranks inside, links with their transport between.

In line-drawing characters where the encoding has them, else in plain ASCII.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from cpupp.plan.map import MapBox, MapLink, MapRow, MapStage, make_map
from cpupp.plan.plan import Plan, RankPlan
from cpupp.render import Page
from cpupp.render_sizes import count, gib, ranges

WIDTH = 76
MAX_PAIRS = 3
_NAMES = ("top_left", "top_right", "bottom_left", "bottom_right", "across", "wall", "down", "both", "ends", "to")
_LINES = dict(zip(_NAMES, "╭╮╰╯─│▼⇕…→", strict=True))
_ASCII = dict(zip(_NAMES, ("+", "+", "+", "+", "-", "|", "v", "*", "..", "->"), strict=True))
_STYLE = {"shm": "green", "gloo": "cyan"}

Part = tuple[str, str]


def can_draw(stream: TextIO) -> bool:
    """Whether the stream's encoding has the characters of the map."""
    try:
        "".join(_LINES.values()).encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def add_map(page: Page, plan: Plan, *, lines: bool = True) -> None:
    """Add the map. lines: whether line-drawing characters may be used."""
    page.heading("Map")
    drawing = _Drawing(page, _LINES if lines else _ASCII)
    for row in make_map(plan):
        drawing.row(row)


class _Drawing:
    """Draws rows onto a page, all boxes of one width."""

    def __init__(self, page: Page, signs: Mapping[str, str]) -> None:
        self.page = page
        self.signs = signs
        self.width = min(WIDTH, max(38, page.width - 2))

    def row(self, row: MapRow) -> None:
        """The boxes of a row below each other, and the links from each."""
        for number, box in enumerate(row.boxes):
            self.box(box)
            if number < len(row.beside):
                for link in row.beside[number]:
                    self.link(link)
        for link in row.down:
            self.link(link)

    def box(self, box: MapBox) -> None:
        """A box with its title on the upper edge."""
        signs = self.signs
        title, notes = box_title(box, signs["ends"])
        title = self.cut(title, self.width - 6)
        notes = self.cut(notes, self.width - len(title) - 9)
        across = signs["across"]
        fill = across * max(1, self.width - len(title) - len(notes) - 8)
        start, end = f"  {signs['top_left']}{across} ", f" {across}{signs['top_right']}"
        self.page.parts((start, ""), (title, "bold"), (f" {fill} ", ""), (notes, "dim"), (end, ""))
        for part, last in zip(box.stages, box.last_stages, strict=True):
            self.stage(box, part, last)
        for link in between_lines(box.between):
            self.inside([("  from each to the next: ", "dim"), (link.transport, _STYLE[link.transport])])
        self.page.parts((f"  {signs['bottom_left']}{across * (self.width - 2)}{signs['bottom_right']}", ""))

    def stage(self, box: MapBox, part: MapStage, last: MapStage) -> None:
        """A stage with its ranks; last: the same of the last of several folded hosts."""
        words: list[Part] = [(stage_title(part, last, len(box.hosts)), "bold")]
        words.append((layers_text(part, last, len(box.hosts)), ""))
        if part.group:
            words += [(f"   {count(len(part.ranks), 'rank')} by ", "dim"), (part.group, _STYLE[part.group])]
        self.inside(words)
        for rank, end in zip(part.ranks, last.ranks, strict=True):
            self.inside([(f"  {rank_text(rank, end, len(box.hosts))}", "")])
        if part.onward:
            self.inside([(f"  {self.signs['down']} ", ""), (part.onward, _STYLE[part.onward])])

    def inside(self, parts: Sequence[Part]) -> None:
        """One line between the box's walls; what does not fit is cut."""
        room = self.width - 4
        kept: list[Part] = []
        for text, style in parts:
            kept.append((self.cut(text, room), style))
            room -= len(kept[-1][0])
        wall = self.signs["wall"]
        self.page.parts((f"  {wall} ", ""), *kept, (" " * room, ""), (f" {wall}", ""))

    def cut(self, text: str, room: int) -> str:
        """The text, or its beginning where it is longer than the room for it."""
        if len(text) <= room:
            return text
        ends = self.signs["ends"]
        return (text[: max(0, room - len(ends))] + ends)[: max(0, room)]

    def link(self, link: MapLink) -> None:
        """A link to the next box or row."""
        sign = self.signs["down" if link.hop else "both"]
        label = link.label.replace("->", self.signs["to"])
        self.page.parts(
            (f"       {sign} ", ""),
            (link.transport, _STYLE[link.transport]),
            (f"  {label}", ""),
            (f"  ranks {pairs_text(link, self.signs)}", "dim"),
        )


def box_title(box: MapBox, ends: str) -> tuple[str, str]:
    """What stands on a box's upper edge: its hosts, and where and what they are."""
    if len(box.hosts) > 1:
        return f"{box.hosts[0]} {ends} {box.hosts[-1]}", f"{len(box.hosts)} hosts alike"
    notes = [box.address] if box.address else []
    if box.same_machine:
        others = box.same_machine if len(box.same_machine) <= 2 else (*box.same_machine[:1], "others")
        notes.append(f"one machine with {' and '.join(others)}")
    if box.head:
        notes.append("head")
    return box.hosts[0], ", ".join(notes)


def stage_title(part: MapStage, last: MapStage, num_hosts: int) -> str:
    """`stage 3`, or `stages 1 to 14` of folded hosts."""
    if num_hosts == 1 or part.stage == last.stage:
        return f"stage {part.stage}"
    return f"stages {part.stage} to {last.stage}"


def layers_text(part: MapStage, last: MapStage, num_hosts: int) -> str:
    """`, layers 0-15 (16)`; of folded hosts the whole range and the number of each."""
    if part.layers is None or last.layers is None:
        return ""
    number = part.layers[1] - part.layers[0]
    each = " each" if num_hosts > 1 and part.stage != last.stage else ""
    first, end = part.layers[0], last.layers[1] - 1
    return f", layer {first}" if first == end else f", layers {first}-{end} ({number}{each})"


def rank_text(rank: RankPlan, end: RankPlan, num_hosts: int) -> str:
    """`rank 1  cores 0-14  9.65 GiB + 4 GiB KV`; end: the same rank of the last of several folded hosts."""
    who = f"rank {rank.rank}" if rank.rank == end.rank else f"ranks {rank.rank} to {end.rank}"
    step = (end.rank - rank.rank) // max(1, num_hosts - 1)
    who += f" in steps of {step}" if step > 1 else ""
    parts = [who]
    if rank.cores:
        parts.append(f"cores {ranges(rank.cores)}")
    if rank.weights is not None:
        parts.append(f"weights {gib(rank.weights)}")
    parts.append(f"KV {gib(rank.kv)}")
    return "  ".join(parts)


def between_lines(links: Sequence[MapLink]) -> tuple[MapLink, ...]:
    """One link for each transport and kind."""
    return tuple({(link.transport, link.hop): link for link in links}.values())


def pairs_text(link: MapLink, signs: Mapping[str, str]) -> str:
    """`0 -> 1`, several of them, or the number of those that are left out."""
    sign = f" {signs['to']} " if link.hop else " + "
    shown = [f"{src}{sign}{dst}" for src, dst in link.pairs[:MAX_PAIRS]]
    more = len(link.pairs) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
