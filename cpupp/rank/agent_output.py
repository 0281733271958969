"""What a vLLM node writes: its output and its reports, taken from its files and passed on. Standard library only.

Attached, output goes to the launcher. Detached, it goes into parts on this host (see agent_logs), and only the guard
hears of events.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import re
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035  # Python 3.8 cannot subscript collections.abc.Callable

from . import agent_logs, agent_mask

if TYPE_CHECKING:
    from .agent_outbox import Outbox

CHUNK = 48 * 1024
POLL_S = 0.05
DETACHED_POLL_S = 0.2
PUNCH_EVERY = 8 << 20  # bytes of a log passed on, after which their disk blocks are given back
FALLOC_PUNCH_HOLE = 0x01 | 0x02  # with FALLOC_FL_KEEP_SIZE


class Follower:
    """Reads what is appended to a file, piece by piece."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = 0
        self.punched = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def peek(self, size: int) -> bytes:
        """Return new bytes, which stay new until `advance`."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.pread(descriptor, size, self.offset)
        finally:
            os.close(descriptor)

    def advance(self, length: int) -> None:
        """Leave that many bytes behind; somebody else has them now."""
        self.offset += length
        if self.offset - self.punched > PUNCH_EVERY:
            with contextlib.suppress(OSError):
                _give_back(self.path, self.offset)
            self.punched = self.offset

    def end(self) -> str:
        """Return the text of a half character that will not be completed."""
        return self.decoder.decode(b"", True)


def _give_back(path: str, length: int) -> None:
    # A run lives for weeks: what somebody else has is not kept here twice. Only a hole can be made without a race
    # against the ranks' appends; file systems that cannot do it keep the data.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None)
        libc.fallocate(descriptor, FALLOC_PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length))
    finally:
        os.close(descriptor)


class Output:
    """Passes on what one node writes. Used by the node's following thread alone.

    listen: called with every event, as it is sent, except for output; and, once detached, with `{"event": "line"}` for
    each line of output that one of `patterns` is found in.
    """

    def __init__(
        self, number: int, log: str, reports: str, outbox: Outbox, listen: Callable[[dict[str, Any]], None]
    ) -> None:
        self.number = number
        self.path = log
        self.log = Follower(log)
        self.reports = Follower(reports)
        self.outbox = outbox
        self.listen = listen
        self.store: agent_logs.LogStore | None = None
        self.patterns: list[re.Pattern[bytes]] = []
        self._kept_from = 0  # the first byte that a detached run's store has
        self._report = b""
        self._line = b""
        self._mask = agent_mask.FileMask(agent_mask.MASK)

    @property
    def begin(self) -> int:
        """The first byte of the log that this host still has."""
        return self.log.punched if self.store is None else self._kept_from

    @property
    def poll_s(self) -> float:
        """How long to sleep when there was nothing."""
        return POLL_S if self.store is None else DETACHED_POLL_S

    def detach(self, patterns: list[str]) -> None:
        """Keep the output here from now on, with all that the host still has. Raises OSError."""
        raw = agent_logs.raw_path(self.path)
        os.rename(self.path, raw)  # the ranks go on writing to it
        self.log.path = raw
        self.log.offset = self._kept_from = self.log.punched
        self._mask = agent_mask.FileMask(agent_mask.MASK)
        self.patterns = [re.compile(pattern.encode()) for pattern in patterns]
        self.store = agent_logs.LogStore(self.path, self.log.offset)

    def pass_on(self, hurry: bool) -> bool:
        """Pass on at most one piece of each file. Returns whether there was any."""
        if self.store is None and not self.outbox.wait_for_room(POLL_S):
            return not hurry
        data = self.reports.peek(CHUNK)
        self.reports.advance(len(data))
        *lines, self._report = (self._report + data).split(b"\n")
        for line in filter(None, lines):
            self.emit("report", line=agent_mask.MASK.text(line.decode("utf-8", "surrogateescape")))
        if self.store is not None:
            return bool(self._keep(self.store) or data)
        return bool(self._send() or data)

    def emit(self, event: str, **data: Any) -> None:
        """Tell whoever is there."""
        message = {"event": event, "node": self.number, **data}
        if event != "output":
            self.listen(message)
        if self.store is None:
            self.outbox.put(message)

    def end(self) -> None:
        """Pass on the last half character, close the files."""
        if self.store is not None:
            self.store.close()
            return
        self._send(last=True)
        rest = self.log.end()
        if rest:
            self.emit("output", data=rest)

    def _send(self, last: bool = False) -> int:
        data = self._mask.show(self.log.peek(CHUNK), last)
        self.log.advance(len(data))
        self._mask.advance(len(data))
        text = self.log.decoder.decode(data)
        if text:
            self.emit("output", data=text)
        return len(data)

    def _keep(self, store: agent_logs.LogStore) -> int:
        data = self._mask.show(self.log.peek(agent_logs.CHUNK))
        before = store.size
        with contextlib.suppress(OSError):  # the disk may be full: what could not be copied stays where it is
            store.write(data)
        length = store.size - before
        self.log.advance(length)
        self._mask.advance(length)
        if self.patterns:
            *lines, self._line = (self._line + data[:length]).split(b"\n")
            self._line = self._line[-65536:]
            for line in lines:
                if any(pattern.search(line) for pattern in self.patterns):
                    self.listen({"event": "line", "node": self.number, "line": line.decode("utf-8", "replace")})
        return length
