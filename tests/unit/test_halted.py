"""A process that stays stopped, and one that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from cpupp.rank.agent_halted import HALTED_S, HaltWatch
from tests.testbed import processes


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Pid of a process that does nothing."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def send(pid: int, number: int, state: str) -> None:
    """Send a signal and wait until the process is in that state."""
    os.kill(pid, number)
    deadline = time.monotonic() + 10
    while (process := processes.look(pid)) and process.state != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stopped_at_every_look(sleeper: int) -> None:
    watch = HaltWatch()
    assert not watch.look(sleeper, 0.0)
    send(sleeper, signal.SIGSTOP, "T")
    assert not watch.look(sleeper, 1.0)
    assert not watch.look(sleeper, 1.0 + HALTED_S - 0.1)
    assert watch.look(sleeper, 1.0 + HALTED_S)


def test_going_on_starts_the_clock_anew(sleeper: int) -> None:
    watch = HaltWatch()
    send(sleeper, signal.SIGSTOP, "T")
    watch.look(sleeper, 0.0)
    send(sleeper, signal.SIGCONT, "S")
    assert not watch.look(sleeper, 3.0)
    send(sleeper, signal.SIGSTOP, "T")
    assert not watch.look(sleeper, HALTED_S)
    assert watch.look(sleeper, 2 * HALTED_S)


def test_a_process_that_is_gone_is_not_stopped() -> None:
    assert not HaltWatch().look(2**22 + 1, 100.0)
