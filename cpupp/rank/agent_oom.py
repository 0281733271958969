"""The kernel's own word for a process that was killed: the out-of-memory killer's log, or its count in the cgroup."""

from __future__ import annotations

import contextlib
import os
import re

_KILLED = re.compile(r"\bKilled process (\d+)\b")


class KernelWord:
    """What the kernel says from now on; both sources may be closed to this user, and then it says nothing."""

    def __init__(self) -> None:
        self.counts = oom_counts()
        self.killed: dict[int, str] = {}
        self._log = -1
        with contextlib.suppress(OSError):
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def about(self, pid: int) -> str:
        """Return one sentence when the kernel killed `pid` for want of memory, empty when it does not say so."""
        self._read()
        if pid in self.killed:
            return f"the kernel says: {self.killed[pid]}"
        for path, count in oom_counts().items():
            more = count - self.counts.get(path, count)
            if more > 0:
                self.counts[path] = count
                return f"the kernel's out-of-memory killer struck in this cgroup ({path}: oom_kill +{more})"
        return ""

    def close(self) -> None:
        """Close the log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self._log >= 0:
                try:
                    record = os.read(self._log, 8192)
                except BrokenPipeError:  # that record was overwritten; the next read goes on behind it
                    continue
                self.killed.update(killed_process(record.decode("utf-8", "replace")))


def killed_process(record: str) -> dict[int, str]:
    """Return the pid and the line of a record of /dev/kmsg (`level,number,time,flags;text`) that tells of a kill."""
    text = record.partition(";")[2].partition("\n")[0]
    match = _KILLED.search(text)
    return {int(match[1]): text} if match else {}


def oom_counts() -> dict[str, int]:
    """Return the `oom_kill` counts of this process's memory cgroup, by file; cgroup v2 and v1."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file.read().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found.update(_first(f"/sys/fs/cgroup{path}/memory.events", "/sys/fs/cgroup/memory.events"))
            elif "memory" in controllers.split(","):
                # In a container the path is often the host's, and the files are at the top.
                name = "memory.oom_control"
                found.update(_first(f"/sys/fs/cgroup/memory{path}/{name}", f"/sys/fs/cgroup/memory/{name}"))
    return found


def _first(*paths: str) -> dict[str, int]:
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return {path: int(value)}
    return {}
