"""The verbs that look at runs and end them: parse, call, render, exit code. Nothing heavy before a verb needs it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpupp.cli_frame import guard, leave, signals
from cpupp.errors import CpuppError, ExitCode

if TYPE_CHECKING:
    from cpupp.launch.run_find import Target
    from cpupp.launch.run_look import Look
    from cpupp.launch.run_stop import StopResult
    from cpupp.plan.runs import Run
    from cpupp.plan.status import RunStatus
    from cpupp.signals import Signals

MAX_GRACE = 10_000_000
WATCH_S = 1.0

_Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Run id or its beginning, cluster name, or cluster file. Default: the run that lives, else the newest.",
        show_default=False,
    ),
]
_File = Annotated[
    str | None,
    typer.Option("--file", metavar="FILE", help="Ask the hosts of this cluster file, whatever is recorded here."),
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON envelope on stdout instead of text.")]


def add_to(app: typer.Typer, folder: Callable[[], Path]) -> None:
    """Add the verbs to the command. folder: where runs are recorded."""

    @app.command()
    def ps(
        everything: Annotated[bool, typer.Option("--all", "-a", help="Ended runs, too.")] = False,
        as_json: _Json = False,
    ) -> None:
        """List the runs that were launched from here."""
        with guard("ps", as_json), signals() as caught:
            _ps(caught, folder(), everything=everything, as_json=as_json)

    @app.command()
    def status(
        run: _Run = None,
        file: _File = None,
        watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking until the run ends.")] = False,
        as_json: _Json = False,
    ) -> None:
        """Show a run: every rank, the load of the API, the first failure."""
        if watch and as_json:
            raise typer.BadParameter("--watch and --json exclude each other: an envelope is one answer")
        with guard("status", as_json), signals() as caught, _target(caught, folder(), run, file) as target:
            _status(caught, target, watch=watch, as_json=as_json)

    @app.command()
    def logs(
        run: _Run = None,
        file: _File = None,
        rank: Annotated[int | None, typer.Option(min=0, help="Only the vLLM node that runs this rank.")] = None,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
        grep: Annotated[str | None, typer.Option(metavar="RE", help="Only lines in which this is found.")] = None,
        attempt: Annotated[int | None, typer.Option(min=1, help="Of this attempt instead of the last one.")] = None,
        tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines of each vLLM node.")] = None,
    ) -> None:
        """Print what the vLLM nodes of a run wrote."""
        with guard("logs", False), signals() as caught:
            from cpupp.plan.loglines import pattern

            wanted = None if grep is None else pattern(grep)
            with _target(caught, folder(), run, file) as target:
                _logs(caught, target, rank, follow, wanted, attempt, tail)

    @app.command()
    def stop(
        run: _Run = None,
        file: _File = None,
        everything: Annotated[bool, typer.Option("--all", help="Every run that was launched from here.")] = False,
        grace: Annotated[float, typer.Option(min=0, max=MAX_GRACE, help="Seconds between TERM and KILL.")] = 5.0,
        as_json: _Json = False,
    ) -> None:
        """End a run on all its hosts. Again, it does what was left."""
        if everything and (run is not None or file is not None):
            raise typer.BadParameter("--all takes no run")
        with guard("stop", as_json), signals() as caught:
            _stop(caught, folder(), run, file, everything=everything, grace=grace, as_json=as_json)


@contextmanager
def _target(caught: Signals, root: Path, wanted: str | None, file: str | None) -> Iterator[Target]:
    from cpupp.launch.run_find import find

    target = caught.wait(lambda: find(root, wanted, file))
    try:
        yield target
    finally:
        target.hosts.close()


def _ps(caught: Signals, root: Path, *, everything: bool, as_json: bool) -> None:
    from cpupp.launch.run_look import look_at_all, note_end
    from cpupp.launch.runs import all_runs
    from cpupp.render import page_width, print_envelope, write
    from cpupp.render_runs import run_data, runs_page

    runs = all_runs(root)
    looked = caught.wait(lambda: look_at_all([run for run in runs if everything or run.live]))
    for status in looked:
        note_end(status)
    statuses = [status for status in looked if everything or not status.state.ended]
    if as_json:
        print_envelope("ps", ok=True, data={"runs": [run_data(status) for status in statuses]})
    elif statuses:
        runs_page(statuses, page_width(sys.stdout)).show(sys.stdout)
    else:
        rest = f"; `cpupp ps --all` lists {len(runs)} that ended" if runs else ""
        write(sys.stderr, f"no run lives{rest}\n")


def _status(caught: Signals, target: Target, *, watch: bool, as_json: bool) -> None:
    from cpupp.launch.run_look import Look, note_end
    from cpupp.render import page_width, print_envelope
    from cpupp.render_runs import status_data, status_errors, status_exit, status_page

    look = Look(target)
    try:
        caught.wait(look.wait)
        status = _watch(caught, look) if watch else look.status()
    finally:
        look.close()
    note_end(status)
    code = status_exit(status)
    if as_json:
        print_envelope("status", ok=code == 0, data=status_data(status), errors=status_errors(status))
    elif not watch:
        status_page(status, page_width(sys.stdout)).show(sys.stdout)
    raise typer.Exit(int(code))


def _watch(caught: Signals, look: Look) -> RunStatus:
    """Show the run until it ends: in place on a terminal, a line for each change elsewhere."""
    from cpupp.render_watch import watch_view
    from cpupp.signals import Interrupted

    view = watch_view(sys.stdout)
    try:
        while True:
            status = look.status()
            if not view.show(status) or status.state.ended:
                return status
            caught.wait(lambda: time.sleep(WATCH_S))
    except Interrupted as interrupted:
        view.close()
        leave(interrupted.exit_code)
        raise
    finally:
        view.close()


def _logs(
    caught: Signals,
    target: Target,
    rank: int | None,
    follow: bool,
    wanted: Any,
    attempt: int | None,
    tail: int | None,
) -> None:
    from cpupp.launch.run_tail import LogView
    from cpupp.render import print_errors
    from cpupp.render_runs import node_prefix, print_lines
    from cpupp.signals import Interrupted

    view = caught.wait(lambda: LogView(target, rank=rank, attempt=attempt, wanted=wanted, tail=tail))
    prefixes = {node: node_prefix(node, host, view.ranks(node)) for node, host in view.nodes.items()}

    def work() -> None:
        for lines in view.lines(follow=follow):
            if lines and not print_lines(sys.stdout, [f"{prefixes[node]} {line}" for node, line in lines]):
                return

    try:
        caught.wait(work)
    except Interrupted as interrupted:  # how one leaves a log that goes on
        leave(interrupted.exit_code)
    print_errors(view.errors())
    raise typer.Exit(int(ExitCode.UNREACHABLE if view.errors() else ExitCode.OK))


def _stop(
    caught: Signals, root: Path, wanted: str | None, file: str | None, *, everything: bool, grace: float, as_json: bool
) -> None:
    from cpupp.render import page_width, print_envelope, print_errors, write
    from cpupp.render_runs import stop_data, stop_errors, stop_exit, stop_page

    def tell(text: str) -> None:
        write(sys.stderr, text + "\n")

    failed: list[CpuppError] = []  # runs of which nothing can be said but why
    if everything:
        results, failed = caught.wait(lambda: _stop_each(root, grace, tell))
    else:
        results = caught.wait(lambda: _stop_one(root, wanted, file, grace, tell))
    code = failed[0].exit_code if failed else stop_exit(results)
    if as_json:
        errors = failed + [error for result in results for error in stop_errors(result)]
        print_envelope("stop", ok=code == 0, data={"runs": [stop_data(result) for result in results]}, errors=errors)
    else:
        for result in results:
            stop_page(result, page_width(sys.stdout)).show(sys.stdout)
        if not results and not failed:
            tell("nothing to stop")
        print_errors(failed)
    raise typer.Exit(int(code))


def _stop_each(root: Path, grace: float, tell: Callable[[str], None]) -> tuple[list[StopResult], list[CpuppError]]:
    """Stop every run that is not over; return what came of those that could be tried, and why others could not."""
    from cpupp.launch.run_hosts import hosts_of, spec_of
    from cpupp.launch.run_stop import is_over, stop_run
    from cpupp.launch.runs import all_runs
    from cpupp.launch.session import run_all

    def one(run: Run) -> StopResult:
        with hosts_of(spec_of(run)) as hosts:
            return stop_run(run, lambda: hosts, root, grace=grace, tell=tell)

    done, errors = run_all({run.run: partial(one, run) for run in all_runs(root) if not is_over(run)})
    return list(done.values()), errors


def _stop_one(
    root: Path, wanted: str | None, file: str | None, grace: float, tell: Callable[[str], None]
) -> list[StopResult]:
    from cpupp.launch.run_find import find
    from cpupp.launch.run_stop import stop_run

    try:
        target = find(root, wanted, file)
    except CpuppError as error:
        if error.code == "RUN-NONE" and error.exit_code != ExitCode.UNREACHABLE:
            return []  # what is to be stopped is not there: that is what was asked for
        raise
    try:
        return [stop_run(target.run, lambda: target.hosts, root, grace=grace, tell=tell)]
    finally:
        target.hosts.close()
