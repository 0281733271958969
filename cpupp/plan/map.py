"""The map of a plan: rows of host boxes with their stages and ranks, and what runs between them. Pure; no drawing.

Hosts of one row share stages (a TP group spans them), so every hop leads to its own row or to the next. Neighbours
that differ in names and numbers alone are folded into one box.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cpupp.plan.backend import GroupPlan
from cpupp.plan.plan import Plan, RankPlan

MIN_FOLD = 3
"""Neighbours that are alike are folded from this number on, where a map has more than MAX_PLAIN boxes."""
MAX_PLAIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MapLink:
    """A bundle of links of one transport between two boxes, or inside one.

    label: what it is (`stage 0 -> 1`, `tp0`); pairs: global ranks of each link; hop: whether it goes from stage to
    stage, one way, or is an all-reduce, both ways.
    """

    label: str
    transport: str
    pairs: tuple[tuple[int, int], ...]
    hop: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MapStage:
    """The part of one stage in a box: its number, layers [first, after last) or None, and its ranks there.

    group: its TP group's transport there, or empty; onward: the transport to the next stage in the same box, or empty.
    """

    stage: int
    layers: tuple[int, int] | None
    ranks: tuple[RankPlan, ...]
    group: str
    onward: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MapBox:
    """One host, or several in a row that are alike: hosts has more than one name then, and stages are the first's.

    address: `10.0.0.1 eth0`; same_machine: other entries that share its memory; head: serves the API; between: links
    from one of the folded hosts to the next.
    """

    hosts: tuple[str, ...]
    address: str
    same_machine: tuple[str, ...]
    head: bool
    stages: tuple[MapStage, ...]
    last_stages: tuple[MapStage, ...]
    between: tuple[MapLink, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRow:
    """Boxes side by side. beside: links from each box to the next of the row; down: links to the next row."""

    boxes: tuple[MapBox, ...]
    beside: tuple[tuple[MapLink, ...], ...]
    down: tuple[MapLink, ...]


def make_map(plan: Plan) -> tuple[MapRow, ...]:
    """Lay a plan out in rows, first stage first."""
    rows = _rows(plan)
    links = _links(plan)
    home = {rank.rank: rank.host for rank in plan.ranks}
    drawn = []
    for number, names in enumerate(rows):
        after = set(rows[number + 1]) if number + 1 < len(rows) else set()
        boxes = tuple(_box(plan, name, links, home) for name in names)
        beside = tuple(_between(links, home, {a}, {b}) for a, b in pairwise(names))
        drawn.append(MapRow(boxes=boxes, beside=beside, down=_between(links, home, set(names), after)))
    return _folded(drawn)


def _rows(plan: Plan) -> list[list[str]]:
    """Hosts in rank order; those that share a stage with the host before stand in its row."""
    stages: dict[str, set[int]] = {}
    for rank in plan.ranks:
        stages.setdefault(rank.host, set()).add(rank.stage)
    rows: list[list[str]] = []
    last: set[int] = set()
    for host, here in stages.items():
        if here & last:
            rows[-1].append(host)
        else:
            rows.append([host])
        last = here
    return rows


def _links(plan: Plan) -> list[MapLink]:
    """Every hop between neighbouring stages and every pair of a TP group, each alone."""
    found = []
    for group in plan.groups:
        for link in group.links:
            if group.kind == "tp" and link.src < link.dst:
                found.append(_link(group.name, link.transport, link.src, link.dst, hop=False))
            elif group.kind == "pp" and _is_hop(group, link.src, link.dst):
                stage = group.ranks.index(link.src)
                found.append(_link(f"stage {stage} -> {stage + 1}", link.transport, link.src, link.dst, hop=True))
    return found


def _link(label: str, transport: str, src: int, dst: int, *, hop: bool) -> MapLink:
    return MapLink(label=label, transport=transport, pairs=((src, dst),), hop=hop)


def _is_hop(group: GroupPlan, src: int, dst: int) -> bool:
    return group.ranks.index(dst) == group.ranks.index(src) + 1


def _between(links: Sequence[MapLink], home: dict[int, str], here: set[str], there: set[str]) -> tuple[MapLink, ...]:
    return _bundled(link for link in links for src, dst in link.pairs if home[src] in here and home[dst] in there)


def _bundled(links: Iterable[MapLink]) -> tuple[MapLink, ...]:
    bundles: dict[tuple[str, str, bool], list[tuple[int, int]]] = {}
    for link in links:
        bundles.setdefault((link.label, link.transport, link.hop), []).extend(link.pairs)
    return tuple(
        MapLink(label=label, transport=transport, pairs=tuple(pairs), hop=hop)
        for (label, transport, hop), pairs in bundles.items()
    )


def _box(plan: Plan, name: str, links: Sequence[MapLink], home: dict[int, str]) -> MapBox:
    endpoint = next(node.endpoint for node in plan.nodes if node.host == name)
    machine = next((m for m in plan.machines if name in m), (name,))
    inside = _between(links, home, {name}, {name})
    by_stage: dict[int, list[RankPlan]] = {}
    for rank in plan.ranks:
        if rank.host == name:
            by_stage.setdefault(rank.stage, []).append(rank)
    stages = tuple(
        MapStage(
            stage=stage,
            layers=ranks[0].layers,
            ranks=tuple(ranks),
            group=next((link.transport for link in inside if link.label == f"tp{stage}" and not link.hop), ""),
            onward=next((link.transport for link in inside if link.label == f"stage {stage} -> {stage + 1}"), ""),
        )
        for stage, ranks in by_stage.items()
    )
    return MapBox(
        hosts=(name,),
        address=f"{endpoint.address} {endpoint.interface}".strip(),
        same_machine=tuple(other for other in machine if other != name),
        head=name == plan.head,
        stages=stages,
        last_stages=stages,
        between=(),
    )


def _folded(rows: Sequence[MapRow]) -> tuple[MapRow, ...]:
    if sum(len(row.boxes) for row in rows) <= MAX_PLAIN:
        return tuple(rows)
    runs: list[list[MapRow]] = []
    for row in (_fold_row(row) for row in rows):
        if runs and _can_follow(runs[-1][-1], row):
            runs[-1].append(row)
        else:
            runs.append([row])
    return tuple(row for run in runs for row in (_fold_run(run) if len(run) >= MIN_FOLD else run))


def _can_follow(before: MapRow, row: MapRow) -> bool:
    """Whether both are one box, alike, and the way between them is that of a chain."""
    if len(before.boxes) != 1 or len(row.boxes) != 1 or row.boxes[0].head or before.boxes[0].head:
        return False
    return _shape(before.boxes[0]) == _shape(row.boxes[0])


def _fold_run(run: Sequence[MapRow]) -> list[MapRow]:
    boxes = [row.boxes[0] for row in run]
    between = tuple(link for row in run[:-1] for link in row.down)
    if len({link.transport for link in between}) > 1:
        return list(run)
    return [MapRow(boxes=(_fold(boxes, between),), beside=(), down=run[-1].down)]


def _fold_row(row: MapRow) -> MapRow:
    """The same inside a row: a TP group over many hosts."""
    first, rest = row.boxes[:1], row.boxes[1:]
    alike = len({_shape(box) for box in rest}) == 1
    if len(rest) < MIN_FOLD or not alike or len({link.transport for links in row.beside for link in links}) > 1:
        return row
    between = tuple(link for links in row.beside[1:] for link in links)
    return MapRow(boxes=(*first, _fold(rest, between)), beside=row.beside[:1], down=row.down)


def _fold(boxes: Sequence[MapBox], between: tuple[MapLink, ...]) -> MapBox:
    return MapBox(
        hosts=tuple(host for box in boxes for host in box.hosts),
        address=boxes[0].address,
        same_machine=(),
        head=False,
        stages=boxes[0].stages,
        last_stages=boxes[-1].last_stages,
        between=between,
    )


def _shape(box: MapBox) -> object:
    """What two boxes that are alike have in common."""
    stages = tuple(
        (
            None if part.layers is None else part.layers[1] - part.layers[0],
            part.group,
            part.onward,
            tuple((rank.cores, rank.weights, rank.kv) for rank in part.ranks),
        )
        for part in box.stages
    )
    return len(box.hosts), bool(box.same_machine), stages
