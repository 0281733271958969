"""An agent under test: a session, the events it sent, and a Python child in the place of vLLM."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpupp.launch.session import AgentSession
from cpupp.launch.transport import LocalTransport, Transport
from tests.testbed import processes

GONE_S = 10.0  # the promise: from the order until nothing is left

# In front of every script: `child(code)` starts a process of the node, `say` prints its pid under a name.
PROLOGUE = """
import ctypes, mmap, os, signal, subprocess, sys, time
PROLOGUE = globals().get("PROLOGUE") or os.environ["PROLOGUE"]
def say(name, pid=None):
    os.write(1, f"{name}={pid or os.getpid()}\\n".encode())
def child(code):
    return subprocess.Popen([sys.executable, "-c", PROLOGUE + code], env=dict(os.environ, PROLOGUE=PROLOGUE))
def ignore_term():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def segment(name, size=4096):
    file = open("/dev/shm/" + name, "w+b")
    file.truncate(size)
    return mmap.mmap(file.fileno(), size)
"""


def script(text: str, python: str = sys.executable) -> list[str]:
    """Return the argv of a Python that runs PROLOGUE and `text`."""
    code = f"PROLOGUE = {PROLOGUE!r}\nexec(PROLOGUE)\n" + textwrap.dedent(text)
    return [python, "-c", code]


class Bench:
    """A session to an agent (on this machine unless a transport is given), as a context manager."""

    def __init__(self, transport: Transport | None = None, **options: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self.transport = transport or LocalTransport()
        self.session = AgentSession("a", self.transport, self._take, **options)
        self.site = Path()

    def _take(self, host: str, event: dict[str, Any]) -> None:
        assert host == "a"
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def __enter__(self) -> Bench:
        self.session.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    @property
    def agent(self) -> int:
        """The agent's pid."""
        return int(self.session.hello["pid"])

    def prepare(self, run: str = "test", **options: Any) -> Path:
        """Make the site folder."""
        answer = self.session.request("prepare", run=run, attempt=1, host="a", **options)
        self.site = Path(answer["site"])
        return self.site

    def start(self, text: str, node: int = 0, python: str = sys.executable, **options: Any) -> int:
        """Start a node that runs `text`; make the site folder when there is none."""
        if self.site == Path():
            self.prepare()
        return int(self.session.request("start", node=node, argv=script(text, python), **options)["pid"])

    def wait_event(self, kind: str, node: int | None = None, timeout: float = 20.0) -> dict[str, Any]:
        """Return the first event of that kind, waiting for it. Raises AssertionError with what came instead."""

        def first() -> dict[str, Any] | None:
            wanted = (e for e in self.events if e["event"] == kind and node in (None, e.get("node")))
            return next(wanted, None)

        with self._changed:
            assert self._changed.wait_for(lambda: first() is not None, timeout), f"no {kind!r} in {self.events}"
            event = first()
        assert event is not None
        return event

    def output(self, node: int = 0) -> str:
        """All output of a node so far."""
        return "".join(e["data"] for e in list(self.events) if e["event"] == "output" and e["node"] == node)

    def pid_of(self, name: str, node: int = 0, timeout: float = 20.0) -> int:
        """Return the pid that the script said under that name."""

        def find() -> str:
            lines = [line for line in self.output(node).splitlines() if line.startswith(name + "=")]
            return lines[0].partition("=")[2] if lines else ""

        wait_until(lambda: bool(find()), f"{name} in {self.output(node)!r}", timeout)
        return int(find())

    def keeper(self, pid: int) -> int:
        """Return the pid of the keeper that started the process."""
        process = processes.look(pid)
        assert process is not None
        return process.parent


def wait_until(condition: Callable[[], bool], what: str, timeout: float = GONE_S) -> None:
    """Wait until the condition holds. Raises AssertionError naming `what`."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout:g} s: {what}"
        time.sleep(0.02)


def wait_dead(*pids: int, timeout: float = GONE_S) -> None:
    """Wait until none of the processes runs."""
    wait_until(lambda: not any(map(processes.alive, pids)), f"end of {pids}", timeout)


def tree(pid: int) -> list[int]:
    """The process and all its descendants, as of now."""
    return [pid, *processes.descendants(pid)]


def shm(name: str) -> Path:
    """A file in /dev/shm."""
    return Path("/dev/shm") / name


def unique(name: str) -> str:
    """A name that no other test process uses."""
    return f"{name}-{os.getpid()}-{time.monotonic_ns()}"
