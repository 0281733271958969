"""The logs of a run's vLLM nodes, read while others write them: the record's files here, the log store on the hosts."""

from __future__ import annotations

import codecs
import glob
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.logs import MAX_LINE, readable
from cpupp.launch.run_hosts import RunHosts
from cpupp.plan.runs import Run

CHUNK = 1 << 20
POLL_S = 0.3
LONGEST_PARTIAL = 1 << 20
_NODE_FILE = re.compile(r"node-(\d+)-(.+?)((?:\.\d{3,})?)\.log")


class FileLog:
    """The parts of one vLLM node's log in the record, in order, across the moment in which a part is closed.

    `node-0-a.001.log`, `node-0-a.002.log`, ..., `node-0-a.log`. offset: bytes read so far.
    """

    def __init__(self, folder: Path, node: int, host: str) -> None:
        self.offset = 0
        self._folder = folder
        self._stem = f"node-{node}-{host}"
        self._file: FileIO | None = None

    def read(self) -> bytes:
        """The next bytes, none at the end. A part that is renamed while it is read is read to its end all the same."""
        data = self._read()
        self.offset += len(data)
        return data

    def _read(self) -> bytes:
        while True:
            if self._file is not None and (data := self._file.read(CHUNK)):
                return data
            following = self._following()
            if following is None:
                return b""
            if self._file is not None:
                if data := self._file.read(CHUNK):  # appended between the two looks
                    following.close()
                    return data
                self._file.close()
            self._file = following

    def _following(self) -> FileIO | None:
        """The part after the one that is open."""
        parts = self._parts()
        place = 0
        if self._file is not None:
            inodes = [_inode(part) for part in parts]
            current = os.fstat(self._file.fileno()).st_ino
            place = inodes.index(current) + 1 if current in inodes else len(parts)
        try:
            return FileIO(parts[place]) if place < len(parts) else None
        except OSError:
            return None

    def close(self) -> None:
        """Close the part that is open."""
        if self._file is not None:
            self._file.close()

    def _parts(self) -> list[Path]:
        closed = sorted(self._folder.glob(f"{glob.escape(self._stem)}.[0-9]*.log"))
        growing = self._folder / f"{self._stem}.log"
        return [*closed, *([growing] if growing.exists() else [])]


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


class HostLog:
    """One vLLM node's log in the store of its host; offsets there count all bytes that the vLLM node ever wrote.

    patience_s: how long a host that cannot be asked is asked again. ended: nothing will come any more.
    """

    def __init__(self, hosts: RunHosts, host: str, run: str, node: int, *, patience_s: float = 0.0) -> None:
        self.ended = False
        self.error: CpuppError | None = None
        self._ask = partial(hosts.ask, host, "run_log", run=run, node=node, host=host)
        self._patience_s = patience_s
        self._failing_since: float | None = None

    def read(self, offset: int) -> tuple[bytes, int]:
        """The bytes from an offset on and the next offset. While the host cannot be asked, `error` says why."""
        try:
            reply = self._ask(offset=offset, size=CHUNK)
        except CpuppError as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            self.error = error
            lost = error.exit_code == ExitCode.UNREACHABLE
            self.ended = not lost or now - self._failing_since >= self._patience_s
            return b"", offset
        self.error = self._failing_since = None
        data = str(reply["data"]).encode("utf-8", "surrogateescape")
        self.ended = bool(reply["ended"]) and not data
        return data, int(reply["offset"])


