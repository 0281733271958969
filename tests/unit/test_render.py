"""What people see: pages, progress on a pipe, how a run ended."""

from __future__ import annotations

import io
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.launch.api import Answer
from cpupp.launch.contract import Ready
from cpupp.launch.result import RunResult
from cpupp.plan.backend import plan_groups
from cpupp.plan.failures import Failure
from cpupp.plan.grid import make_grid
from cpupp.plan.plan import Plan, make_plan
from cpupp.plan.restart import Attempt
from cpupp.printer import MAX_WAITING, Printer
from cpupp.render import Page, error_page, flat, page_width, visible
from cpupp.render_groups import link_bundles
from cpupp.render_launch import LaunchView, curl_line, result_data, result_errors, result_page
from cpupp.render_sizes import gib, ranges
from tests.unit.factory import cluster, machines


class Terminal(io.StringIO):
    """A terminal of a kind."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def pair() -> Plan:
    """A plan of two hosts."""
    return make_plan(cluster("a", "b", pipeline=2), machines("a", "b"))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((5, 0, 1), "0-1,5"), ((1, 3, 5), "1,3,5")],
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("size", "text"), [(1 << 30, "1 GiB"), (3 << 29, "1.50 GiB"), (41 << 28, "10.2 GiB"), (1 << 38, "256 GiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert gib(size) == text


def test_hidden_characters_are_shown() -> None:
    assert visible("a\x1b[31mb\nc\u202ed\tü") == "a\\x1b[31mb\\nc\\u202ed\tü"


def test_tables_leave_empty_columns_out() -> None:
    page = Page()
    page.table(("a", "b", "c"), [("1", "", "x"), ("22", "", "")])
    assert page.text() == "  a   c\n  1   x\n  22\n"


def test_a_terminal_gets_colours_and_a_pipe_the_same_text() -> None:
    page = Page()
    page.heading("Groups")
    page.line("  [not markup] :smile:", "green")
    terminal, pipe = Terminal(), io.StringIO()
    page.show(terminal)
    page.show(pipe)
    assert "\x1b" not in pipe.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()) == pipe.getvalue()


def test_saved_text_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert page_width(io.StringIO()) == 120


def test_errors_say_what_where_and_what_next() -> None:
    errors = CpuppErrors([CpuppError("A", "one", hint="do this", where="f:1"), CpuppError("B", "two\nlines")])
    assert error_page(flat(errors)).text() == "error: f:1: one\n  hint: do this\nerror: two\n       lines\n2 errors\n"


def test_hundreds_of_links_are_told_in_few_lines() -> None:
    names = [f"h{n}" for n in range(16)]
    spec = cluster(*names, pipeline=16)
    (group,) = plan_groups(spec, make_grid(spec), machines(*names))
    assert link_bundles(group) == [
        (
            "gloo",
            "two machines each (boot ids differ)",
            "0<->1, 0<->2, 0<->3, 0<->4, 0<->5, 0<->6, 0<->7, 0<->8 and 112 more",
        )
    ]


def test_progress_on_a_pipe_is_one_line_a_change() -> None:
    stream = io.StringIO()
    view = LaunchView(pair(), stream)
    view.phase(0, "a", "loading weights", 3.25)
    view.log(1, "b", "INFO hello\x1b[0m")
    view.note("something")
    view.milestone("joined", "loaded", 60.0, 4.0)
    view.close()
    assert stream.getvalue() == (
        "   3.2 s  [a 0] loading weights\n[b 1] INFO hello\\x1b[0m\nnote: something\n"
        "   4.0 s  all joined; loaded within 60 s\n"
    )


def test_a_start_on_a_pipe_is_never_silent_for_long() -> None:
    stream = io.StringIO()
    view = LaunchView(pair(), stream, idle_s=0.05)
    view.phase(0, "a", "loading weights", 3.25)
    deadline = time.monotonic() + 30
    while "still" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    view.ready(Ready(url="http://10.0.0.1:8000/v1", model="m", seconds=36.04))
    time.sleep(0.2)  # a model that serves may be silent
    view.close()
    still = [line for line in stream.getvalue().splitlines() if "still" in line]
    assert re.fullmatch(r" +\d+\.\d s  still \[a 0\] loading weights for \d+ s; \[b 1\] waiting", still[0])
    assert "ready after" in stream.getvalue().partition(still[-1])[2]


def test_ready_shows_the_endpoint_and_a_curl_line() -> None:
    stream = io.StringIO()
    view = LaunchView(pair(), stream)
    view.ready(Ready(url="http://10.0.0.1:8000/v1", model="it's", seconds=36.04))
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[1] == "ready after 36.0 s: it's at http://10.0.0.1:8000/v1"
    assert lines[2].startswith(
        "  curl http://10.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '"
    )
    assert """{"model": "it'"'"'s", """ in lines[2]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("env:MY_KEY", "$MY_KEY"),
        ("literal", "$VLLM_API_KEY"),
        ("file:/etc/a key", "$(head -n 1 '/etc/a key')"),
        ("file:~/my key", "$(head -n 1 ~/'my key')"),
    ],
)
def test_the_curl_line_takes_the_api_s_key_from_where_it_is(source: str, words: str) -> None:
    line = curl_line("http://a:8000/v1", "m", key_source=source)
    assert f' -H "Authorization: Bearer {words}" ' in line
    assert "Authorization" not in curl_line("http://a:8000/v1", "m")


