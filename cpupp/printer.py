"""Printing that never stops its caller: a reader that pauses (`cpupp launch 2>&1 | less`) must not stop supervision."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING = 10_000
"""Lines that wait for a slow reader; beyond that, log lines are counted instead of kept (files have them all)."""

Line = tuple[str, str]


class Printer:
    """Hands lines (text, style) to `show` from a thread of its own, many at once when they come fast.

    idle: asked for lines whenever nothing came for `idle_s` seconds.
    """

    def __init__(
        self, show: Callable[[list[Line]], None], *, idle: Callable[[], list[Line]] | None = None, idle_s: float = 30.0
    ) -> None:
        self._show = show
        self._idle = idle
        self._idle_s = idle_s if idle is not None else None
        self._waiting: deque[Line] = deque()
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="cpupp-printer")
        self._thread.start()

    def put(self, lines: list[Line], *, may_drop: bool = False) -> None:
        """Queue lines, in order. may_drop: count them instead when too many wait."""
        with self._changed:
            if may_drop and len(self._waiting) >= MAX_WAITING:
                self._num_dropped += len(lines)
            else:
                self._note_dropped()
                self._waiting.extend(lines)
            self._changed.notify()

    def close(self, timeout: float = 2.0) -> None:
        """Print what waits, for at most `timeout` seconds."""
        with self._changed:
            self._note_dropped()
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _note_dropped(self) -> None:
        if self._num_dropped:
            self._waiting.append((f"({self._num_dropped} log lines not shown here; the log files have them)", "dim"))
            self._num_dropped = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    if not self._changed.wait(self._idle_s) and self._idle is not None:
                        self._waiting.extend(self._idle())
                if not self._waiting:
                    return
                lines = list(self._waiting)
                self._waiting.clear()
            self._show(lines)
