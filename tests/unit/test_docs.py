"""The documentation names everything that the code has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cpupp.errors import ExitCode
from cpupp.plan.cluster import ClusterSpec, keys_at

ROOT = Path(__file__).parents[2]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_every_key_of_the_file_is_described() -> None:
    text = (ROOT / "docs/yaml.md").read_text()
    sections = dict(re.findall(r"^## `?([\w\[\]]+)[^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    for section in ("model", "parallel", "hosts", "engine", "network", "serve", "deadlines", "restart"):
        keys = keys_at((section,))
        assert keys
        body = sections["hosts[]" if section == "hosts" else section]
        assert [key for key in keys if f"| `{key}` |" not in body] == []
    assert [key for key in ClusterSpec.model_fields if f"| `{key}` |" not in text] == []


def test_every_exit_code_is_described() -> None:
    text = (ROOT / "docs/exit-codes.md").read_text()
    assert [code for code in ExitCode if f"| {int(code)} |" not in text] == []


@pytest.mark.parametrize(
    "verb", ["launch", "ps", "status", "logs", "stop", "plan", "doctor", "init", "bench comm", "bench serve"]
)
def test_every_option_is_described(verb: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cpupp", *verb.split(), "--help"], capture_output=True, text=True, check=True
    )
    text = (ROOT / "docs/cli.md").read_text()
    section = text.partition(f"## `cpupp {verb}")[2].partition("\n## ")[0]
    options = set(re.findall(r"--[a-z-]+", done.stdout)) - {"--help"}
    assert {option for option in options if f"`{option}" not in section} == set()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_clusters_in_the_docs_are_valid(path: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.S):
        ClusterSpec.model_validate(yaml.safe_load(block))
