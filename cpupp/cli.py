"""The verbs: parse, call, render, exit code. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cpupp import __version__, cli_init, cli_runs, cli_serve
from cpupp.cli_frame import guard as _guard
from cpupp.cli_frame import leave as _leave
from cpupp.cli_frame import lost_output, set_debug
from cpupp.cli_frame import signals as _signals
from cpupp.cli_secrets import try_secrets, use_secrets
from cpupp.errors import ExitCode

if TYPE_CHECKING:
    from cpupp.launch.contract import LaunchOptions
    from cpupp.plan.cluster import ClusterSpec
    from cpupp.plan.command import RankCommand
    from cpupp.plan.facts import HostFacts
    from cpupp.plan.plan import Plan
    from cpupp.signals import Signals

# Plain help: rich's panels cost 0.2 s of CPU at every --help.
app = typer.Typer(
    name="cpupp",
    help="One large model over several CPU machines: vLLM over SSH, from one YAML.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(help="Measure on the hosts of a cluster file.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(bench, name="bench")

_File = Annotated[str, typer.Argument(metavar="FILE", help="The cluster file (YAML).", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="One JSON envelope on stdout instead of text.")]
_AcceptNew = Annotated[
    bool, typer.Option("--accept-new", help="Add SSH keys of unknown hosts to known_hosts; a changed key still stops.")
]
MAX_SECONDS = 10_000_000
"""As cpupp.plan.cluster has it, which is too heavy for the help."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cpupp {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    set_debug(debug)


@app.command()
def launch(
    file: _File,
    ask: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Ask one question, print the answer on stdout, stop.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer to --ask, in tokens.")] = 128,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the model serves; the run goes on.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(min=1, max=MAX_SECONDS, help="Seconds until the model must be ready, in all.", show_default=False),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, max=MAX_SECONDS, help="Seconds between TERM and KILL when stopping.")
    ] = 5.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    accept_new: _AcceptNew = False,
    as_json: _Json = False,
) -> None:
    """Start the model on all hosts and serve it until Ctrl-C."""
    if detach and ask is not None:
        raise typer.BadParameter("a run that is to go on cannot stop after --ask", param_hint="'--detach'")
    if dry_run:
        _plan("launch", file, offline=False, accept_new=accept_new, as_json=as_json)
        return
    with _guard("launch", as_json), _signals() as signals:
        import time

        from cpupp.launch.contract import LaunchOptions
        from cpupp.launch.records import new_run_id
        from cpupp.plan.refusals import detach_error

        started = time.monotonic()
        spec, raw = _load_file(file)
        secrets = use_secrets(spec, os.environ)
        if detach and (error := detach_error(spec)) is not None:
            raise error
        run = new_run_id()
        options = LaunchOptions(
            run=run,
            folder=_runs_folder() / f"{spec.name}-{run}",
            timeout=timeout,
            grace=grace,
            ask=ask,
            max_tokens=max_tokens,
            started=started,
            file=str(Path(file).absolute()),
            spec=raw,
            secrets=secrets,
            detach=detach,
        )
        with _connected(spec, signals, accept_new, grace_s=grace) as (sessions, facts):
            plan, commands = _make_plan(spec, facts)
            _show_plan(plan, commands)
            options = _for_restarts(options, spec, plan, facts)
            result = _run(plan, commands, sessions, signals, options)
        _finish_launch(plan, result, as_json)


def _for_restarts(
    options: LaunchOptions, spec: ClusterSpec, plan: Plan, facts: Mapping[str, HostFacts]
) -> LaunchOptions:
    """What another attempt needs beside the plan: other ports of the head, and a way back to a lost host."""
    from dataclasses import replace

    from cpupp.launch.session import open_session

    hosts = {host.name: host for host in spec.hosts}

    def reopen(name: str) -> Any:
        return open_session(hosts[name], spec.deadlines.connect, grace_s=options.grace)

    ports = facts[plan.head].free_ports if spec.network.master_port == "auto" else ()
    return replace(
        options,
        spare_ports=tuple(port for port in ports if port not in (plan.master_port, plan.serve_port)),
        reopen=reopen,
    )


