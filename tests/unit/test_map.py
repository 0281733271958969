"""The map of a plan: golden texts, folding, plain ASCII, and what its SVG is made of."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cpupp.cli_files import new_path, svg_path, write_file
from cpupp.errors import CpuppError
from cpupp.plan.map import make_map
from cpupp.plan.plan import Plan, make_plan
from cpupp.rank.agent_mask import Mask
from cpupp.render import Page, hide
from cpupp.render_map import add_map, can_draw
from cpupp.render_svg import map_svg
from tests.unit.factory import LLAMA_TINY, cluster, cpus, machines, model_folder, one_machine

SVG = "{http://www.w3.org/2000/svg}"


def chain(number: int, slots: int = 1) -> Plan:
    """So many equal hosts in a pipeline."""
    names = [f"h{n}" for n in range(number)]
    model = model_folder({**LLAMA_TINY, "num_hidden_layers": 128})
    spec = cluster(*({"name": name, "slots": slots} for name in names), pipeline=number, tensor=slots)
    return make_plan(spec, machines(*names, model=model))


def mixed() -> Plan:
    """Two stages on a big host, then three small ones."""
    spec = cluster({"name": "big", "slots": 2}, "b", "c", "d", pipeline=5)
    return make_plan(spec, machines("big", "b", "c", "d", cpus=cpus(32, numa=2)))


def across() -> Plan:
    """TP groups over two hosts each."""
    return make_plan(cluster("a", "b", "c", "d", pipeline=2, tensor=2), machines("a", "b", "c", "d"))


PLANS: dict[str, Callable[[], Plan]] = {
    "one": lambda: make_plan(cluster({"name": "a", "slots": 2}, tensor=2), machines("a")),
    "pair": lambda: make_plan(cluster("a", "b", pipeline=2), machines("a", "b")),
    "here": lambda: make_plan(
        cluster({"name": "a", "local": True}, {"name": "b", "local": True}, pipeline=2),
        one_machine("a", "b", cpus=cpus(8)),
    ),
    "mixed": mixed,
    "across": across,
    "three-slots": lambda: make_plan(
        cluster({"name": "a", "slots": 3}, {"name": "b", "slots": 3}, pipeline=3, tensor=2), machines("a", "b")
    ),
    "sixteen": lambda: chain(16, slots=2),
    "sixty-four": lambda: chain(64),
    "offline": lambda: make_plan(cluster("a", "b", pipeline=2), {}),
}


def text(plan: Plan, *, width: int = 120, lines: bool = True) -> str:
    """The map alone."""
    page = Page(width)
    add_map(page, plan, lines=lines)
    return page.text()


@pytest.mark.parametrize("name", PLANS)
def test_map(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"maps/{name}.txt", text(PLANS[name]()))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("width", [40, 80])
def test_a_map_fits_its_page_with_straight_walls(name: str, width: int) -> None:
    drawn = text(PLANS[name](), width=width).splitlines()
    walls = [line for line in drawn if line.startswith(("  ╭", "  │", "  ╰"))]
    assert {len(line) for line in walls} == {min(width, 78)}
    assert max(map(len, drawn)) <= max(width, 60)


def test_without_line_drawing_it_is_plain_ascii() -> None:
    assert text(mixed(), lines=False).isascii()
    for encoding, able in (("utf-8", True), ("ascii", False), ("latin-1", False)):
        assert can_draw(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is able


@pytest.mark.parametrize(("number", "boxes"), [(1, 1), (2, 2), (4, 4), (16, 3), (64, 3)])
def test_many_equal_hosts_are_folded(number: int, boxes: int) -> None:
    drawn = [box for row in make_map(chain(number)) for box in row.boxes]
    assert len(drawn) == boxes
    assert sum(len(box.hosts) for box in drawn) == number


def test_an_odd_host_in_the_midst_is_never_folded_away() -> None:
    names = [f"h{n}" for n in range(12)]
    facts = machines(*names, model=model_folder({**LLAMA_TINY, "num_hidden_layers": 48}))
    odd = machines(*names, model=facts["h0"].model, cpus=cpus(3))["h6"]
    plan = make_plan(cluster(*names, pipeline=12, layers=[4] * 12), {**facts, "h6": odd})
    assert ("h6",) in [box.hosts for row in make_map(plan) for box in row.boxes]


def test_ranks_of_one_stage_stand_in_one_row() -> None:
    rows = make_map(across())
    assert [[box.hosts for box in row.boxes] for row in rows] == [[("a",), ("b",)], [("c",), ("d",)]]
    assert [(link.label, link.pairs) for link in rows[0].down] == [("stage 0 -> 1", ((0, 2), (1, 3)))]


@pytest.mark.parametrize("name", PLANS)
def test_a_picture_is_whole_and_nothing_sticks_out(name: str) -> None:
    plan = PLANS[name]()
    root = ElementTree.fromstring(map_svg(plan))
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "title", "rect", "line", "polygon", "text")
    }
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter(f"{SVG}text"):
        words = "".join(element.itertext()) if element.find(f"{SVG}title") is None else (element[0].tail or "")
        wide = len(words) * 0.61 * float(element.attrib["font-size"])
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[element.attrib["text-anchor"]]
        assert left >= 0, words
        assert left + wide <= width, words
        assert 0 < y < height
    shown = "".join(root.itertext())
    for rank in plan.ranks:
        if len(plan.hosts) <= 4:
            assert f"rank {rank.rank}" in shown


def test_names_in_a_picture_are_escaped_and_secrets_hidden() -> None:
    model = model_folder(path='/models/<script>&"tok-123456"')
    plan = make_plan(
        cluster("a", "b", pipeline=2, model={"path": '/models/<script>&"tok-123456"'}),
        machines("a", "b", model=model),
    )
    try:
        hide(Mask(["tok-123456"]))
        drawn = map_svg(plan)
    finally:
        hide(Mask())
    assert "<script" not in drawn
    assert "tok-123456" not in drawn
    assert "&lt;script&gt;&amp;&quot;" in drawn


def test_a_picture_never_replaces_what_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(CpuppError, match="must end in"):
        svg_path(str(tmp_path / "pair.yaml"))
    with pytest.raises(CpuppError, match="folder does not exist"):
        svg_path(str(tmp_path / "no" / "map.svg"))


def test_a_new_file_replaces_nothing_unless_it_may(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    write_file(new_path(str(path), force=False), "one\n")
    with pytest.raises(CpuppError, match="exists"):
        new_path(str(path), force=False)
    write_file(new_path(str(path), force=True), "two\n")
    assert path.read_text() == "two\n"
    assert [each.name for each in tmp_path.iterdir()] == ["c.yaml"]
    with pytest.raises(CpuppError, match="exists"):
        new_path(str(tmp_path), force=True)
