"""The cluster file that init writes: names, Pythons, slots and sizes from facts; always a file that loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpupp.launch.config import load_cluster
from cpupp.plan.facts import HostFacts
from cpupp.plan.init_file import NO_MODEL, Draft, Found, choose_pythons, draft, entry_names, file_text, first_spec
from cpupp.plan.plan import make_plan
from tests.unit.factory import cpus, host, machines, model_folder


def found(hostname: str, *engines: tuple[str, str], home: str = "/home/me") -> Found:
    """One host."""
    return Found(hostname=hostname, home=home, engines=engines, models=("/models/tiny",))


VENV = ("/home/me/venv/bin/python", "0.32.0")


def made(facts: dict[str, HostFacts], model: str = "/models/tiny") -> Draft:
    """A draft of these hosts."""
    there = {name: found(name, VENV) for name in facts}
    data = first_spec("mine", [f"me@{name}" for name in facts], list(facts), model, choose_pythons(there))
    return draft(data, facts, there)


def loaded(tmp_path: Path, text: str) -> Any:
    """The file as cpupp reads it."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_cluster(path)


@pytest.mark.parametrize(
    ("targets", "hostnames", "names"),
    [
        (["me@10.0.0.1", "me@10.0.0.2"], ["n1.example.org", "n2"], ["n1", "n2"]),
        (["me@left", "right:2222"], ["node", "node"], ["left", "right"]),
        (["local", "local"], ["node", "node"], ["h1", "h2"]),
        (["me@[fe80::1]", "me@[fe80::2]"], ["node", "node"], ["h1", "h2"]),
    ],
)
def test_names(targets: list[str], hostnames: list[str], names: list[str]) -> None:
    assert entry_names(targets, [found(name) for name in hostnames]) == names


def test_the_newest_vllm_that_all_have_is_taken_by_one_path() -> None:
    old, new = ("/opt/old/bin/python", "0.30.0"), ("/home/me/new/bin/python", "0.32.0")
    both = {"a": found("a", new, old), "b": found("b", old)}
    assert choose_pythons(both) == {"a": "/opt/old/bin/python", "b": "/opt/old/bin/python"}
    mine = found("b", ("/home/you/new/bin/python", "0.32.0"), home="/home/you")
    assert choose_pythons({"a": found("a", new), "b": mine}) == dict.fromkeys("ab", "~/new/bin/python")
    assert choose_pythons({"a": found("a", old), "b": found("b")}) == {"a": "/opt/old/bin/python", "b": "python3"}


def test_a_rank_for_each_numa_node_tensor_inside_pipeline_across(tmp_path: Path) -> None:
    facts = machines("a", "b", cpus=cpus(8, numa=2))
    text = file_text(made(facts), "./s.json")
    spec = loaded(tmp_path, text)
    assert text.startswith("# yaml-language-server: $schema=./s.json\n")
    assert (spec.parallel.pipeline, spec.parallel.tensor) == (2, 2)
    assert [(h.name, h.ssh, h.address, h.slots) for h in spec.hosts] == [
        ("a", "me@a", "10.0.0.1", 2),
        ("b", "me@b", "10.0.0.2", 2),
    ]
    assert "# host1: 8 cores, 2 NUMA nodes, 64 GiB" in text
    assert spec.engine.python == "~/venv/bin/python"
    make_plan(spec, facts)


def test_more_ranks_than_layers_fall_back_to_a_rank_for_each_host() -> None:
    model = model_folder({**machines("a")["a"].model.config, "num_hidden_layers": 2, "num_attention_heads": 7})
    spec = made(machines("a", "b", cpus=cpus(8, numa=2), model=model)).spec
    assert [each.slots for each in spec.hosts] == [1, 1]
    assert (spec.parallel.pipeline, spec.parallel.tensor) == (2, 1)


def test_without_a_model_the_file_loads_and_says_what_to_change(tmp_path: Path) -> None:
    facts = {"a": host("a", model=model_folder(error="no such folder"))}
    result = made(facts, NO_MODEL)
    assert result.refused
    text = file_text(result, "./s.json")
    assert loaded(tmp_path, text).model.path == NO_MODEL
    assert "<- change" in text
    assert "# on every host: /models/tiny" in text


def test_odd_text_of_hosts_cannot_break_out_of_its_comment_or_value(tmp_path: Path) -> None:
    facts = {"a": host("a", hostname="x\nname: evil")}
    there = {"a": Found(hostname="a", home="/h", engines=(('/h/"v: #/bin/python', "0.32.0\nx: y"),), models=())}
    data = first_spec("1.5", ["me@a"], ["a"], "/m: #x", choose_pythons(there))
    spec = loaded(tmp_path, file_text(draft(data, facts, there), "./s.json"))
    assert (spec.name, spec.model.path, spec.engine.python) == ("1.5", "/m: #x", '~/"v: #/bin/python')
