"""What the agent writes to the launcher: one thread, one order of messages, and no writer that waits for a reader.

A line is `@cpupp ` and one JSON object in ASCII. The launcher may be slow, or gone without a word; replies and events
never wait for it, and output of the ranks waits in their files.
"""

from __future__ import annotations

import collections
import json
import os
import threading
import time
from typing import Any

MARK = b"@cpupp "
OUTPUT_LIMIT = 1 << 20  # bytes queued, beyond which output stays in its file


class Outbox:
    """Queue of messages to the launcher on the descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: collections.deque[bytes] = collections.deque()
        self._queued = 0
        self._broken = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write, name="outbox", daemon=True).start()

    def put(self, message: dict[str, Any]) -> None:
        """Queue a message. Never blocks."""
        line = MARK + json.dumps(message).encode("ascii") + b"\n"
        with self._changed:
            if not self._broken:
                self._lines.append(line)
                self._queued += len(line)
                self._changed.notify_all()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until output may be queued. Returns False when there is still too much unread after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._broken or self._queued < OUTPUT_LIMIT, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued was written. Returns False when the launcher did not read it in time."""
        end = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(lambda: self._broken or not self._queued, end - time.monotonic())

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
            except OSError:
                with self._changed:
                    self._broken = True
                    self._lines.clear()
                    self._queued = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._queued -= len(line)
                self._changed.notify_all()