def _run(
    plan: Plan,
    commands: tuple[RankCommand, ...],
    sessions: MutableMapping[str, Any],
    signals: Signals,
    options: LaunchOptions,
) -> Any:
    from cpupp.launch.supervisor import Supervisor
    from cpupp.render_launch import LaunchView

    view = LaunchView(plan, started=options.started)
    try:
        supervisor = Supervisor(plan, commands, sessions, options, view)
        signals.forward(supervisor.interrupt)
        return supervisor.run()
    finally:
        view.close()


def _finish_launch(plan: Plan, result: Any, as_json: bool) -> None:
    from cpupp.render import page_width, print_envelope, write
    from cpupp.render_launch import result_data, result_errors, result_page

    result_page(result, page_width(sys.stderr)).show(sys.stderr)
    if as_json:
        ok = result.exit_code == 0
        print_envelope("launch", ok=ok, data=result_data(plan, result), errors=result_errors(result))
    elif result.answer is not None:
        write(sys.stdout, result.answer.text + "\n")
    raise typer.Exit(result.exit_code)


@app.command()
def plan(
    file: _File,
    offline: Annotated[
        bool, typer.Option("--offline", help="Ask no host; what cannot be known is marked as assumed.")
    ] = False,
    svg: Annotated[
        str | None, typer.Option(metavar="FILE.svg", help="Write the map as a picture, too.", show_default=False)
    ] = None,
    accept_new: _AcceptNew = False,
    as_json: _Json = False,
) -> None:
    """Show what a launch would do: a map, ranks, layers, links, commands."""
    _plan("plan", file, offline=offline, accept_new=accept_new, as_json=as_json, svg=svg)


def _plan(command: str, file: str, *, offline: bool, accept_new: bool, as_json: bool, svg: str | None = None) -> None:
    with _guard(command, as_json), _signals() as signals:
        from cpupp.cli_files import svg_path, write_file
        from cpupp.render import page_width, print_envelope
        from cpupp.render_map import can_draw
        from cpupp.render_plan import plan_data, plan_page

        picture = None if svg is None else svg_path(svg)
        spec = _load(file)
        try_secrets(spec, None if offline else os.environ)
        if offline:
            made, commands = _make_plan(spec, {})
        else:
            with _connected(spec, signals, accept_new) as (_, facts):
                made, commands = _make_plan(spec, facts)
        if picture is not None:
            from cpupp.render_svg import map_svg

            write_file(picture, map_svg(made))
        if as_json:
            print_envelope(command, ok=True, data=plan_data(made, commands))
        else:
            page = plan_page(made, commands, page_width(sys.stdout), lines=can_draw(sys.stdout))
            page.show(sys.stdout)


@app.command()
def doctor(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="The cluster file; without it, this machine.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE[,CODE]", help="Run these checks alone: codes, or beginnings (NET)."),
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="CODE[,CODE]", help="Leave these checks out.")] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="First remove dead files of this user from every host's /dev/shm.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show each check that is in order.")] = False,
    accept_new: _AcceptNew = False,
    as_json: _Json = False,
) -> None:
    """Check the hosts of a cluster file, or this machine, without loading a model."""
    with _guard("doctor", as_json), _signals() as signals:
        from cpupp import cli_doctor
        from cpupp.plan.checks import CHECKS
        from cpupp.plan.selection import chosen_codes

        codes = chosen_codes(CHECKS, only or (), skip or ())
        spec = cli_doctor.this_machine() if file is None else _load(file)
        try_secrets(spec, os.environ)
        examined = signals.wait(
            lambda: cli_doctor.examine(
                spec,
                codes,
                accept_new=_tell if accept_new else None,
                with_file=file is not None,
                clean=clean,
                tell=_tell,
            )
        )
        shown = None if file is None else spec
        ok = cli_doctor.show(shown, file or "", codes, examined, as_json=as_json, verbose=verbose)
        raise typer.Exit(int(ExitCode.OK if ok else ExitCode.FINDINGS))


