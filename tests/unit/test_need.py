"""A test whose needs are missing is skipped with the reason, and fails on CI."""

from __future__ import annotations

import os

import pytest

from tests.testbed import need


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]) -> None:
    monkeypatch.setenv("CI", ci)
    need.need_tool("sh")
    with pytest.raises(outcome, match="needs no-such-tool, nor-this: run `make tools` as root"):
        need.need_tool("no-such-tool", "sh", "nor-this")


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_hosts_need_root(monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(outcome, match="needs root"):
        need.need_hosts()
