"""Rank output: one file per vLLM node, whole lines for the console, and the last lines for the report."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from cpupp.launch.log_file import LogFile
from cpupp.launch.private import private_folder
from cpupp.launch.records import making
from cpupp.rank.agent_mask import Mask

NUM_TAIL_LINES = 40
MAX_LINE = 16 * 1024
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class NodeLog:
    """The log of one vLLM node: all output goes to `path`, secrets hidden by `mask`; complete lines come back."""

    def __init__(self, path: Path, mask: Mask | None = None) -> None:
        self.path = path
        self._file = LogFile(path)
        self._masked = (mask or Mask()).stream()
        self._num_taken = 0
        self._partial = ""
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)

    @property
    def error(self) -> str:
        """Why output is being lost, empty while none is."""
        return self._file.error

    @property
    def shift(self) -> int:
        """How many bytes more the vLLM node wrote than there are here: hidden secrets, what a full disk did not take.

        Known once it is closed.
        """
        return self._num_taken - self._file.num_bytes

    def feed(self, data: str) -> list[str]:
        """Append output (text with surrogate escapes for odd bytes) and return its new complete lines.

        A full disk loses the file's share, never the run: the reason stays in `error`.
        """
        self._num_taken += len(data.encode("utf-8", "surrogateescape"))
        return self._take(self._masked.feed(data))

    def _take(self, data: str) -> list[str]:
        self._file.write(data.encode("utf-8", "surrogateescape"))
        *lines, self._partial = (self._partial + data).split("\n")
        if len(self._partial) > MAX_LINE:
            lines.append(self._partial)
            self._partial = ""
        clean = [readable(line) for line in lines]
        self._tail.extend(line for line in clean if line.strip())
        return clean

    def tail(self) -> tuple[str, ...]:
        """The last non-empty lines, oldest first, an unfinished one included."""
        rest = readable(self._partial)
        return (*self._tail, rest) if rest.strip() else tuple(self._tail)

    def close(self) -> None:
        """Write what waited for more to come, and close the file."""
        self._take(self._masked.end())
        self._file.close()


def readable(line: str) -> str:
    """A line for people: no colours, no carriage returns, odd bytes as escapes."""
    line = _ANSI.sub("", line).rstrip("\r").rpartition("\r")[2][:MAX_LINE]
    return line.encode("utf-8", "backslashreplace").decode("utf-8", "backslashreplace")


def attempt_folder(logs: Path, attempt: int) -> Path:
    """Where the logs of an attempt are: those of the first stay where they are when others follow."""
    return logs if attempt == 1 else logs / f"attempt-{attempt}"


def open_logs(folder: Path, nodes: Mapping[int, str], mask: Mask | None = None) -> dict[int, NodeLog]:
    """Open one log file per vLLM node (node rank -> host) in `folder`."""
    with making(folder):
        private_folder(folder)
        return {node: NodeLog(folder / f"node-{node}-{host}.log", mask) for node, host in nodes.items()}
