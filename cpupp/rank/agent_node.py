"""The agent's side of one vLLM node: its keeper, and the two files that the node writes.

The ranks write to files, so nothing that happens between host and launcher can stall them; a thread follows the files
and passes on what is new. Events of one node are sent by that thread alone, in order: output, exited, output, gone.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from . import agent_proc

if TYPE_CHECKING:
    from .agent_children import Children
    from .agent_outbox import Outbox

# The launcher's remote command is the same text; the keeper's source travels on its stdin.
START = 'import sys;n=int(sys.stdin.buffer.readline());exec(compile(sys.stdin.buffer.read(n),"cpupp-keeper","exec"))'

CHUNK = 48 * 1024
POLL_S = 0.05
PUNCH_EVERY = 8 << 20  # bytes of a log passed on, after which their disk blocks are given back
FALLOC_PUNCH_HOLE = 0x01 | 0x02  # with FALLOC_FL_KEEP_SIZE


class NodeError(Exception):
    """The node's process could not be started; the text is the host's own."""


class Follower:
    """Reads what is appended to a file, piece by piece, decoded as UTF-8 with surrogateescape."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.offset = 0
        self.punched = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def read(self) -> tuple[int, str]:
        """Return the number of new bytes (0 when there are none) and their text, which may lag by a half character."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return 0, ""
        try:
            data = os.pread(descriptor, CHUNK, self.offset)
            self.offset += len(data)
            if self.offset - self.punched > PUNCH_EVERY:
                _give_back(descriptor, self.offset)
                self.punched = self.offset
        finally:
            os.close(descriptor)
        return len(data), self.decoder.decode(data)

    def end(self) -> str:
        """Return the text of a half character that will not be completed."""
        return self.decoder.decode(b"", True)


def _give_back(descriptor: int, length: int) -> None:
    # A run lives for weeks: what the launcher has is not kept here twice. Only a hole can be made without a race
    # against the ranks' appends; file systems that cannot do it keep the data.
    libc = ctypes.CDLL(None)
    libc.fallocate(descriptor, FALLOC_PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length))


class Node:
    """One vLLM node on this host, from `start` until its `gone` event."""

    def __init__(
        self,
        number: int,
        order: dict[str, Any],
        reports: str,
        outbox: Outbox,
        children: Children,
        sources: dict[str, str],
    ) -> None:
        self.number = number
        self.order = order
        self.outbox = outbox
        self.children = children
        self.sources = sources
        self.log = Follower(order["log"])
        self.reports = Follower(reports)
        self.report_part = ""
        self.strangers = set(agent_proc.shm_files(owned_only=False).values())
        self.segments: set[tuple[int, int]] = set()
        self.exited = False
        self.stopped = False
        self.main_pid = 0
        self.heard = time.monotonic()
        self.hurry = threading.Event()  # set when output may be left behind
        self.gone = threading.Event()  # nothing of the node runs any more
        self.drained = threading.Event()  # and all its events were queued
        self._statuses: collections.deque[dict[str, Any]] = collections.deque()
        self._first = threading.Event()
        self._error = ""
        self._read_end, self._write_end = -1, -1
        self._write_lock = threading.Lock()
        self.keeper: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the keeper and give it its order; `wait_started` tells what came of it. Raises OSError."""
        read_end, self._write_end = os.pipe()
        try:
            keeper_log = os.open(self._keeper_log(), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self.keeper = self.children.popen(
                    [sys.executable, "-ISuc", START, str(read_end)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=keeper_log,
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
            finally:
                os.close(keeper_log)
        finally:
            os.close(read_end)
        payload = f"{self.sources['agent_boot']}\nrun({self.sources!r}, 'agent_keeper')\n".encode()
        assert self.keeper.stdin is not None
        with contextlib.suppress(OSError):
            self.keeper.stdin.write(b"%d\n" % len(payload) + payload)
            self.keeper.stdin.close()
        self._order(json.dumps(self.order).encode())
        threading.Thread(target=self._watch, name=f"watch-{self.number}", daemon=True).start()

    def wait_started(self) -> int:
        """Return the main process's pid once it runs. Raises NodeError when it cannot be executed."""
        self._first.wait()
        if self._error:
            raise NodeError(self._error)
        threading.Thread(target=self._follow, name=f"follow-{self.number}", daemon=True).start()
        return self.main_pid

    def tick(self, silence_s: float) -> None:
        """Tell the keeper that the agent lives; kill a keeper that has said nothing for `silence_s`."""
        if self.gone.is_set():
            return
        self._order(b"")
        if time.monotonic() - self.heard > silence_s:
            self.kill_keeper()

    def stop(self, grace_s: float) -> None:
        """Order the keeper to end the node. Returns at once; `gone` is set when nothing is left."""
        self.stopped = True
        self._order(json.dumps({"stop": grace_s}).encode())

    def kill_keeper(self) -> None:
        """KILL the keeper; the watching thread then ends what the keeper held."""
        if self.keeper is not None and not self.gone.is_set():
            with contextlib.suppress(OSError):
                self.keeper.kill()

    def _order(self, line: bytes) -> None:
        view = memoryview(line + b"\n")
        with self._write_lock, contextlib.suppress(OSError):
            while view:
                view = view[os.write(self._write_end, view) :]

    def _keeper_log(self) -> str:
        return str(self.order["log"]) + ".keeper"

    def _watch(self) -> None:
        """Read the keeper's status lines until it ends, and take over when it ended too early."""
        keeper = self.keeper
        assert keeper is not None
        assert keeper.stdout is not None
        finished = False
        for line in keeper.stdout:
            self.heard = time.monotonic()
            status = json.loads(line)
            if "spawned" in status:
                self.main_pid = status["spawned"]
            if "error" in status:
                self._error, finished = status["error"], True
            self.segments.update(tuple(entry) for entry in status.get("shm", ()))
            finished = finished or "gone" in status
            self.exited = self.exited or "exited" in status
            if status and "shm" not in status:
                self._statuses.append(status)
                self._first.set()
        code = keeper.wait()
        self.children.forget(keeper)
        if not finished:
            self._take_over(code)
        with self._write_lock:
            os.close(self._write_end)
            self._write_end = -1
        keeper.stdout.close()
        self.gone.set()
        self._first.set()

    def _take_over(self, code: int) -> None:
        """The keeper died: its descendants are the agent's now, and end with it."""
        codes, left, segments = self.children.kill_orphans(5.0)
        self.segments.update(segments - self.strangers)
        removed = agent_proc.remove_segments(self.segments, self.order["shm_prefix"])
        words = f"the keeper of vLLM node {self.number} ended with {code}; its processes were killed"
        with contextlib.suppress(OSError), open(self._keeper_log(), encoding="utf-8", errors="replace") as file:
            words = ": ".join(filter(None, [words, file.read()[-2000:].strip()]))
        if not self.main_pid:
            self._error = words
            return
        self._statuses.append({"keeper_lost": words})
        if not self.exited:
            self._statuses.append({"exited": codes.get(self.main_pid, -9)})
        self._statuses.append({"gone": removed, "left": sorted(left)})

    def _follow(self) -> None:
        """Send output, reports and statuses in order until the node is gone."""
        while True:
            status = self._statuses.popleft() if self._statuses else None
            if status is not None and "spawned" in status:
                self._emit("spawned", pid=status["spawned"])
                continue
            # First what was written before the status, as far as it is present now.
            while self._pass_on() and not self.hurry.is_set():
                pass
            if status is None:
                time.sleep(POLL_S)
                continue
            if "gone" in status:
                self.gone.wait(1.0)  # the keeper's own end: after this event a new attempt may begin
                rest = self.log.end()
                if rest:
                    self._emit("output", data=rest)
                self._emit("gone", segments=status["gone"], left=status.get("left", []))
                self.drained.set()
                return
            if "exited" in status:
                self._emit("exited", code=status["exited"], stopped=self.stopped)
            if "died" in status:
                self._emit("process_exited", pid=status["died"], code=status["code"])
            if "keeper_lost" in status:
                self._emit("keeper_lost", message=status["keeper_lost"])

    def _pass_on(self) -> bool:
        """Send at most one piece of each file. Returns whether there was any."""
        if not self.outbox.wait_for_room(POLL_S):
            return not self.hurry.is_set()
        num_reported, text = self.reports.read()
        *lines, self.report_part = (self.report_part + text).split("\n")
        for line in filter(None, lines):
            self._emit("report", line=line)
        num_written, text = self.log.read()
        if text:
            self._emit("output", data=text)
        return bool(num_written or num_reported)

    def _emit(self, event: str, **data: Any) -> None:
        self.outbox.put({"event": event, "node": self.number, **data})
