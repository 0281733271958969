"""Who counts as lost: the policy of the heartbeat, with a clock of the test's own."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cpupp.rank.beat import PERIOD_S, SILENT_S, STORE, AgentSign, Watch


class Rounds:
    """Calls `judge` every half second; each of `nodes` moves until it is silenced."""

    def __init__(self, *nodes: int) -> None:
        self.watch = Watch()
        self.now = 1000.0
        self.rounds = 0
        self.values = dict.fromkeys(nodes, b"0")
        self.silent: set[int] = set()
        self.store = True
        self.error = ""

    def go(self, seconds: float) -> list[tuple[float, int, str]]:
        """Return (seconds since the begin of this call, node, sentence) of every loss."""
        found: list[tuple[float, int, str]] = []
        for step in itertools.count(1):
            if step * PERIOD_S > seconds:
                return found
            self.now += PERIOD_S
            if self.store:
                self.rounds += 1
                moving = self.values.keys() - self.silent
                self.values.update({node: str(self.rounds).encode() for node in moving})
            losses = self.watch.judge(self.now, self.rounds, self.values, self.error)
            found += [(step * PERIOD_S, node, text) for node, _, text in losses]
        raise AssertionError


def test_a_silent_node_is_lost_after_the_limit_and_named_again_while_it_lasts() -> None:
    rounds = Rounds(1, 2)
    assert rounds.go(60) == []
    rounds.silent = {2}
    assert rounds.go(10) == [
        (SILENT_S, 2, "vLLM node 2 has not been heard of for 4.5 s"),
        (2 * SILENT_S, 2, "vLLM node 2 has not been heard of for 9.0 s"),
    ]
    rounds.silent = set()
    assert rounds.go(5) == []
    rounds.silent = {2}
    assert [seconds for seconds, _, _ in rounds.go(5)] == [SILENT_S]


def test_a_store_that_does_not_answer_is_the_only_loss() -> None:
    rounds = Rounds(1, 2)
    rounds.go(5)
    rounds.store = False
    assert [(seconds, node) for seconds, node, _ in rounds.go(5)] == [(SILENT_S, STORE)]
    rounds.store = True
    assert rounds.go(20) == []


def test_a_store_that_failed_is_lost_at_once() -> None:
    rounds = Rounds(1)
    rounds.go(5)
    rounds.error = "Connection refused"
    assert rounds.go(PERIOD_S) == [
        (PERIOD_S, STORE, "the store of the run, in the worker of rank 0, failed: Connection refused")
    ]


def test_a_last_word_needs_no_waiting() -> None:
    rounds = Rounds(1, 2)
    rounds.go(5)
    rounds.silent, rounds.values[1] = {1}, b"lost: its agent has ended"
    assert rounds.go(2) == [(PERIOD_S, 1, "vLLM node 1 fails: its agent has ended")]


def test_who_was_stopped_itself_does_not_take_the_others_for_lost() -> None:
    rounds = Rounds(1, 2)
    rounds.go(5)
    rounds.now += 3600
    rounds.store = False  # the store's thread is one round late
    assert rounds.go(2) == []
    rounds.store = True
    assert rounds.go(20) == []


def test_a_node_that_still_starts_is_not_judged() -> None:
    rounds = Rounds()
    assert rounds.go(100) == []


def site_of(pid: int, folder: Path) -> Path:
    start = int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    (folder / "site.json").write_text(json.dumps({"agent": pid, "agent_start": start}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_the_agent_of_this_host_is_looked_at(end: str, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as agent:
        try:
            sign = AgentSign(site_of(agent.pid, tmp_path))
            assert sign.trouble(0.0) == ""
            if end == "kill":
                agent.kill()
                agent.wait()
                assert sign.trouble(0.5) == "its agent has ended"
                return
            agent.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, agent.pid, os.WSTOPPED)
            assert sign.trouble(0.5) == ""
            assert sign.trouble(3.0) == "its agent is stopped (SIGSTOP)"
        finally:
            agent.kill()


def test_a_failure_of_this_host_is_passed_on(tmp_path: Path) -> None:
    sign = AgentSign(site_of(os.getpid(), tmp_path))
    assert sign.trouble(0.0) == ""
    (tmp_path / "failure.json").write_text(json.dumps({"message": "exited with code 3"}), encoding="utf-8")
    assert sign.trouble(0.5) == "exited with code 3"


def test_an_agent_that_cannot_be_seen_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text(json.dumps({"agent": 999999999, "agent_start": 1}), encoding="utf-8")
    assert AgentSign(tmp_path).trouble(0.0) == ""
