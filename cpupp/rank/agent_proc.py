"""Processes and shared memory segments of this host, as /proc shows them. Standard library only, Linux only.

Nothing is ever found by name: a process is ours when the chain of parents leads to the keeper that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

SHM = "/dev/shm"
PR_SET_CHILD_SUBREAPER = 36
STRANGERS_S = 30.0


class Proc(NamedTuple):
    """One process: parent, state letter, and start time in clock ticks since boot (pid and start never repeat).

    status: the wait status of a zombie (0 where the kernel hides it), else 0.
    """

    ppid: int
    state: str
    start: int
    status: int

    @property
    def ended(self) -> bool:
        """Whether it has exited and only waits for its parent to notice."""
        return self.state in ("Z", "X")


def become_subreaper() -> None:
    """Make orphans among our descendants our children instead of init's. Raises OSError when the kernel refuses."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, "prctl(PR_SET_CHILD_SUBREAPER): " + os.strerror(error))


def read_process(pid: int) -> Proc | None:
    """Return what /proc says about a process, None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except OSError:
        return None
    # The command name is in parentheses and may contain both spaces and parentheses.
    fields = data[data.rfind(b")") + 2 :].split()
    return Proc(int(fields[1]), fields[0].decode(), int(fields[19]), int(fields[49]))


def name_of(pid: int) -> str:
    """Return the name that the process gave itself, or that of its program; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def process_table(skip: Container[int] = ()) -> dict[int, Proc]:
    """Return every process that this user can see, by pid, except those in `skip`."""
    table: dict[int, Proc] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in skip:
            process = read_process(int(name))
            if process is not None:
                table[int(name)] = process
    return table


def descendants(roots: Iterable[int], table: dict[int, Proc]) -> set[int]:
    """Return the pids below `roots` (not the roots), zombies included."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.ppid, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


class Strangers:
    """Processes known not to be below this one: a look at the table need not read them again.

    A process never comes below another than those of its own ancestors. Only a pid that is used again can mislead,
    so all are forgotten every half minute.
    """

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._forget_at = 0.0

    def table(self, now: float) -> dict[int, Proc]:
        """Return the table of processes without strangers; complete as to what is below this process."""
        if now >= self._forget_at:
            self._pids.clear()
            self._forget_at = now + STRANGERS_S
        table = process_table(self._pids)
        # Of a process whose parent is gone already, nothing can be said yet.
        others = {pid: process for pid, process in table.items() if pid != os.getpid()}
        self._pids |= descendants([0, *self._pids], others)
        return table


def no_child() -> bool:
    """Whether this process has no child at all, zombies included. Costs nothing, and reaps nothing."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists and that this user may signal."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def reap_children(own: Iterable[int]) -> dict[int, int]:
    """Collect the exit codes (negative: signal) of ended children among `own`."""
    codes = {}
    for pid in own:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except OSError:
            continue
        if done:
            codes[pid] = exit_code(status)
    return codes


def exit_code(status: int) -> int:
    """Turn a wait status into an exit code, negative for a signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def kill_below(root: int, spare: set[int], deadline_s: float) -> tuple[dict[int, int], set[int]]:
    """KILL every descendant of `root` (this process) except the children in `spare` and what is below those.

    Repeats until nothing is left or `deadline_s` has passed, because a process can fork while we look.
    Returns the exit codes of reaped children and the pids still alive.
    """
    codes: dict[int, int] = {}
    end = time.monotonic() + deadline_s
    while True:
        table = process_table()
        children = {pid for pid, process in table.items() if process.ppid == root and pid not in spare}
        everything = children | descendants(children, table)
        if not everything or time.monotonic() > end:
            return codes, everything
        send_signal(everything, signal.SIGKILL)
        codes.update(reap_children(children))
        time.sleep(0.01)


def shm_files(owned_only: bool = True) -> dict[str, tuple[int, int]]:
    """Return the plain files directly in /dev/shm, by name; only this user's when `owned_only`."""
    found: dict[str, tuple[int, int]] = {}
    try:
        entries = list(os.scandir(SHM))
    except OSError:
        return found
    for entry in entries:
        try:
            state = entry.stat(follow_symlinks=False)
            if entry.is_file(follow_symlinks=False) and (state.st_uid == os.getuid() or not owned_only):
                found[entry.name] = (state.st_dev, state.st_ino)
        except OSError:
            continue
    return found


def shm_in_use(pids: Iterable[int], device: int) -> set[tuple[int, int]]:
    """Return device and inode of the files on the /dev/shm device that belong to the processes.

    Those are the ones that they map or hold open, and the marks of Intel's OpenMP library, which it neither maps nor
    holds after its start, and leaves behind when its process is killed.
    """
    found: set[tuple[int, int]] = set()
    for pid in pids:
        found |= _mapped(pid, device)
        found |= _opened(pid, device)
        with contextlib.suppress(OSError):
            state = os.stat(f"{SHM}/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")
            found.add((state.st_dev, state.st_ino))
    return found


def _mapped(pid: int, device: int) -> set[tuple[int, int]]:
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            data = file.read()
    except OSError:
        return set()
    mark = b" %02x:%02x " % (os.major(device), os.minor(device))
    if mark not in data:
        return set()
    return {(device, int(line.split(None, 5)[4])) for line in data.split(b"\n") if mark in line}


def _opened(pid: int, device: int) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        try:
            # readlink first: a stat of every descriptor would follow into sockets, pipes and dead NFS mounts.
            if os.readlink(folder + "/" + name).startswith(SHM + "/"):
                state = os.stat(folder + "/" + name)
                if state.st_dev == device:
                    found.add((device, state.st_ino))
        except OSError:
            continue
    return found


def remove_segments(candidates: Iterable[tuple[int, int]], prefix: str = "") -> list[str]:
    """Remove this user's files in /dev/shm that are in `candidates` or begin with `prefix`, unless a process uses them.

    Returns the names removed. A file that any process we can see maps or holds open is left alone.
    """
    wanted = set(candidates)
    files = {name: key for name, key in shm_files().items() if key in wanted or (prefix and name.startswith(prefix))}
    if not files:
        return []
    device = next(iter(files.values()))[0]
    used = shm_in_use(process_table(), device)
    removed = []
    for name, key in files.items():
        if key in used:
            continue
        with contextlib.suppress(OSError):
            os.unlink(f"{SHM}/{name}")
            removed.append(name)
    return sorted(removed)
