"""What a detached vLLM node wrote, kept on its host in parts of 64 MiB; and reading it by offset.

The ranks append to one file for ever, which cannot be exchanged under them. So the agent copies it, `node0.raw`, into
its own `node0.log`, renames a full one to `node0.001.log`, and gives the blocks of what was copied back. Offsets count
all bytes that the node ever wrote. An attached launcher keeps the output itself; then the ranks write to `node0.log`.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

from . import agent_mask

PART = 64 << 20
CHUNK = 1 << 20


def raw_path(log: str) -> str:
    """Return where the ranks' own file goes when the log at the path `log` becomes the agent's copy."""
    return log[: -len(".log")] + ".raw"


def closed_path(log: str, index: int) -> str:
    """Return the path of the closed part number `index`, from 1."""
    return f"{log[: -len('.log')]}.{index:03d}.log"


def parts(log: str) -> list[str]:
    """Return the parts of a log, oldest first; the last is the one that grows, if it is there."""
    folder, name = os.path.split(log)
    pattern = re.compile(re.escape(name[: -len(".log")]) + r"\.(\d+)\.log$")
    with contextlib.suppress(OSError):
        closed = [(int(match[1]), entry) for entry in os.listdir(folder) for match in [pattern.match(entry)] if match]
        names = [entry for _, entry in sorted(closed)]
        return [os.path.join(folder, entry) for entry in names] + ([log] if os.path.exists(log) else [])
    return []


class LogStore:
    """The agent's copy of one node's log, at `log`. begin: the first byte that is still there to be copied."""

    def __init__(self, log: str, begin: int, part: int = PART) -> None:
        self.log = log
        self.part = part
        self.closed = 0
        self._descriptor = -1
        present = parts(log)
        self.size = sum(map(os.path.getsize, present))
        self.closed = sum(path != log for path in present)
        # What an attached launcher took is a hole here, so that offsets mean the same everywhere.
        while self.size < begin:
            self._skip(min(begin - self.size, self._room()))

    def write(self, data: bytes) -> None:
        """Append. Raises OSError, with `size` telling how far it came."""
        view = memoryview(data)
        while view:
            if self._descriptor < 0:
                self._descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            written = os.pwrite(self._descriptor, view[: self._room()], self.size - self.closed * self.part)
            self._grown(written)
            view = view[written:]

    def close(self) -> None:
        """Close the part that grows."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _room(self) -> int:
        return (self.closed + 1) * self.part - self.size

    def _skip(self, length: int) -> None:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, self.size + length - self.closed * self.part)
        finally:
            os.close(descriptor)
        self._grown(length)

    def _grown(self, length: int) -> None:
        self.size += length
        if not self._room():
            self.close()
            os.rename(self.log, closed_path(self.log, self.closed + 1))
            self.closed += 1


def complete(log: str, part: int = PART) -> None:
    """Copy what the agent could not copy any more, when nothing writes to the raw file; then remove that file."""
    raw = raw_path(log)
    if not os.path.exists(raw):
        return
    store = LogStore(log, 0, part)
    mask = agent_mask.FileMask(agent_mask.MASK)
    with open(raw, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        while store.size < end:
            file.seek(store.size)
            data = file.read(CHUNK)
            shown = mask.show(data, last=file.tell() >= end)
            store.write(shown)
            mask.advance(len(shown))
    store.close()
    os.unlink(raw)


class Piece(NamedTuple):
    """Bytes of a log: those up to `offset`; `size` is where the log ends now."""

    data: bytes
    offset: int
    size: int


def read_log(log: str, offset: int, size: int, begin: int = 0) -> Piece:
    """Read at most `size` bytes from `offset` on; a negative one counts from the end. Raises OSError.

    begin: where the log begins, because what came before it was given to a launcher.
    """
    paths = parts(log)
    if not paths:
        raise FileNotFoundError(2, "no such log", log)
    sizes = [os.path.getsize(path) for path in paths]
    total = sum(sizes)
    offset = min(max(offset + total if offset < 0 else offset, begin), total)
    data, start = b"", 0
    for path, length in zip(paths, sizes):  # noqa: B905  # Python 3.8 has no `strict`
        if start + length > offset + len(data) and len(data) < size:
            with open(path, "rb") as file:
                file.seek(offset + len(data) - start)
                data += file.read(min(size - len(data), start + length - offset - len(data)))
        start += length
    return Piece(data, offset + len(data), total)


def last_lines(log: str, number: int = 20, size: int = 16384) -> list[str]:
    """Return the last lines of a log as text, none when it cannot be read."""
    with contextlib.suppress(OSError):
        piece = read_log(log, -size, size)
        text = agent_mask.MASK.text(piece.data.decode("utf-8", "replace"))
        return text.replace("\0", "").splitlines()[-number:]
    return []