class LogStream:
    """Whole lines of one vLLM node: from the record while that has more, then from where it ends on the host.

    Either may be missing. The record may grow while the host is read (`cpupp stop` fetches what the host kept): an
    offset means the same byte in both, so nothing comes twice. shift: what the host's offsets are ahead, because the
    record hides secrets.
    """

    def __init__(self, node: int, host: str, files: FileLog | None, store: HostLog | None, shift: int = 0) -> None:
        self._shift = shift
        self.node = node
        self.host = host
        self._files = files
        self._store = store
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._partial = ""

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more once the run has ended and `lines` has returned None."""
        return self._store is None or self._store.ended

    @property
    def error(self) -> CpuppError | None:
        """Why the host's part is missing, if it is."""
        return self._store.error if self._store is not None else None

    def lines(self) -> list[str] | None:
        """The next whole lines, as people can read them; None when there is nothing new."""
        data = self._next()
        if not data:
            return None
        *lines, self._partial = (self._partial + self._decoder.decode(data)).split("\n")
        if len(self._partial) > LONGEST_PARTIAL:
            lines.append(self._partial)
            self._partial = ""
        return [readable(piece) for line in lines for piece in _pieces(line)]

    def _next(self) -> bytes:
        data = self._from_files()
        if data or self._store is None:
            return data
        data, following = self._store.read(self._offset + self._shift)
        self._offset = following - self._shift
        # What a host has forgotten is in the record since a moment ago.
        return data or (self._from_files() if self._store.ended else b"")

    def _from_files(self) -> bytes:
        while self._files is not None and (data := self._files.read()):
            known = self._offset - (self._files.offset - len(data))
            self._offset = max(self._offset, self._files.offset)
            if fresh := data[max(0, known) :]:
                return fresh
        return b""

    def history(self) -> Iterator[str]:
        """Every whole line that there is now."""
        while (lines := self.lines()) is not None:
            yield from lines

    def rest(self) -> list[str]:
        """The unfinished line at the end."""
        line, self._partial = self._partial, ""
        return [readable(piece) for piece in _pieces(line)] if line else []

    def close(self) -> None:
        """Let go of the record's files."""
        if self._files is not None:
            self._files.close()


def _pieces(line: str) -> list[str]:
    """A line in pieces of which `readable` cuts nothing off; nearly always one."""
    return [line[start : start + MAX_LINE] for start in range(0, max(1, len(line)), MAX_LINE)]


def follow(streams: Sequence[LogStream], run_ended: Callable[[], bool]) -> Iterator[tuple[int, list[str]]]:
    """Yield (index of the stream, new lines) until the run has ended and every stream is read to its end.

    A thread for each stream, so that a host that does not answer holds up none of the others.
    """
    found: queue.Queue[tuple[int, list[str] | None]] = queue.Queue(maxsize=64)

    def read(index: int, stream: LogStream) -> None:
        while True:
            over = run_ended()
            lines = stream.lines()
            if lines:
                found.put((index, lines))
            elif lines is None and over and stream.ended:
                break
            elif lines is None:
                time.sleep(POLL_S)
        found.put((index, stream.rest()))
        found.put((index, None))

    for index, stream in enumerate(streams):
        threading.Thread(target=read, args=(index, stream), daemon=True, name=f"logs-{stream.node}").start()
    left = len(streams)
    while left:
        index, lines = found.get()
        if lines is None:
            left -= 1
        elif lines:
            yield index, lines


def nodes_recorded(folder: Path) -> dict[int, str]:
    """The vLLM nodes that have a log in a folder, with their hosts."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for path in folder.iterdir():
            match = _NODE_FILE.fullmatch(path.name)
            if match:
                found[int(match[1])] = match[2]
    return dict(sorted(found.items()))


def attempt_folder(run_folder: Path, attempt: int) -> Path:
    """Where the logs of an attempt are."""
    logs = run_folder / "logs"
    return logs if attempt == 1 else logs / f"attempt-{attempt}"


def log_streams(
    run: Run, nodes: Mapping[int, str], hosts: RunHosts, *, attempt: int, ask_hosts: bool, patience_s: float = 0.0
) -> list[LogStream]:
    """One stream for each of the vLLM nodes (node rank -> host). ask_hosts: they have what the record may lack."""
    folder = attempt_folder(Path(run.folder), attempt) if run.folder else None
    return [
        LogStream(
            node,
            host,
            FileLog(folder, node, host) if folder is not None else None,
            HostLog(hosts, host, run.run, node, patience_s=patience_s) if ask_hosts else None,
            run.log_shifts.get(node, 0),
        )
        for node, host in nodes.items()
    ]
