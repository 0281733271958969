"""The verb `bench serve`: parse, call, render, exit code. Nothing heavy before it is needed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpupp.cli_frame import fail, guard, leave, signals
from cpupp.errors import CpuppError

if TYPE_CHECKING:
    from cpupp.plan.bench_serve import ServeOrder, Turn
    from cpupp.plan.roofline import RankReads
    from cpupp.render_serve import ServeReport
    from cpupp.signals import Interrupted, Signals

MAX_TOKENS = 1_000_000
MAX_SECONDS = 10_000_000
DEFAULT_ROUNDS = 3
AGAINST_TURNS = 3


def concurrency_of(text: str) -> tuple[int, ...]:
    """Read `1,8,32`. Raises typer.BadParameter."""
    words = [word.strip() for word in text.split(",")]
    numbers = tuple(int(word) for word in words if word.isdecimal())
    if len(numbers) != len(words) or not all(0 < number <= 4096 for number in numbers):
        raise typer.BadParameter(f"--concurrency: {text!r} is no list of numbers from 1 to 4096, such as 1,8,32")
    return tuple(dict.fromkeys(numbers))


def _one_of(*names: str) -> Callable[[str | None], str | None]:
    def check(text: str | None) -> str | None:
        if text is not None and text not in names:
            raise typer.BadParameter(f"{text!r} is none of {', '.join(names)}")
        return text

    return check


def add_to(bench: typer.Typer, folder: Callable[[], Path], environment: Mapping[str, str]) -> None:
    """Add the verb. folder: where runs are recorded; environment: the launcher's own, for secrets."""

    @bench.command("serve")
    def serve(
        target: Annotated[
            str | None,
            typer.Argument(
                metavar="[RUN | FILE]",
                help="A run that serves (as for status; default: the only one), or a cluster file, which is launched.",
                show_default=False,
            ),
        ] = None,
        file: Annotated[
            str | None, typer.Option("--file", metavar="FILE", help="Find the run by asking the hosts of this file.")
        ] = None,
        concurrency: Annotated[str, typer.Option(metavar="N[,N]", help="Requests at a time.")] = "1,8,32",
        prompt_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Tokens of each prompt.")] = 64,
        output_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Tokens of each answer.")] = 64,
        waves: Annotated[int, typer.Option(min=1, max=1000, help="Requests of a turn, for each at a time.")] = 2,
        turns: Annotated[
            int | None,
            typer.Option(
                min=1,
                max=1000,
                help="Turns of each concurrency on one server (1; 3 with --against).",
                show_default=False,
            ),
        ] = None,
        client: Annotated[
            str,
            typer.Option(callback=_one_of("auto", "plain", "vllm"), help="Who asks: vllm, plain, or auto."),
        ] = "auto",
        stream: Annotated[
            bool, typer.Option("--stream/--no-stream", help="Plain client: answers token by token.")
        ] = True,
        against: Annotated[
            str | None,
            typer.Option(
                metavar="by-hand", callback=_one_of("by-hand"), help="FILE: stock vLLM started by hand, in turns."
            ),
        ] = None,
        rounds: Annotated[
            int | None,
            typer.Option(min=1, max=1000, help="Starts of each side with --against (3).", show_default=False),
        ] = None,
        timeout: Annotated[
            float, typer.Option(min=1, max=MAX_SECONDS, help="Seconds until a server must serve, and for one turn.")
        ] = 1200.0,
        accept_new: Annotated[
            bool, typer.Option("--accept-new", help="FILE: add SSH keys of unknown hosts to known_hosts.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON envelope on stdout instead of text.")] = False,
    ) -> None:
        """Measure the API: tokens per second, latencies, where a decode step goes, distance from the roofline."""
        if rounds is not None and against is None:
            raise typer.BadParameter("it counts the rounds of --against", param_hint="'--rounds'")
        levels = concurrency_of(concurrency)
        launches = file is None and target is not None and _is_file(folder(), target)
        if against is not None and not launches:
            raise typer.BadParameter("it takes a cluster file: both sides are started anew", param_hint="'--against'")
        with guard("bench serve", as_json), signals() as caught:
            from cpupp.plan.bench_serve import ServeOrder

            order = ServeOrder(
                concurrency=levels,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                waves=waves,
                turns=turns or (AGAINST_TURNS if against else 1),
                client="",
                stream=stream,
                seed=int(time.time()),
                timeout_s=timeout,
            )
            if launches:
                assert target is not None
                number = (rounds or DEFAULT_ROUNDS) if against else None
                tell = _tell if accept_new else None
                report, failure = _launched(caught, folder(), environment, target, order, client, number, tell)
            else:
                report, failure = _running(caught, folder(), environment, target, file, order, client)
            _end(report, failure, as_json)


def _is_file(root: Path, target: str) -> bool:
    from cpupp.launch.run_find import is_cluster_file

    return is_cluster_file(root, target)


