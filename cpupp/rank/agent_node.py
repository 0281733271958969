"""The agent's side of one vLLM node: its keeper, and the two files that the node writes.

The ranks write to files, so nothing that happens between host and launcher can stall them; a thread follows the files
and passes on what is new. Events of one node are sent by that thread alone, in order: output, exited, output, gone.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035  # Python 3.8 cannot subscript collections.abc.Callable

from . import agent_oom, agent_proc
from .agent_halted import HaltWatch
from .agent_output import Output

if TYPE_CHECKING:
    from .agent_children import Children
    from .agent_outbox import Outbox

# The launcher's remote command is the same text; the keeper's source travels on its stdin.
START = 'import sys;n=int(sys.stdin.buffer.readline());exec(compile(sys.stdin.buffer.read(n),"cpupp-keeper","exec"))'


class NodeError(Exception):
    """The node's process could not be started; the text is the host's own."""


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
        listen: Callable[[dict[str, Any]], None],
    ) -> None:
        self.number = number
        self.order = order
        self.output = Output(number, order["log"], reports, outbox, listen)
        self.children = children
        self.sources = sources
        self.kernel = agent_oom.KernelWord()
        self.strangers = set(agent_proc.shm_files(owned_only=False).values())
        self.segments: set[tuple[int, int]] = set()
        self.exited = False
        self.exit_code: int | None = None
        self.pids: list[int] = []  # its processes, as the keeper saw them last
        self.stopped = False
        self.main_pid = 0
        self.heard = time.monotonic()
        self.hurry = threading.Event()  # set when output may be left behind
        self.gone = threading.Event()  # nothing of the node runs any more
        self.drained = threading.Event()  # and all its events were queued
        self.listen = listen
        self.deaf = False  # its keeper does not answer any more
        self._detach: list[str] | None = None
        self._detached = threading.Event()
        self._statuses: collections.deque[dict[str, Any]] = collections.deque()
        self._first = threading.Event()
        self._error = ""
        self._read_end, self._write_end = -1, -1
        self._write_lock = threading.Lock()
        self.keeper: subprocess.Popen[bytes] | None = None
        self.halts = HaltWatch()

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
            self.kernel.close()
            raise NodeError(self._error)
        threading.Thread(target=self._follow, name=f"follow-{self.number}", daemon=True).start()
        return self.main_pid

    def tick(self, silence_s: float) -> None:
        """Tell the keeper that the agent lives; end a keeper that is stopped, or has said nothing for `silence_s`."""
        if self.gone.is_set() or self.keeper is None:
            return
        self._order(b"")
        now = time.monotonic()
        if now - self.heard <= silence_s and not self.halts.look(self.keeper.pid, now):
            return
        self.deaf = True
        if self._detached.is_set():
            # As long as the ranks live they can tell the other hosts; the end that follows kills the keeper.
            words = f"the keeper of vLLM node {self.number} is stopped or does not answer"
            self.listen({"event": "keeper_lost", "node": self.number, "message": words})
        else:
            self.kill_keeper()

    @property
    def runs(self) -> bool:
        """Whether its main process was started and has not ended."""
        return bool(self.main_pid) and not self.exited and not self.gone.is_set()

    def detach(self, leash_s: float, grace_s: float, patterns: list[str]) -> bool:
        """Keep the output here from now on; the keeper is less patient with the agent. Returns whether it is done."""
        self._order(json.dumps({"leash": leash_s, "grace": grace_s}).encode())
        self._detach = patterns
        return self._detached.wait(10.0)

    def stop(self, grace_s: float) -> None:
        """Order the keeper to end the node. Returns at once; `gone` is set when nothing is left."""
        self.stopped = True
        self._order(json.dumps({"stop": grace_s}).encode())
        if self.deaf:
            self.kill_keeper()

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
            if "pids" in status:
                self.pids[status["from"] :] = status["pids"]
            finished = finished or "gone" in status
            if "exited" in status:
                self.exited, self.exit_code = True, status["exited"]
            if not status.keys() & {"shm", "pids"}:
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
            self.exited, self.exit_code = True, codes.get(self.main_pid, -9)
            self._statuses.append({"exited": self.exit_code})
        self._statuses.append({"gone": removed, "left": sorted(left)})

    def _follow(self) -> None:
        """Send output, reports and statuses in order until the node is gone."""
        output = self.output
        while True:
            if self._detach is not None and not self._detached.is_set():
                output.detach(self._detach)
                self._detached.set()
            status = self._statuses.popleft() if self._statuses else None
            if status is not None and "spawned" in status:
                output.emit("spawned", pid=status["spawned"])
                continue
            # First what was written before the status, as far as it is present now.
            while output.pass_on(self.hurry.is_set()) and not self.hurry.is_set():
                pass
            if status is None:
                time.sleep(output.poll_s)
                continue
            if "gone" in status:
                self.gone.wait(1.0)  # the keeper's own end: after this event a new attempt may begin
                output.end()
                self.kernel.close()
                output.emit("gone", segments=status["gone"], left=status.get("left", []))
                self.drained.set()
                return
            if "exited" in status:
                why = self._why(self.main_pid, status["exited"])
                output.emit("exited", code=status["exited"], stopped=self.stopped, **why)
            if "died" in status:
                output.emit(
                    "process_exited",
                    pid=status["died"],
                    code=status["code"],
                    **self._why(status["died"], status["code"]),
                )
            if "keeper_lost" in status:
                output.emit("keeper_lost", message=status["keeper_lost"])

    def _why(self, pid: int, code: int | None) -> dict[str, str]:
        """The kernel's own word for the end of a process that was killed, where it can be read."""
        word = self.kernel.about(pid) if code == -9 and not self.stopped else ""
        return {"why": word} if word else {}
