"""What is known of vLLM's versions."""

from __future__ import annotations

import pytest

from cpupp.plan.plan import make_plan
from cpupp.plan.versions import known_faults, parse_version, too_old, version_warning
from tests.unit.factory import cluster, engine, machines


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("0.32.0", (0, 32, 0)), ("0.32.0+cpu", (0, 32, 0)), ("0.33rc1", (0, 33, 0)), ("dev", None), ("", None)],
)
def test_versions_are_read(text: str, parsed: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == parsed


@pytest.mark.parametrize(
    ("version", "codes"),
    [
        ("0.18.0", {"VLLM-TENSOR-DICT", "VLLM-EQUAL-PORT"}),
        ("0.19.1", {"VLLM-TENSOR-DICT", "VLLM-EQUAL-PORT"}),
        ("0.25.1", {"VLLM-EQUAL-PORT"}),
        ("0.27.1", {"VLLM-EAGER", "VLLM-EQUAL-PORT"}),
        ("0.32.0", {"VLLM-EAGER", "VLLM-LOCAL-GLOO"}),
        ("", set()),
    ],
)
def test_known_faults(version: str, codes: set[str]) -> None:
    assert {fault.code for fault in known_faults(version)} == codes


def test_too_old_and_newer_than_tested() -> None:
    assert too_old("0.17.1") == "vLLM 0.17.1 is older than 0.18.0, the oldest that cpupp supports"
    assert too_old("0.18.0") is None
    assert version_warning("0.32.0") is None
    assert version_warning("0.33.0") is not None


def test_the_stock_communicator_is_warned_about() -> None:
    spec = cluster("a", "b", pipeline=2, engine={"communicator": "stock"})
    plan = make_plan(spec, machines("a", "b", engine=engine(vllm="0.18.0")))
    assert any("communicator stock on vLLM 0.18.0" in text and "#37933" in text for text in plan.warnings)