def _tell(words: str) -> None:
    typer.echo(words, err=True)


def _running(
    caught: Signals,
    root: Path,
    environment: Mapping[str, str],
    wanted: str | None,
    file: str | None,
    order: ServeOrder,
    client: str,
) -> tuple[ServeReport, CpuppError | Interrupted | None]:
    """What was measured, and why it ended before its time."""
    from dataclasses import replace

    from cpupp.cli_secrets import try_secrets, use_secrets
    from cpupp.launch.bench_serve import choose_client, measure, served
    from cpupp.launch.run_find import find
    from cpupp.launch.run_hosts import spec_of
    from cpupp.plan.bench_serve import CPUPP, check_lengths, serve_rows
    from cpupp.plan.secret import has_api_key
    from cpupp.render_bench import BenchView
    from cpupp.render_serve import ServeReport
    from cpupp.signals import Interrupted

    target = caught.wait(lambda: find(root, wanted, file))
    view = BenchView()
    turns: list[Turn] = []
    reads: list[RankReads] = []

    def work() -> None:
        nonlocal order
        spec = target.spec or spec_of(target.run)
        check_lengths(spec, order)
        key = ""
        if has_api_key(spec):
            key = use_secrets(spec, environment).api_key(spec.hosts[0].name)
        else:
            try_secrets(spec, None)
        found = served(target.run, target.hosts, spec, key)
        reads.extend(found.reads)
        order = replace(order, client=choose_client(client, target.hosts, found.api))
        for turn in measure(target.hosts, found, order, view.tell):
            turns.append(turn)  # one after the other: what was measured before a failure counts

    failure: CpuppError | Interrupted | None = None
    try:
        caught.wait(work)
    except (CpuppError, Interrupted) as error:
        failure = error
    finally:
        view.close()
        target.hosts.close()
    rows = serve_rows(CPUPP, turns, order, target.recorded().places, reads) if turns else ()
    return ServeReport(name=f"{target.run.name} {target.run.run}", order=order, rows={CPUPP: rows}), failure


def _launched(
    caught: Signals,
    root: Path,
    environment: Mapping[str, str],
    file: str,
    order: ServeOrder,
    client: str,
    rounds: int | None,
    accept_new: Callable[[str], None] | None,
) -> tuple[ServeReport, CpuppError | Interrupted | None]:
    """What was measured, and why it ended before its time."""
    from cpupp.cli_secrets import use_secrets
    from cpupp.launch.bench_file import FileBench
    from cpupp.launch.config import load_cluster_file
    from cpupp.plan.bench_serve import BY_HAND, CPUPP, check_lengths, ratios, serve_rows
    from cpupp.render_bench import BenchView
    from cpupp.render_serve import ServeReport
    from cpupp.signals import Interrupted

    spec, raw = load_cluster_file(file)
    check_lengths(spec, order)
    view = BenchView()
    bench = FileBench(
        spec=spec,
        raw=raw,
        file=str(Path(file).absolute()),
        secrets=use_secrets(spec, environment),
        root=root,
        order=order,
        client=client,
        timeout=order.timeout_s,
        accept_new=accept_new,
        tell=view.tell,
    )
    failure: CpuppError | Interrupted | None = None
    try:
        caught.wait(lambda: bench.run(rounds))
    except Interrupted as interrupted:
        view.tell(f"interrupted by {interrupted}: taking down what runs")
        bench.stop()
        failure = interrupted
    except CpuppError as error:
        failure = error
    finally:
        view.close()
    found = bench.found
    ours = serve_rows(CPUPP, found.turns[CPUPP], bench.order, found.places, found.reads)
    theirs = serve_rows(BY_HAND, found.turns[BY_HAND], bench.order)
    report = ServeReport(
        name=spec.name,
        order=bench.order,
        rows={CPUPP: ours, BY_HAND: theirs},
        starts=found.starts,
        ratios=ratios(found.starts, ours, theirs) if rounds is not None else (),
    )
    return report, failure


def _end(report: ServeReport, failure: CpuppError | Interrupted | None, as_json: bool) -> None:
    """Show what was measured, also where it ended early: the rounds before have taken hours. Then the exit code."""
    from cpupp.render import page_width, print_envelope
    from cpupp.render_serve import serve_data, serve_page
    from cpupp.signals import Interrupted

    found = failure is None or bool(report.all_rows())
    data = serve_data(report) if found and as_json else None
    if found and not as_json:
        serve_page(report, page_width(sys.stdout)).show(sys.stdout)
    if isinstance(failure, Interrupted):
        fail("bench serve", as_json, CpuppError("INTERRUPTED", f"interrupted by {failure}: the figures end here"), data)
        leave(failure.exit_code)
    elif failure is None:
        if as_json:
            print_envelope("bench serve", ok=True, data=data)
    elif as_json and found:
        fail("bench serve", as_json, failure, data)
        raise typer.Exit(int(failure.exit_code))
    else:
        raise failure
