"""The JSON Schema of cluster files: it takes what the loader takes, and says what docs/yaml.md says."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpupp.plan.cluster import ClusterSpec, keys_at
from cpupp.plan.schema import schema
from cpupp.plan.schema_words import WORDS

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])


def mistakes(data: Any) -> list[str]:
    """What the schema has against some data."""
    jsonschema: Any = import_module("jsonschema")
    checker = jsonschema.Draft202012Validator
    checker.check_schema(schema())
    return [error.message for error in checker(schema()).iter_errors(data)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_ready_file_is_valid(path: Path) -> None:
    assert mistakes(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hostz": []}, "hostz"),
        ({"model": {"path": "/m", "name": "x"}}, "name"),
        ({"parallel": "automatic"}, "automatic"),
        ({"network": {"master_port": 70000}}, "70000"),
        ({"deadlines": {"load": 0}}, "0"),
        ({"engine": {"communicator": "nccl"}}, "nccl"),
        ({"engine": {"micro_batches": "no"}}, "no"),
        ({"hosts": []}, "non-empty"),
    ],
)
def test_mistakes_are_seen(change: dict[str, Any], words: str) -> None:
    good = {"name": "x", "model": {"path": "/m"}, "parallel": "auto", "hosts": [{"name": "a", "local": True}]}
    assert mistakes(good) == []
    assert mistakes({**good, "engine": yaml.safe_load("micro_batches: off")}) == []
    assert any(words in text for text in mistakes({**good, **change}))


def test_descriptions_are_the_words_of_the_docs() -> None:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / "docs/yaml.md").read_text())
    plain = plain.replace("`", "").replace("**", "")
    assert [key for key, words in WORDS.items() if words not in plain] == []


def test_every_key_has_a_description() -> None:
    keys = set(ClusterSpec.model_fields)
    for section in ("model", "parallel", "hosts", "engine", "network", "serve", "deadlines", "restart"):
        keys |= {f"{'hosts[]' if section == 'hosts' else section}.{key}" for key in keys_at((section,)) or []}
    assert keys - set(WORDS) == set()


def test_no_mapping_of_the_file_takes_unknown_keys() -> None:
    made = json.loads(json.dumps(schema()))
    assert made["additionalProperties"] is False
    assert [name for name, value in made["$defs"].items() if value["additionalProperties"] is not False] == []
