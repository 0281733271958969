"""The agent's own child processes: keepers, and programs that are asked one thing. Standard library only."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from typing import Any, NamedTuple

from . import agent_proc

LONGEST_ANSWER = 1 << 20


class Answer(NamedTuple):
    """What a program said. status: its exit status, None when it had to be ended; trouble: why, else empty."""

    output: bytes
    errors: bytes
    status: int | None
    trouble: str


class Children:
    """The agent's own children. All others under it are orphans of a keeper that died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()
        self._asked: set[subprocess.Popen[bytes]] = set()

    def popen(self, *arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process as `subprocess.Popen` does and remember it."""
        with self._lock:
            process = subprocess.Popen(*arguments, **options)
            self._pids.add(process.pid)
        return process

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Drop a process that was waited for."""
        with self._lock:
            self._pids.discard(process.pid)

    def kill_orphans(self, deadline_s: float) -> tuple[dict[int, int], set[int], set[tuple[int, int]]]:
        """KILL what dead keepers left to the agent. Returns exit codes, survivors, and the segments they used."""
        with self._lock:
            if not self._pids and agent_proc.no_child():  # as while a host is probed: no need to read all of /proc
                return {}, set(), set()
            spare = set(self._pids)
            table = agent_proc.process_table()
            orphans = {pid for pid, process in table.items() if process.ppid == os.getpid() and pid not in spare}
            segments: set[tuple[int, int]] = set()
            with contextlib.suppress(OSError):
                device = os.stat(agent_proc.SHM).st_dev
                segments = agent_proc.shm_in_use(orphans | agent_proc.descendants(orphans, table), device)
            codes, left = agent_proc.kill_below(os.getpid(), spare, deadline_s)
        return codes, left, segments

    def ask(
        self, argv: list[str], timeout_s: float, environment: dict[str, str], longest: int = LONGEST_ANSWER
    ) -> Answer:
        """Run a program that shall answer and end. Neither it nor anything below it outlives this call or the agent.

        Raises OSError or ValueError when it cannot be executed.
        """
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.popen(argv, cwd="/", env=environment, **pipes)
        with self._lock:
            self._asked.add(process)
        try:
            return _listen(process, timeout_s, longest)
        finally:
            self._end(process)

    def end_asked(self) -> None:
        """End what still has to answer, and all below it."""
        with self._lock:
            asked = list(self._asked)
        for process in asked:
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        with self._lock:
            self._asked.discard(process)
            self._pids.discard(process.pid)
        # What it had started is the agent's own now: a wrapper script's real Python, for one.
        self.kill_orphans(1.0)


def _listen(process: subprocess.Popen[bytes], timeout_s: float, longest: int) -> Answer:
    """Read both pipes until the program has ended, the time is over, or it has said too much."""
    assert process.stdout is not None
    assert process.stderr is not None
    heard = {process.stdout: b"", process.stderr: b""}
    pipes = list(heard)
    end = time.monotonic() + timeout_s
    trouble = ""
    while not trouble:
        ended = process.poll() is not None  # asked before the pipes are: what it wrote last is in them
        ready = select.select(pipes, [], [], 0.0 if ended else 0.1)[0]
        for pipe in ready:
            data = os.read(pipe.fileno(), 65536)
            heard[pipe] += data
            if not data:
                pipes.remove(pipe)
        if ended and not ready:  # a grandchild may hold the pipes for ever
            break
        if max(map(len, heard.values())) > longest:
            trouble = "printed without end"
        elif time.monotonic() > end:
            trouble = f"gave no answer within {timeout_s:g} s"
    for pipe in heard:
        pipe.close()
    return Answer(heard[process.stdout], heard[process.stderr], process.returncode, trouble)
