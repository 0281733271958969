"""Look at processes, and keep track of those that lose their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process as /proc shows it at one moment."""

    pid: int
    parent: int
    state: str
    started: int  # clock ticks since boot; with the pid, the identity of the process
    cpu_seconds: float  # its own and that of the children it has waited for
    command: str

    @property
    def alive(self) -> bool:
        """Whether it still runs: a zombie is an exit status that nobody has fetched, not a process."""
        return self.state not in "ZX"

    def __str__(self) -> str:
        return f"{self.pid} (parent {self.parent}, {self.state}) {self.command}"


def look(pid: int) -> Process | None:
    """Process `pid`, or None when there is none."""
    folder = Path(f"/proc/{pid}")
    try:
        head, _, tail = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    fields = tail.split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        state=fields[0],
        started=int(fields[19]),
        cpu_seconds=sum(int(field) for field in fields[11:15]) / TICKS_PER_SECOND,
        command=command or head.partition("(")[2],
    )


def alive(pid: int) -> bool:
    """Whether process `pid` runs. A zombie does not."""
    process = look(pid)
    return process is not None and process.alive


def in_mount_namespace(namespace: str) -> Iterator[Process]:
    """Every living process of the mount namespace `namespace` (as readlink of /proc/PID/ns/mnt gives it)."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208 (names only, and many)
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/mnt") == namespace:  # noqa: PTH115
                process = look(pid)
                if process is not None and process.alive:
                    yield process


def children(pid: int) -> list[int]:
    """Pids of the children of `pid`."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return found


def descendants(pid: int) -> list[int]:
    """Pids of the children of `pid`, of theirs, and so on."""
    found: list[int] = []
    todo = children(pid)
    while todo:
        child = todo.pop()
        found.append(child)
        todo += children(child)
    return found


class OrphanWatch:
    """Makes this process the parent of every orphan among its descendants, and knows which children are orphans.

    Without it an orphan goes to pid 1, and nobody can tell that it came from a test. A thread looks at the descendants
    a few times a second: a process that had another parent before and has this one now is an orphan. The thread also
    fetches the exit status of dead orphans, as pid 1 would, for a zombie still counts in its process group. Children
    that this process started itself are left to whoever started them.
    """

    def __init__(self, interval_s: float = 0.2) -> None:
        self._interval_s = interval_s
        self._me = os.getpid()
        self._grandchildren: set[tuple[int, int]] = set()
        self._orphans: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orphan-watch", daemon=True)

    def start(self) -> None:
        """Become the parent of orphans and begin to look."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join()

    def knows(self, pid: int) -> bool:
        """Whether it has seen this process while another one was its parent."""
        with self._lock:
            self._look()
            return any(known == pid for known, _ in self._grandchildren)

    def orphans(self) -> list[Process]:
        """The living orphans, as of now."""
        with self._lock:
            self._look()
            found = [look(pid) for pid in self._orphans]
        return [process for process in found if process is not None and process.alive]

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            with self._lock:
                self._look()

    def _look(self) -> None:
        """Sort the descendants into those of others and orphans; fetch the status of dead orphans."""
        seen: set[tuple[int, int]] = set()
        for pid in descendants(self._me):
            process = look(pid)
            if process is None:
                continue
            identity = (pid, process.started)
            if process.parent != self._me:
                seen.add(identity)
            elif identity in self._grandchildren:
                self._orphans[pid] = process.started
        self._grandchildren = seen
        for pid, started in list(self._orphans.items()):
            process = look(pid)
            if process is None or process.started != started:
                del self._orphans[pid]
            elif not process.alive:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                del self._orphans[pid]