@bench.command("comm")
def bench_comm(
    file: _File,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repetitions: seconds of measuring, not a minute.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, max=MAX_SECONDS, help="Seconds until all must be measured.")] = 600.0,
    accept_new: _AcceptNew = False,
    as_json: _Json = False,
) -> None:
    """Measure every link and group, beside vLLM's generic path, gloo, TCP and SHM. Loads no model."""
    with _guard("bench comm", as_json), _signals() as signals:
        from cpupp.plan.bench_comm import bench_commands

        spec = _load(file)
        try_secrets(spec, None)
        with _connected(spec, signals, accept_new, grace_s=1.0) as (sessions, facts):
            plan, commands = _make_plan(spec, facts)
            result = _measure(plan, bench_commands(plan, commands, quick=quick), sessions, signals, timeout)
        _finish_bench(plan, result, as_json)


def _measure(
    plan: Plan, commands: tuple[RankCommand, ...], sessions: Mapping[str, Any], signals: Signals, timeout: float
) -> Any:
    from cpupp.launch.bench_comm import BenchOptions, BenchRun
    from cpupp.launch.records import new_run_id
    from cpupp.render_bench import BenchView

    run = new_run_id()
    options = BenchOptions(run=run, folder=_runs_folder() / f"{plan.name}-bench-{run}", timeout=timeout)
    view = BenchView()
    try:
        made = BenchRun(plan, commands, sessions, options, view.tell)
        signals.forward(made.interrupt)
        return made.run()
    finally:
        view.close()


def _finish_bench(plan: Plan, result: Any, as_json: bool) -> None:
    from cpupp.render import page_width, print_envelope
    from cpupp.render_bench import bench_data, show_bench
    from cpupp.render_launch import result_errors, result_page

    ok = result.run.exit_code == 0
    if not ok or result.run.leftovers:
        result_page(result.run, page_width(sys.stderr)).show(sys.stderr)
    if as_json:
        print_envelope("bench comm", ok=ok, data=bench_data(plan, result), errors=result_errors(result.run))
    elif ok:
        show_bench(plan, result)
    raise typer.Exit(result.run.exit_code)


def _load(file: str) -> ClusterSpec:
    return _load_file(file)[0]


def _load_file(file: str) -> tuple[ClusterSpec, bytes]:
    from cpupp.launch.config import load_cluster_file

    return load_cluster_file(file)


@contextmanager
def _connected(
    spec: ClusterSpec, signals: Signals, accept_new: bool, **options: Any
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Open a session to every host and ask each for its facts; the sessions are closed at the end, whatever happens."""
    from cpupp.launch.probe import probe_hosts
    from cpupp.launch.session import open_sessions

    tell = _tell if accept_new else None
    sessions: dict[str, Any] = dict(signals.wait(lambda: open_sessions(spec, accept_new=tell, **options)))
    try:
        yield sessions, signals.wait(lambda: probe_hosts(spec, sessions))
    finally:
        _close(sessions)


def _tell(words: str) -> None:
    typer.echo(words, err=True)


def _close(sessions: Mapping[str, Any]) -> None:
    """Close all sessions at once: each waits until its host is clean."""
    import threading

    threads = [threading.Thread(target=session.close, daemon=True) for session in sessions.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _make_plan(spec: ClusterSpec, facts: Mapping[str, Any]) -> tuple[Plan, tuple[RankCommand, ...]]:
    from cpupp.plan.command import make_commands
    from cpupp.plan.plan import make_plan

    made = make_plan(spec, facts)
    return made, make_commands(made)


def _show_plan(made: Plan, commands: tuple[RankCommand, ...]) -> None:
    from cpupp.render import page_width
    from cpupp.render_map import can_draw
    from cpupp.render_plan import plan_page

    plan_page(made, commands, page_width(sys.stderr), lines=can_draw(sys.stderr)).show(sys.stderr)


def _runs_folder() -> Path:
    """Where runs are recorded: $XDG_STATE_HOME/cpupp/runs, by default ~/.local/state/cpupp/runs."""
    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return root / "cpupp" / "runs"


cli_init.add_to(app)
cli_runs.add_to(app, _runs_folder)
cli_serve.add_to(bench, _runs_folder, os.environ)


def main() -> None:
    """Run the command line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the descriptor closed
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # stays open to the end
    try:
        app()
    except KeyboardInterrupt:  # before a verb has its own handler
        _leave(int(ExitCode.SIGINT))
    except OSError as error:  # of --help and --version, which Typer writes
        lost_output(error)
        _leave(int(ExitCode.RANK_FAILED))
