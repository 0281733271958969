"""Rank output: one file per vLLM node, whole lines for the console, and the last lines for the report."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from cpupp.launch.records import making

NUM_TAIL_LINES = 40
MAX_LINE = 16 * 1024
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class NodeLog:
    """The log of one vLLM node: every byte goes to `path`, complete lines come back from `feed`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._partial = ""
        self._tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self.error = ""

    def feed(self, data: str) -> list[str]:
        """Append output (text with surrogate escapes for odd bytes) and return its new complete lines.

        A full disk loses the file's share, never the run: the reason stays in `error`.
        """
        try:
            self._file.write(data.encode("utf-8", "surrogateescape"))
        except OSError as error:
            self.error = str(error)
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
        """Close the file."""
        self._file.close()


def readable(line: str) -> str:
    """A line for people: no colours, no carriage returns, odd bytes as escapes."""
    line = _ANSI.sub("", line).rstrip("\r").rpartition("\r")[2][:MAX_LINE]
    return line.encode("utf-8", "backslashreplace").decode("utf-8", "backslashreplace")


def open_logs(folder: Path, nodes: Mapping[int, str]) -> dict[int, NodeLog]:
    """Open one log file per vLLM node (node rank -> host) in `folder`."""
    with making(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {node: NodeLog(folder / f"node-{node}-{host}.log") for node, host in nodes.items()}
