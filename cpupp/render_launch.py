"""What a launch shows while it runs, and how it ended. All of it goes to stderr; the answer alone goes to stdout."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from cpupp.errors import CpuppError
from cpupp.plan.plan import Plan
from cpupp.plan.start_times import start_data, start_text
from cpupp.printer import Line, Printer
from cpupp.render import Page, page_width, visible, write
from cpupp.render_sizes import ranges

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from cpupp.launch.contract import Ready
    from cpupp.launch.result import RunResult
    from cpupp.plan.failures import Failure

MAX_LAST_LINES = 20


@dataclass(slots=True)
class _Row:
    host: str
    ranks: str
    phase: str = "waiting"
    since: float = 0.0


class LaunchView:
    """Live progress: a table on a terminal, one line for each change of phase elsewhere; log lines with host and ranks.

    Implements launch/contract.py's View. A reader of stderr that goes away never ends the run.
    """

    def __init__(
        self, plan: Plan, stream: TextIO | None = None, *, started: float | None = None, idle_s: float = 30.0
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._plan = plan
        self._started = time.monotonic() if started is None else started
        self._rows = {n.node_rank: _Row(host=n.host, ranks=ranges(n.ranks)) for n in plan.nodes}
        self._starting = True
        self._coming = ""
        self._live: Live | None = _start_live(self._stream, self._table) if self._stream.isatty() else None
        # A start takes minutes: without a table, silence would look like a hang.
        self._printer = Printer(self._print, idle=None if self._live else self._still, idle_s=idle_s)

    def phase(self, node_rank: int, host: str, phase: str, seconds: float) -> None:
        """Show what a vLLM node does now. seconds: since the launch began."""
        row = self._rows[node_rank]
        row.phase, row.since = phase, time.monotonic()
        if self._live is None:
            self._line(f"{seconds:6.1f} s  {self._prefix(node_rank)} {phase}")

    def milestone(self, name: str, coming: str, limit_s: float | None, seconds: float) -> None:
        """Show what all vLLM nodes have reached, and how long they have for the next. seconds: since the launch."""
        self._starting = True
        self._coming = f"all {name}; {coming} within {limit_s:g} s" if limit_s is not None else f"all {name}"
        if self._live is None:
            self._line(f"{seconds:6.1f} s  {self._coming}")

    def log(self, node_rank: int, host: str, line: str) -> None:
        """Show one line of a vLLM node's output."""
        self._line(f"{self._prefix(node_rank)} {line}", may_drop=True)

    def ready(self, ready: Ready) -> None:
        """Show the endpoint and how to ask it."""
        self._starting = False
        self._coming = ""
        page = Page(page_width(self._stream))
        page.line()
        page.line(f"ready after {ready.seconds:.1f} s: {ready.model} at {ready.url}", "bold green")
        if ready.start:
            page.prose(start_text(ready.start), indent="  ", style="dim")
        page.line(f"  {curl_line(ready.url, ready.model, key_source=ready.key_source)}")
        if not ready.stays:
            page.line("  Ctrl-C stops all vLLM nodes")
        page.line()
        self._printer.put(page.lines)

    def note(self, text: str) -> None:
        """Show anything else."""
        page = Page(page_width(self._stream))
        page.prose(text, indent="", hang="note: ", style="yellow")
        self._printer.put(page.lines)

    def close(self) -> None:
        """Print what waits and end the live table; its last state stays."""
        self._printer.close()
        if self._live is not None:
            live, self._live = self._live, None
            with suppress(OSError, ValueError, SystemExit):
                live.stop()

    def _still(self) -> list[Line]:
        """What every vLLM node does, for how long."""
        if not self._starting:
            return []
        now = time.monotonic()
        doing = "; ".join(
            f"{self._prefix(number)} {row.phase}" + (f" for {now - row.since:.0f} s" if row.since else "")
            for number, row in self._rows.items()
        )
        return [(visible(f"{now - self._started:6.1f} s  still {doing}"), "")]

    def _prefix(self, node_rank: int) -> str:
        row = self._rows[node_rank]
        return f"[{row.host} {row.ranks}]"

    def _line(self, text: str, *, may_drop: bool = False) -> None:
        self._printer.put([(visible(text), "")], may_drop=may_drop)

    def _print(self, lines: list[Line]) -> None:
        """Runs in the printer's thread. On a terminal, lines go above the live table."""
        live = self._live
        bare = "".join(f"{text}\n" for text, _ in lines)
        if live is None:
            write(self._stream, bare)
            return
        from rich.text import Text

        block = Text("\n").join(Text(text, style=style) for text, style in lines)
        try:
            live.console.print(block, soft_wrap=True)
        except (OSError, ValueError, SystemExit):  # the terminal is gone; rich turns a broken pipe into SystemExit
            self._live = None
            write(self._stream, bare)

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        now = time.monotonic()
        table = Table(box=None, pad_edge=False, header_style="dim")
        state = self._coming if self._starting else ""
        for column in ("host", "ranks", "doing now", "for", f"{now - self._started:.0f} s in all", visible(state)):
            table.add_column(column)
        for row in self._rows.values():
            spent = f"{now - row.since:.0f} s" if row.since else ""
            table.add_row(visible(row.host), row.ranks, Text(visible(row.phase)), spent, "", "")
        return table


def _start_live(stream: TextIO, table: Any) -> Live:
    from rich.console import Console
    from rich.live import Live

    live = Live(
        get_renderable=table,
        console=Console(file=stream, highlight=False),
        refresh_per_second=2,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    live.start()
    return live


def curl_line(url: str, model: str, *, key_source: str = "") -> str:
    """A command that asks the served model one question. The API's key is left to the reader's shell."""
    import json
    import shlex

    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64})
    key = f'-H "Authorization: Bearer {_key_words(key_source)}" ' if key_source else ""
    content = "-H 'Content-Type: application/json'"
    return f"curl {shlex.quote(url + '/chat/completions')} {key}{content} -d {shlex.quote(body)}"


