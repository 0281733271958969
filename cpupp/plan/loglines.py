"""Lines of several logs as one stream, in the order of the times that vLLM writes into them."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence

from cpupp.errors import CpuppError, ExitCode

# vLLM: `(Worker pid=7) INFO 11-30 00:20:28 [file.py:12] ...`; others write a year, a T, fractions.
_TIME = re.compile(r"(?<!\d)(\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d+)?)(?!\d)")
_SEARCHED = 160  # characters of a line within which its time is looked for


def merge(logs: Sequence[Iterable[str]]) -> Iterator[tuple[int, str]]:
    """Yield (index of the log, line). A line without a time stays behind the line before it; no log is reordered."""
    yield from ((index, line) for _, index, line in heapq.merge(*map(_timed, range(len(logs)), logs), key=_when))


def _timed(index: int, lines: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    time = ""
    for line in lines:
        match = _TIME.search(line, 0, _SEARCHED)
        if match:
            time = max(time, f"{match[1]} {match[2]}".replace(",", "."))
        yield time, index, line


def _when(item: tuple[str, int, str]) -> str:
    return item[0]


def pattern(text: str) -> re.Pattern[str]:
    """The regular expression of --grep. Raises CpuppError LOGS-GREP."""
    try:
        return re.compile(text)
    except re.error as error:
        hint = "it is a Python regular expression: write \\( for a bracket, \\. for a dot"
        raise CpuppError(
            "LOGS-GREP", f"--grep {text!r} cannot be read: {error}", hint=hint, exit_code=ExitCode.USAGE
        ) from None