def test_an_interrupted_run_is_an_error_of_the_envelope(tmp_path: Path) -> None:
    result = RunResult(
        outcome="interrupted",
        exit_code=143,
        first_failure=None,
        consequences=(),
        answer=None,
        folder=tmp_path,
        ready_seconds=None,
        leftovers=(),
    )
    (error,) = result_errors(result)
    assert (error.code, error.message) == ("INTERRUPTED", "interrupted by SIGTERM: the run was stopped")


def test_a_terminal_shows_what_each_rank_does() -> None:
    stream = Terminal()
    view = LaunchView(pair(), stream)
    view.phase(0, "a", "compiling", 40.0)
    view.log(1, "b", "a line")
    view.close()
    shown = stream.getvalue()
    assert "compiling" in shown
    assert "[b 1] a line" in shown


def test_a_reader_that_pauses_stops_nobody() -> None:
    asked, reads = threading.Event(), threading.Event()
    shown: list[str] = []

    def show(lines: list[tuple[str, str]]) -> None:
        asked.set()
        reads.wait(30)
        shown.extend(text for text, _ in lines)

    printer = Printer(show)
    printer.put([("first", "")])
    assert asked.wait(30)
    start = time.monotonic()
    for number in range(3 * MAX_WAITING):
        printer.put([(str(number), "")], may_drop=True)
    printer.put([("important", "")])
    assert time.monotonic() - start < 5
    reads.set()
    printer.close(timeout=30)
    assert shown[0] == "first"
    assert shown[-1] == "important"
    assert re.fullmatch(r"\(\d+ log lines not shown here; the log files have them\)", shown[-2])
    assert len(shown) < MAX_WAITING + 10


def failed() -> RunResult:
    """A run whose rank 1 died."""
    first = Failure(
        host="b",
        node_rank=1,
        ranks=(1,),
        code="RANK-EXIT",
        message="exited with signal 9: probably out of memory",
        hint="see dmesg",
        last_lines=("loading", "Killed"),
    )
    second = Failure(host="a", node_rank=0, ranks=(0,), code="RANK-EXIT", message="exited with code 1")
    return RunResult(
        outcome="failed",
        exit_code=1,
        first_failure=first,
        consequences=(second,),
        answer=None,
        folder=Path("/runs/pair-1"),
        ready_seconds=None,
        leftovers=("host b: /dev/shm/x",),
    )


def test_the_first_failure_is_named_first_with_its_own_last_lines() -> None:
    assert result_page(failed(), 120).text() == (
        "\n"
        "error: rank 1 on b: exited with signal 9: probably out of memory\n"
        "  hint: see dmesg\n"
        "  its last lines (b):\n"
        "    loading\n"
        "    Killed\n"
        "stopped or failed as a consequence:\n"
        "  rank 0 on a: exited with code 1\n"
        "left behind: host b: /dev/shm/x\n"
        "failed; logs: /runs/pair-1/logs\n"
    )


def test_a_run_of_several_attempts_lists_them_and_names_the_first_failure() -> None:
    run = failed()
    assert run.first_failure is not None
    first = Attempt(number=1, outcome="failed", failures=(run.first_failure,), ready_seconds=30.4, seconds=99.0)
    later = replace(run.first_failure, host="a", ranks=(0,), message="exited with code 1")
    second = Attempt(number=2, outcome="failed", failures=(later,), ready_seconds=None, seconds=12.0)
    result = replace(run, attempts=(first, second), not_restarted="not restarted again: it was once (restart.max)")
    text = result_page(result, 120).text()
    assert text.startswith("\nerror: rank 1 on b: exited with signal 9")
    assert (
        "attempts:\n"
        "  1: ready after 30 s, failed after 99 s: rank 1 on b: exited with signal 9: probably out of memory\n"
        "  2: never ready, failed after 12 s: rank 0 on a: exited with code 1\n"
        "note: not restarted again: it was once (restart.max)\n"
    ) in text
    assert [attempt["number"] for attempt in result_data(pair(), result)["attempts"]] == [1, 2]


def test_a_detached_run_says_how_to_see_and_stop_it() -> None:
    result = replace(
        failed(), outcome="detached", exit_code=0, first_failure=None, consequences=(), leftovers=(), run="r1"
    )
    assert result_page(result, 120).text() == (
        "run r1 goes on without this launcher:\n  cpupp status r1\n  cpupp logs r1 -f\n  cpupp stop r1\n"
    )


def test_a_launcher_that_was_stopped_is_named_as_what_it_is() -> None:
    cause = Failure(
        host="", node_rank=None, ranks=(), code="LAUNCHER-STOPPED", message="the launcher was stopped for 27 s"
    )
    assert (
        "error: launcher: the launcher was stopped for 27 s\n"
        in result_page(replace(failed(), first_failure=cause), 120).text()
    )


def test_a_result_as_data() -> None:
    data = result_data(pair(), failed())
    assert data["outcome"] == "failed"
    assert data["first_failure"]["ranks"] == [1]
    assert data["answer"] is None


def test_an_answer_tells_its_speed() -> None:
    answer = Answer(text="Paris.", prompt_tokens=9, completion_tokens=20, seconds=2.0, tokens_per_second=10.0)
    result = RunResult(
        outcome="ok",
        exit_code=0,
        first_failure=None,
        consequences=(),
        answer=answer,
        folder=Path("/runs/x"),
        ready_seconds=30.0,
        leftovers=(),
    )
    assert (
        result_page(result, 120).text() == "20 tokens in 2.0 s: 10.0 tokens per second\nstopped; logs: /runs/x/logs\n"
    )
    data = result_data(pair(), result)
    assert data["answer"]["text"] == "Paris."