def _key_words(source: str) -> str:
    """Shell words, inside double quotes, that are the API's key."""
    import shlex

    from cpupp.plan.secret import API_KEY_ENV

    kind, _, place = source.partition(":")
    if kind == "file":
        home = "~/" if place.startswith("~/") else ""
        return f"$(head -n 1 {home}{shlex.quote(place.removeprefix(home))})"
    return f"${place if kind == 'env' else API_KEY_ENV}"


def result_page(result: RunResult, width: int) -> Page:
    """How the run ended: the first failure with its own last lines, the others as consequences, what was left."""
    page = Page(width)
    if result.first_failure is not None:
        show_failure(page, result.first_failure)
        if result.consequences:
            page.line("stopped or failed as a consequence:", "bold")
            for failure in result.consequences:
                page.prose(f"{_who(failure)}: {_first_line(failure.message)}")
    if result.answer is not None:
        answer = result.answer
        speed = f"{answer.tokens_per_second:.1f} tokens per second"
        page.line(f"{answer.completion_tokens} tokens in {answer.seconds:.1f} s: {speed}", "dim")
    _attempts(page, result)
    for text in result.leftovers:
        page.prose(text, indent="", hang="left behind: ", style="yellow")
    if result.outcome == "detached":
        run = result.run
        page.line(f"run {run} goes on without this launcher:")
        page.line(f"  cpupp status {run}")
        page.line(f"  cpupp logs {run} -f")
        page.line(f"  cpupp stop {run}")
        return page
    page.line(f"{_ENDINGS.get(result.outcome, result.outcome)}; logs: {result.folder}{os.sep}logs", "dim")
    return page


_ENDINGS = {
    "ok": "stopped",
    "failed": "failed",
    "not_ready": "not ready in time, stopped",
    "interrupted": "interrupted, stopped",
    "detached": "goes on without the launcher",
}


def _attempts(page: Page, result: RunResult) -> None:
    """What came after the first attempt, when there was more than one."""
    if len(result.attempts) > 1:
        page.line("attempts:", "bold")
        for attempt in result.attempts:
            first = attempt.failures[0] if attempt.failures else None
            how = _ENDINGS.get(attempt.outcome, attempt.outcome)
            ready = "never ready" if attempt.ready_seconds is None else f"ready after {attempt.ready_seconds:.0f} s"
            words = f": {_who(first)}: {_first_line(first.message)}" if first is not None else ""
            page.prose(f"{attempt.number}: {ready}, {how} after {attempt.seconds:.0f} s{words}")
    if result.not_restarted:
        page.prose(result.not_restarted, indent="", hang="note: ", style="yellow")


def show_failure(page: Page, failure: Failure) -> None:
    """Add a failure with its own last lines."""
    first, *rest = failure.message.splitlines() or [failure.code]
    page.line()
    page.prose(f"{_who(failure)}: {first}", indent="", hang="error: ", style="bold red")
    for line in rest:
        page.line(f"       {line}")
    if failure.hint:
        page.prose(failure.hint, hang="hint: ")
    if failure.last_lines:
        page.line(f"  its last lines ({failure.host}):", "dim")
        for line in failure.last_lines[-MAX_LAST_LINES:]:
            page.line(f"    {line}")


def _who(failure: Failure) -> str:
    if not failure.host:
        return "launcher"
    if not failure.ranks:
        return f"host {failure.host}"
    word = "rank" if len(failure.ranks) == 1 else "ranks"
    return f"{word} {ranges(failure.ranks)} on {failure.host}"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def result_data(plan: Plan, result: RunResult) -> dict[str, Any]:
    """The result as JSON values."""
    from cpupp.launch.api import public_url

    answer = result.answer
    return {
        "outcome": result.outcome,
        "endpoint": public_url(plan),
        "model": plan.served_name,
        "ready_seconds": result.ready_seconds,
        "start": start_data(result.start),
        "answer": None
        if answer is None
        else {
            "text": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "seconds": answer.seconds,
            "tokens_per_second": answer.tokens_per_second,
        },
        "first_failure": None if result.first_failure is None else failure_data(result.first_failure),
        "consequences": [failure_data(failure) for failure in result.consequences],
        "leftovers": list(result.leftovers),
        "run": result.run,
        "attempts": [
            {
                "number": attempt.number,
                "outcome": attempt.outcome,
                "failures": [failure_data(failure) for failure in attempt.failures],
                "ready_seconds": attempt.ready_seconds,
                "seconds": attempt.seconds,
            }
            for attempt in result.attempts
        ],
        "not_restarted": result.not_restarted,
        "folder": str(result.folder),
    }


def failure_data(failure: Failure) -> dict[str, Any]:
    """One failure as JSON values."""
    return {
        "host": failure.host,
        "node_rank": failure.node_rank,
        "ranks": list(failure.ranks),
        "code": failure.code,
        "message": failure.message,
        "hint": failure.hint,
        "last_lines": list(failure.last_lines),
    }


def result_errors(result: RunResult) -> list[CpuppError]:
    """The failures as errors of the envelope, the first one first; of an interrupted run, that it was interrupted."""
    if result.outcome == "interrupted":
        name = signal.Signals(result.exit_code - 128).name
        return [CpuppError("INTERRUPTED", f"interrupted by {name}: the run was stopped", where="launcher")]
    failures = [result.first_failure, *result.consequences] if result.first_failure is not None else []
    return [
        CpuppError(failure.code, failure.message, hint=failure.hint, where=_who(failure))
        for failure in failures
        if failure is not None
    ]
