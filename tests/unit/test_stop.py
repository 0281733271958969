"""Stop orders: answers that come late, hosts that do not answer, and what is told of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import cpupp.launch.stop
from cpupp.errors import CpuppError
from cpupp.launch.stop import stop_hosts


class Host:
    """A host that answers a stop order after a while, with this."""

    on_event: Callable[[str, dict[str, Any]], None]

    def __init__(self, reply: dict[str, Any] | CpuppError, after: float = 0.0) -> None:
        self.reply = reply
        self.after = after

    def request(self, op: str, *, timeout: float = 0.0, **params: Any) -> Any:
        """Answer, or not in time."""
        assert (op, params) == ("stop", {"grace": 0.1})
        time.sleep(min(self.after, timeout))
        if self.after > timeout:
            raise CpuppError("HOST-SLOW", f"no answer to {op!r} within {timeout:g} s")
        if isinstance(self.reply, CpuppError):
            raise self.reply
        return self.reply

    def detach(self, timeout_s: float = 0.0, **params: Any) -> None:
        """Not asked."""
        raise AssertionError


CLEAN = {"stuck": [], "site_removed": True}


@pytest.fixture(autouse=True)
def _short_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpupp.launch.stop, "STOP_SLACK", 1.0)


def test_an_answer_within_the_agents_own_bounds_is_not_late() -> None:
    assert stop_hosts({"a": Host(CLEAN), "b": Host(CLEAN, after=0.6)}, grace=0.1, lost=()) == []


def test_what_is_left_is_told_by_the_host_that_has_it() -> None:
    hosts = {
        "a": Host({"stuck": [2], "site_removed": False}),
        "b": Host({"stuck": [], "site_removed": False}),
        "c": Host(CLEAN, after=9),
        "d": Host(CpuppError("HOST-LOST", "stop: no sign of life")),
        "e": Host(CLEAN),
        "f": Host(CLEAN),
    }
    found = stop_hosts(hosts, grace=0.1, lost=("e", "f"), clean=("f",))
    assert sorted(text.split(":")[0] for text in found) == [
        "host a",
        "host b",
        "host d cannot be reached",
        "host e cannot be reached",
        "perhaps, host c",
    ]
    assert "vLLM node 2: a process that no signal ends" in next(text for text in found if text.startswith("host a"))
