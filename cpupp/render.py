"""Pages of text for people and one JSON envelope for programs. The only modules that print are `render*.py`.

A page is laid out once: on a terminal it gets colours, in a pipe it is the same text, bare. stdout is the answer;
progress, notes and errors go to stderr.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import threading
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.rank.agent_mask import Mask

_mask = Mask()
_unwritten: OSError | None = None
CONTRACT = 1
"""Version of the JSON envelope: it changes when a field is removed or changes its meaning."""

WIDTH = 120
UNWRAPPED = 100_000
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def hide(mask: Mask) -> None:
    """Hide these secrets in all that is printed from now on, tracebacks of threads included."""
    global _mask
    _mask = mask
    threading.excepthook = lambda failure: _print_trace(
        traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
    )


def print_trace(error: BaseException) -> None:
    """Write the traceback of an error to stderr."""
    _print_trace(traceback.format_exception(error))


def _print_trace(lines: Sequence[str]) -> None:
    write(sys.stderr, "".join(lines))


class Page:
    """Lines of text, each with a style. `width` holds for prose; tables and commands are never cut.

    spans: line number -> (start, end, style) of the parts of that line that have a style of their own.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self.width = width
        self.lines: list[tuple[str, str]] = []
        self.spans: dict[int, list[tuple[int, int, str]]] = {}

    def line(self, text: str = "", style: str = "") -> None:
        """Add one line as it is."""
        self.lines.append((visible(text), style))

    def parts(self, *parts: tuple[str, str]) -> None:
        """Add one line of several parts, each a text with its style."""
        shown = [(visible(text), style) for text, style in parts]
        start = 0
        for text, style in shown:
            if style:
                self.spans.setdefault(len(self.lines), []).append((start, start + len(text), style))
            start += len(text)
        self.lines.append(("".join(text for text, _ in shown).rstrip(), ""))

    def heading(self, text: str) -> None:
        """Add a heading with an empty line before it."""
        self.line()
        self.line(text, "bold")

    def prose(
        self, text: str, *, indent: str = "  ", hang: str = "", style: str = "", marks: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Add text wrapped at the page's width; `hang` is put before the first line, its width before the others.

        marks: words at the start of the first line, `hang` included, in their order, each with a style of its own.
        """
        number = len(self.lines)
        first, rest = indent + hang, indent + " " * len(hang)
        width = max(self.width, 40)
        wrapped = textwrap.wrap(
            visible(text), width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
        self.lines += [(line, style) for line in wrapped or [first.rstrip()]]
        start = 0
        for word, own in marks:
            start = self.lines[number][0].find(word, start)
            if start < 0:
                break
            self.spans.setdefault(number, []).append((start, start + len(word), own))
            start += len(word)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "  ") -> None:
        """Add left-aligned columns. A column that is empty in every row is left out."""
        keep = [i for i in range(len(header)) if any(row[i] for row in rows)]
        cells = [[header[i] for i in keep], *([visible(row[i]) for i in keep] for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(keep))]
        for number, row in enumerate(cells):
            text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.lines.append(((indent + text).rstrip(), "" if number else "dim"))

    def text(self) -> str:
        """The bare text."""
        return "".join(line + "\n" for line, _ in self.lines)

    def show(self, stream: TextIO) -> None:
        """Write the page: with colours where `stream` is a terminal that has them."""
        if not stream.isatty():
            write(stream, self.text())
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, highlight=False)
        with console.capture() as capture:
            for number, (line, style) in enumerate(self.lines):
                text = Text(line, style=style)
                for start, end, own in self.spans.get(number, ()):
                    text.stylize(own, start, end)
                console.print(text, soft_wrap=True)
        write(stream, capture.get())


def page_width(stream: TextIO) -> int:
    """Columns for prose: the terminal's, at most WIDTH; WIDTH in a pipe, so that saved text does not vary."""
    if not stream.isatty():
        return WIDTH
    import shutil

    return min(WIDTH, max(40, shutil.get_terminal_size().columns - 1))


def visible(text: str) -> str:
    """Escape characters that would move the cursor or hide text: names and values come from files and hosts.

    Secrets are hidden here already: once a text is wrapped, they would not be found.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), _mask.text(text))


def write(stream: TextIO, text: str) -> None:
    """Write and flush. A reader that went away (`| head`) is no error: the verb's exit code stays its own.

    What stdout did not take for another reason (a full disk) is remembered: see `unwritten`.
    """
    global _unwritten
    text = _mask.text(text)
    try:
        stream.write(text)
        stream.flush()
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        write(stream, text.encode(encoding, "backslashreplace").decode(encoding))
    except (OSError, ValueError) as error:
        if stream is sys.stdout and isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            _unwritten = error
        forget(stream)


def unwritten() -> OSError | None:
    """Why a part of stdout is missing, and forget it; None when nothing is."""
    global _unwritten
    found, _unwritten = _unwritten, None
    return found


def forget(stream: TextIO) -> None:
    """Point a stream whose reader is gone at /dev/null, so that the flush at exit finds nothing to complain about."""
    import os

    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass


def print_envelope(command: str, *, ok: bool, data: Any, errors: Sequence[CpuppError] = ()) -> None:
    """Write the JSON envelope, alone on stdout."""
    envelope = {
        "cpupp": CONTRACT,
        "command": command,
        "ok": ok,
        "data": data,
        "errors": [error_data(error) for error in errors],
    }
    write(sys.stdout, json.dumps(envelope, indent=2) + "\n")


def error_data(error: CpuppError) -> dict[str, str]:
    """One error of the envelope."""
    return {"code": error.code, "message": error.message, "where": error.where, "hint": error.hint}


def flat(error: CpuppError) -> list[CpuppError]:
    """The single errors of an error."""
    return list(error.errors) if isinstance(error, CpuppErrors) else [error]


def error_page(errors: Sequence[CpuppError], width: int = WIDTH) -> Page:
    """Every error with what, where and what next."""
    page = Page(width)
    for error in errors:
        lines = str(error).splitlines() or [error.code]
        page.prose(lines[0], indent="", hang="error: ", style="bold red")
        for line in lines[1:]:
            page.line(f"       {line}")
        if error.hint:
            page.prose(error.hint, hang="hint: ")
    if len(errors) > 1:
        page.line(f"{len(errors)} errors", "bold red")
    return page


def print_errors(errors: Sequence[CpuppError]) -> None:
    """Write errors to stderr: wrapped on a terminal, one line each in a file, where people search."""
    error_page(errors, page_width(sys.stderr) if sys.stderr.isatty() else UNWRAPPED).show(sys.stderr)


def print_notes(texts: Iterable[str]) -> None:
    """Write notes to stderr."""
    page = Page(page_width(sys.stderr))
    for text in texts:
        page.prose(text, indent="", hang="note: ", style="yellow")
    if page.lines:
        page.show(sys.stderr)
