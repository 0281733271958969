"""What this vLLM node shall do wrong, from the variable FAKE_VLLM, and the phases of a start at which it does it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

SHM_UNUSED_S = 0.3  # vLLM makes its queues' segments, tells the others, and writes to them later
PHASES = ("import", "configure", "start", "join", "load", "warm_up", "api", "serve")
"""In the order of a start. Reached by: main (import, configure, api), the workers' parent (start), each worker (join,
load, warm_up); `serve` is reached by the head's main process, and by a follower's workers after their warm-up."""

DEFAULTS: dict[str, Any] = {
    "delays": {},  # phase -> seconds
    "hang": None,  # phase at which the process that reaches it stops going on
    "exit": None,  # {"phase", "code" or "signal", "words"}: say the words and end
    "exception": None,  # phase at which a worker tells of an exception and lives on
    "burst_mb": 0,  # written to stderr at once, by the process that reaches burst_at
    "burst_at": "load",
    "burst_after_s": 0.0,  # or so long after the join, by each worker
    "grandchild": False,  # each worker leaves a process in a session of its own that keeps stdout and ignores SIGTERM
    "ignore_term": False,  # all processes
    "print_env": False,  # main writes its environment into the log, one `env NAME=VALUE` line each
    "shm_bytes": 0,  # each worker writes a segment of that size in /dev/shm, under a random name
    "lines_per_s": 0.0,  # numbered lines of each worker's log, from `load` on
    "token_s": 0.001,  # what a token takes
    "on_lost": "hang",  # or `fail`: what becomes of completions once a rank is lost
    "notice_s": 0.5,  # after which a parent sees that its child died; negative: never
}


class Script:
    """The script of this node: one attribute for each key of DEFAULTS."""

    def __init__(self, text: str) -> None:
        given = json.loads(text or "{}")
        unknown = sorted(set(given) - set(DEFAULTS))
        named = [
            given.get("hang"),
            given.get("exception"),
            *given.get("delays", {}),
            (given.get("exit") or {}).get("phase"),
        ]
        unknown += sorted({str(name) for name in named if name is not None} - set(PHASES))
        if unknown:
            raise SystemExit(f"FAKE_VLLM has unknown words: {unknown}")
        self.values = {**DEFAULTS, **given}
        self.who = "APIServer"
        self.background: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def say(self, text: str, level: str = "INFO") -> None:
        """Write a log line as vLLM does."""
        stamp = time.strftime("%m-%d %H:%M:%S")
        write(f"({self.who} pid={os.getpid()}) {level} {stamp} [fake.py:1] {text}\n")

    def trace(self, headline: str, error: str) -> None:
        """Log an exception as vLLM's `logger.exception` does: every line with the prefix."""
        for line in (headline, "Traceback (most recent call last):", '  File "fake.py", line 1, in work', error):
            self.say(line, "ERROR")

    def reach(self, phase: str) -> None:
        """Do what the script has for this phase; may not return."""
        time.sleep(float(self.delays.get(phase, 0.0)))
        if phase == self.burst_at and self.burst_mb and not self.burst_after_s:
            self._burst()
        if self.hang == phase:
            self.say(f"hangs at {phase}")
            forever()
        if self.exception == phase:
            self.trace("WorkerProc hit an exception.", "ValueError: scripted exception")
            forever()
        if self.exit is not None and self.exit["phase"] == phase:
            self._end()

    def _burst(self) -> None:
        line = b"x" * 99 + b"\n"
        for _ in range(int(self.burst_mb)):
            write_all(line * 10_000)
        self.say(f"burst of {self.burst_mb} MB written")

    def _end(self) -> None:
        if self.exit.get("words"):
            write(self.exit["words"].rstrip("\n") + "\n")
        if "signal" in self.exit:
            os.kill(os.getpid(), int(self.exit["signal"]))
            forever()
        os._exit(int(self.exit["code"]))

    def talk(self) -> None:
        """Begin with the numbered log lines, if there are to be any."""
        if self.burst_after_s:
            threading.Timer(float(self.burst_after_s), self._burst).start()
        if self.lines_per_s:
            threading.Thread(target=self._talk, daemon=True).start()

    def _talk(self) -> None:
        began, number = time.monotonic(), 0
        while True:
            number += 1
            self.say(f"numbered line {number}")
            time.sleep(max(0.0, began + number / float(self.lines_per_s) - time.monotonic()))

    def leave_grandchild(self) -> None:
        """Start what outlives its parent: another session, SIGTERM ignored, stdout kept."""
        if self.grandchild:
            code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
            subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    def fill_shm(self) -> None:
        """Write a segment as numpy or torch would: a hole first, so that a full /dev/shm is a bus error."""
        if self.shm_bytes:
            import mmap

            path = f"/dev/shm/psm_{os.urandom(4).hex()}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(descriptor, int(self.shm_bytes))
            area = mmap.mmap(descriptor, int(self.shm_bytes))
            time.sleep(SHM_UNUSED_S)
            for start in range(0, int(self.shm_bytes), mmap.PAGESIZE):
                area[start] = 1
            self.segment = area


def write(text: str) -> None:
    """One write to stderr, where vLLM logs."""
    write_all(text.encode("utf-8", "surrogateescape"))


def write_all(data: bytes) -> None:
    """Write all of `data`, however little the other end takes at once."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(2, view) :]
        except OSError:  # a full disk: vLLM's logging swallows that too
            return


def forever() -> None:
    """Never return."""
    while True:
        signal.pause()
