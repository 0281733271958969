"""User errors and the table of exit codes.

Every error that a user can cause is a `CpuppError`: a stable code, a message (what and where) and a hint (what next).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The published exit codes of the `cpupp` command (docs/exit-codes.md)."""

    OK = 0
    RANK_FAILED = 1
    USAGE = 2
    CONFIG = 3
    FINDINGS = 4
    UNREACHABLE = 5
    NOT_READY = 6
    SIGINT = 130
    SIGTERM = 143


class CpuppError(Exception):
    """An error that the user can act on.

    code: stable, upper case, with dashes (`CONFIG-YAML`); message: what is wrong and where; hint: what to do next;
    exit_code: what the process returns when this error ends it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "",
        exit_code: ExitCode = ExitCode.CONFIG,
        where: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.message}"


class CpuppErrors(CpuppError):  # noqa: N818  # the plural is the point
    """Several errors found in one pass; all are shown. The exit code is that of the first."""

    def __init__(self, errors: list[CpuppError]) -> None:
        assert errors
        first = errors[0]
        super().__init__(
            first.code,
            "\n".join(str(e) for e in errors),
            hint=first.hint,
            exit_code=first.exit_code,
        )
        self.errors = errors
