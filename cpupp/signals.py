"""SIGINT, SIGTERM and SIGHUP as entries of a queue: a handler does nothing else, at any moment of a verb."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

TICK = 0.1
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):  # noqa: N818  # what happened, no error
    """The user or the system asked the verb to end; `signum` says how."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + signal number, as shells count: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


class Signals:
    """While entered, signals go to a queue: `wait` ends early on one, `forward` hands them to a running supervisor."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._target: Callable[[int], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for signum in CAUGHT:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup and background jobs stay as they were
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._target is not None:
            self._target(signum)
        else:
            self._queue.put(("signal", signum))

    def wait(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result. Raises what it raised, or Interrupted at the first signal.

        After Interrupted the work may still run: the process must end soon (its hosts then see their leash go).
        """

        def run() -> None:
            try:
                self._queue.put(("result", work()))
            except BaseException as error:  # handed to the waiting thread, whatever it is
                self._queue.put(("error", error))

        threading.Thread(target=run, daemon=True, name="cpupp-work").start()
        kind, value = self._next()
        if kind == "signal":
            raise Interrupted(value)
        if kind == "error":
            raise value
        result: T = value
        return result

    def _next(self) -> tuple[str, Any]:
        # Never waits without end: the kernel may hand a signal to any thread, and Python runs the handler only when the
        # main thread runs again. A blocked get would sleep on (seen: one in five).
        while True:
            try:
                return self._queue.get(timeout=TICK)
            except queue.Empty:
                continue

    def forward(self, target: Callable[[int], None]) -> None:
        """Hand every signal from now on, and those that wait, to `target`, which must only enqueue."""
        self._target = target
        while not self._queue.empty():
            kind, value = self._queue.get()
            if kind == "signal":
                target(value)
