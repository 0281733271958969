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
from pathlib import Path
from typing import BinaryIO, Protocol

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.logs import MAX_LINE, readable
from cpupp.launch.run_hosts import RunHosts
from cpupp.plan.runs import Run

CHUNK = 1 << 20
POLL_S = 0.3
_NODE_FILE = re.compile(r"node-(\d+)-(.+?)((?:\.\d{3,})?)\.log")
AFTER_DETACH = ".detached.log"
"""Ending of the file into which `stop` copies what a vLLM node wrote after its launcher had left."""


class Source(Protocol):
    """A log that grows. ended: nothing will come any more, once `read` has returned nothing."""

    ended: bool

    def read(self) -> bytes:
        """The next bytes; none when there are none yet."""


class FileLog:
    """The parts of one vLLM node's log in the record, in order, across the moment in which a part is closed.

    `node-0-a.001.log`, `node-0-a.002.log`, ..., `node-0-a.log`; whole: also what `stop` fetched from the host.
    """

    def __init__(self, folder: Path, node: int, host: str, *, whole: bool = True) -> None:
        self.ended = True
        self._folder = folder
        self._stem = f"node-{node}-{host}"
        self._whole = whole
        self._file: BinaryIO | None = None

    def read(self) -> bytes:
        """The next bytes. A part that is renamed while it is read stays open and is read to its end."""
        while True:
            data = self._file.read(CHUNK) if self._file is not None else b""
            if data:
                return data
            following = self._following()
            if following is None:
                return b""
            if self._file is not None:
                if data := self._file.read(CHUNK):  # appended between the two looks
                    return data
                self._file.close()
            self._file = following

    def _following(self) -> BinaryIO | None:
        """The part after the one that is open."""
        parts = self._parts()
        place = 0
        if self._file is not None:
            inodes = [_inode(part) for part in parts]
            current = os.fstat(self._file.fileno()).st_ino
            place = inodes.index(current) + 1 if current in inodes else len(parts)
        try:
            return parts[place].open("rb", buffering=0) if place < len(parts) else None
        except OSError:
            return None

    def _parts(self) -> list[Path]:
        closed = sorted(self._folder.glob(f"{glob.escape(self._stem)}.[0-9]*.log"))
        open_one = [f"{self._stem}.log", *([self._stem + AFTER_DETACH] if self._whole else [])]
        return [*closed, *(path for name in open_one if (path := self._folder / name).exists())]


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


class HostLog:
    """One vLLM node's log in the store of its host, of a run that was detached.

    patience_s: how long a host that cannot be asked is asked again; copy: where `stop` may put the log meanwhile.
    """

    def __init__(
        self, hosts: RunHosts, host: str, run: str, node: int, *, copy: Path | None = None, patience_s: float = 0.0
    ) -> None:
        self.ended = False
        self.error: CpuppError | None = None
        self._ask = partial(hosts.ask, host, "run_log", run=run, node=node, host=host)
        self._copy = copy
        self._patience_s = patience_s
        self._failing_since: float | None = None
        self._offset = 0

    def read(self) -> bytes:
        """The next bytes. The reason why a host cannot be asked is in `error`, for as long as it cannot."""
        try:
            reply = self._ask(offset=self._offset, size=CHUNK)
        except CpuppError as error:
            return self._without_host(error)
        self.error = self._failing_since = None
        data = str(reply["data"]).encode("utf-8", "surrogateescape")
        self._offset = int(reply["offset"])
        self.ended = bool(reply["ended"]) and not data
        return data

    def _without_host(self, error: CpuppError) -> bytes:
        if self._copy is not None and self._copy.exists():
            with self._copy.open("rb") as file:
                file.seek(self._offset)
                data = file.read(CHUNK)
            self._offset += len(data)
            self.ended = not data
            return data
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self.error = error
        self.ended = error.exit_code != ExitCode.UNREACHABLE or now - self._failing_since >= self._patience_s
        return b""


class LogStream:
    """Whole lines of several sources of one vLLM node, one after the other; an earlier source is read to its end."""

    def __init__(self, node: int, host: str, sources: Sequence[Source]) -> None:
        self.node = node
        self.host = host
        self._sources = sources
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._partial = ""

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more, once `lines` has returned None."""
        return all(source.ended for source in self._sources)

    @property
    def error(self) -> CpuppError | None:
        """Why the host's part is missing, if it is."""
        return next((error for source in self._sources if (error := getattr(source, "error", None))), None)

    def lines(self) -> list[str] | None:
        """The next whole lines, as people can read them; None when there is nothing new."""
        data = next((data for source in self._sources if (data := source.read())), None)
        if data is None:
            return None
        *lines, self._partial = (self._partial + self._decoder.decode(data)).split("\n")
        if len(self._partial) > MAX_LINE:
            lines.append(self._partial)
            self._partial = ""
        return [readable(line) for line in lines]

    def history(self) -> Iterator[str]:
        """Every whole line that there is now."""
        while (lines := self.lines()) is not None:
            yield from lines

    def rest(self) -> list[str]:
        """The unfinished line at the end."""
        line, self._partial = self._partial, ""
        return [readable(line)] if line else []


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
            match = _NODE_FILE.fullmatch(path.name.replace(AFTER_DETACH, ".log"))
            if match:
                found[int(match[1])] = match[2]
    return dict(sorted(found.items()))


def attempt_folder(run_folder: Path, attempt: int) -> Path:
    """Where the logs of an attempt are."""
    logs = run_folder / "logs"
    return logs if attempt == 1 else logs / f"attempt-{attempt}"


def log_streams(
    run: Run, nodes: Mapping[int, str], hosts: RunHosts, *, attempt: int, collected: bool, patience_s: float = 0.0
) -> list[LogStream]:
    """One stream for each of the vLLM nodes (node rank -> host): its files in the record, then its host's store.

    collected: the hosts have nothing (more) that the record lacks.
    """
    folder = attempt_folder(Path(run.folder), attempt) if run.folder else None
    streams = []
    for node, host in nodes.items():
        sources: list[Source] = []
        if folder is not None:
            sources.append(FileLog(folder, node, host, whole=collected))
        if not collected and attempt == run.attempt:
            copy = folder / f"node-{node}-{host}{AFTER_DETACH}" if folder is not None else None
            sources.append(HostLog(hosts, host, run.run, node, copy=copy, patience_s=patience_s))
        streams.append(LogStream(node, host, sources))
    return streams
