"""Reports from a rank to the launcher: one line each, appended to the file that the handoff names."""

from __future__ import annotations

import contextlib
import os

from cpupp.plan.handoff import ErrorReport, Report, encode_report


def append_report(path: str, report: Report) -> None:
    """Append the report to `path`."""
    append_line(path, encode_report(report))


def append_line(path: str, text: str) -> None:
    """Append a line to `path` in a single write (O_APPEND), so that lines of several processes never mix."""
    line = (text + "\n").encode()
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def append_error(path: str, where: str, error: BaseException) -> None:
    """Report an error that this rank cannot go on from.

    When the report cannot be written, the error itself still counts.
    """
    message = f"{type(error).__name__}: {error}" if type(error).__str__ is Exception.__str__ else str(error)
    with contextlib.suppress(OSError):
        append_report(path, ErrorReport(pid=os.getpid(), where=where, message=message))
