"""The frame of every verb: errors become text or an envelope and an exit code, signals become entries of a queue."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import typer

from cpupp.errors import CpuppError, ExitCode

if TYPE_CHECKING:
    from cpupp.signals import Signals

debug = False
"""Whether tracebacks are shown (`cpupp --debug`)."""


def set_debug(wanted: bool) -> None:
    """Show tracebacks of errors from now on, or do not."""
    global debug
    debug = wanted


@contextmanager
def guard(command: str, as_json: bool) -> Iterator[None]:
    """Turn every error into text or an envelope, and an exit code; no traceback without --debug."""
    from cpupp.signals import Interrupted

    try:
        yield
        _check_output()
    except CpuppError as error:
        if debug:
            _show_trace(error)
        fail(command, as_json, error)
        raise typer.Exit(int(error.exit_code)) from None
    except Interrupted as error:
        fail(command, as_json, CpuppError("INTERRUPTED", f"interrupted by {error}: nothing was started"))
        leave(error.exit_code)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            _show_trace(error)
            raise typer.Exit(int(ExitCode.RANK_FAILED)) from None
        hint = "this is a fault in cpupp: run again as `cpupp --debug ...` and report the traceback"
        fail(command, as_json, CpuppError("INTERNAL", f"{type(error).__name__}: {error}", hint=hint))
        raise typer.Exit(int(ExitCode.RANK_FAILED)) from None


def _check_output() -> None:
    """A verb that did its work but could not say so has not succeeded. Raises typer.Exit."""
    from cpupp.render import unwritten

    error = unwritten()
    if error is not None:
        lost_output(error)
        raise typer.Exit(int(ExitCode.RANK_FAILED))


def lost_output(error: OSError) -> None:
    """Tell that stdout is incomplete, and let nothing more be written to it."""
    from cpupp.render import forget, print_errors

    forget(sys.stdout)
    message = f"output is missing: stdout cannot be written to: {error.strerror or error}"
    print_errors([CpuppError("OUTPUT", message, hint="give stdout another place, and run again")])


def fail(command: str, as_json: bool, error: CpuppError, data: Any = None) -> None:
    """Tell of an error, as text or in an envelope. data: of the envelope."""
    from cpupp.render import flat, print_envelope, print_errors

    if as_json:
        print_envelope(command, ok=False, data=data, errors=flat(error))
    else:
        print_errors(flat(error))


def _show_trace(error: Exception) -> None:
    """Python's own hook would show secrets."""
    from cpupp.render import print_trace

    print_trace(error)


def leave(code: int) -> None:
    """End now: threads that still connect must not hold the process. Hosts see the connection go and clean up."""
    from cpupp.launch.passphrase import restore_terminal

    restore_terminal()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def signals() -> Signals:
    """Signals as entries of a queue, while entered."""
    from cpupp.signals import Signals

    return Signals()
