"""What `ps`, `status`, `logs` and `stop` show: tables for people, values for the envelope."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cpupp.errors import CpuppError, ExitCode
from cpupp.plan.runs import Run
from cpupp.plan.runstate import RunState
from cpupp.plan.start_times import start_data, start_text
from cpupp.plan.status import RankStatus, RunStatus
from cpupp.render import Page, forget, visible
from cpupp.render_launch import failure_data, show_failure
from cpupp.render_sizes import count, gib, ranges
from cpupp.render_steps import step_data, step_text

if TYPE_CHECKING:
    from cpupp.launch.run_stop import StopResult

_STYLES = {
    RunState.READY: "bold green",
    RunState.STARTING: "bold cyan",
    RunState.RESTARTING: "bold yellow",
    RunState.STOPPING: "bold yellow",
    RunState.DEGRADED: "bold red",
    RunState.FAILED: "bold red",
    RunState.CRASHED: "bold red",
}


def span(seconds: float | None) -> str:
    """A time for people: `40 s`, `12 min`, `3 h 20 min`, `2 d 4 h`; empty when unknown."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


# ps -------------------------------------------------------------------------------------------------------------------


def runs_page(statuses: Sequence[RunStatus], width: int) -> Page:
    """One line for each run."""
    page = Page(width)
    rows = [
        (
            status.run.run,
            status.run.name,
            _state_text(status),
            span(status.age),
            ", ".join(host.name for host in status.run.hosts),
            "detached" if status.run.detached else _launcher_text(status.run),
            status.run.url,
        )
        for status in statuses
    ]
    page.table(("run", "name", "state", "started", "hosts", "launcher", "API"), rows, indent="")
    return page


def _state_text(status: RunStatus) -> str:
    missing = ", ".join(answer.host for answer in status.unreachable)
    return f"{status.state} ({missing} not reached)" if missing else str(status.state)


def _launcher_text(run: Run) -> str:
    if run.launcher is None or run.state.ended:
        return ""
    place = "" if run.launcher_alive else f" on {run.launcher.hostname}"
    return f"pid {run.launcher.pid}{place}"


def run_data(status: RunStatus) -> dict[str, Any]:
    """A run as JSON values, as `ps` gives it."""
    run = status.run
    return {
        "run": run.run,
        "name": run.name,
        "state": str(status.state),
        "detached": run.detached,
        "attempt": run.attempt,
        "started": run.started or None,
        "age_seconds": None if status.age is None else round(status.age, 1),
        "url": run.url,
        "model": run.served_name,
        "hosts": [host.name for host in run.hosts],
        "unreachable": [answer.host for answer in status.unreachable],
        "file": run.file,
        "folder": run.folder,
        "launcher": None
        if run.launcher is None
        else {
            "pid": run.launcher.pid,
            "hostname": run.launcher.hostname,
            "user": run.launcher.user,
            "alive": run.launcher_alive,
        },
    }


# status ---------------------------------------------------------------------------------------------------------------


def status_page(status: RunStatus, width: int) -> Page:
    """The run, its ranks, its load, its first failure."""
    page = Page(width)
    page.line(_headline(status), _STYLES.get(status.state, "bold"))
    run = status.run
    if run.url and not status.state.ended:
        page.line(f"  API   {run.url}" + (f"  model {run.served_name}" if run.served_name else ""))
    if status.load is not None:
        page.line(f"  load  {_load_text(status)}")
    if run.start:
        page.prose(start_text(run.start), indent="  ", hang="start ")
    if run.folder:
        page.line(f"  kept  {run.folder}", "dim")
    page.line()
    page.table(
        ("rank", "stage", "host", "state", "pid", "CPU", "RSS", "last output", "decode step"),
        [_rank_row(r) for r in status.ranks],
    )
    for answer in status.unreachable:
        page.prose(f"{answer.host}: {answer.error}", indent="", hang="not reached: ", style="yellow")
        if answer.hint:
            page.prose(answer.hint, hang="hint: ")
    if status.first_failure is not None:
        show_failure(page, status.first_failure)
        rest = status.num_failures - 1
        if rest > 0:
            page.line(f"{count(rest, 'failure')} more, which followed from it or came later", "dim")
    return page


def _headline(status: RunStatus) -> str:
    run = status.run
    parts = [f"{run.name} {run.run}: {status.state}"]
    if run.attempt > 1:
        parts.append(f"attempt {run.attempt}")
    if run.detached:
        parts.append("detached")
    elif _launcher_text(run):
        parts.append(f"launcher {_launcher_text(run)}")
    if status.age is not None:
        parts.append(f"started {span(status.age)} ago")
    return ", ".join(parts)


def _load_text(status: RunStatus) -> str:
    load, speed = status.load, status.speed
    assert load is not None
    parts = []
    if load.running is not None:
        parts.append(f"{load.running} running, {load.waiting or 0} waiting")
    if speed.generated is not None:
        parts.append(f"{speed.generated:.1f} tokens/s generated, {speed.prompt or 0.0:.1f} read")
    if load.kv_usage is not None:
        parts.append(f"KV cache {load.kv_usage:.1%} used")
    return "; ".join(parts) or "not known: /metrics has none of the names that are looked for"


def _size(num_bytes: int) -> str:
    return gib(num_bytes) if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"


def _rank_row(rank: RankStatus) -> tuple[str, ...]:
    return (
        str(rank.place.rank),
        "" if rank.place.stage is None else str(rank.place.stage),
        rank.place.host,
        rank.doing,
        "" if rank.pid is None else str(rank.pid),
        "" if rank.cpu is None else f"{rank.cpu:.0%}",
        "" if rank.rss is None else _size(rank.rss),
        "" if rank.log_age is None else f"{span(rank.log_age)} ago",
        "" if rank.decode is None else step_text(rank.decode),
    )


def status_data(status: RunStatus) -> dict[str, Any]:
    """The status as JSON values."""
    load, first = status.load, status.first_failure
    return {
        **run_data(status),
        "start": start_data(status.run.start),
        "ranks": [_rank_data(rank) for rank in status.ranks],
        "load": None
        if load is None
        else {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "generated_tokens": load.generated_tokens,
            "prompt_tokens": load.prompt_tokens,
            "generated_tokens_per_second": status.speed.generated,
            "prompt_tokens_per_second": status.speed.prompt,
        },
        "first_failure": None if first is None else failure_data(first),
    }


def _rank_data(rank: RankStatus) -> dict[str, Any]:
    return {
        "rank": rank.place.rank,
        "host": rank.place.host,
        "node_rank": rank.place.node_rank,
        "stage": rank.place.stage,
        "tp_index": rank.place.tp_index,
        "alive": rank.alive,
        "state": rank.doing,
        "pid": rank.pid,
        "cpu": None if rank.cpu is None else round(rank.cpu, 3),
        "rss_bytes": rank.rss,
        "log_age_seconds": None if rank.log_age is None else round(rank.log_age, 1),
        "decode_step": step_data(rank.decode),
    }


def status_errors(status: RunStatus) -> list[CpuppError]:
    """What is wrong with the run, for the envelope: its first failure, and hosts that could not be asked."""
    first = status.first_failure
    errors = [] if first is None else [CpuppError(first.code, first.message, hint=first.hint, where=first.host)]
    return errors + [
        CpuppError("HOST-UNREACHABLE", answer.error, hint=answer.hint, where=answer.host)
        for answer in status.unreachable
    ]


def status_exit(status: RunStatus) -> ExitCode:
    """0 while the run lives and nothing has failed; 1 when it failed or has ended; 5 when a host cannot be asked."""
    if status.state.ended or status.state is RunState.DEGRADED:
        return ExitCode.RANK_FAILED
    return ExitCode.UNREACHABLE if status.unreachable else ExitCode.OK


def changes(before: RunStatus | None, after: RunStatus) -> list[str]:
    """One line for everything that is different now, for a watch that is not on a terminal."""
    lines = [] if before is not None and before.state == after.state else [_headline(after)]
    old = {rank.place.rank: rank for rank in before.ranks} if before is not None else {}
    for rank in after.ranks:
        earlier = old.get(rank.place.rank)
        if earlier is None or (earlier.doing, earlier.alive, earlier.pid) != (rank.doing, rank.alive, rank.pid):
            pid = "" if rank.pid is None else f", pid {rank.pid}"
            lines.append(f"rank {rank.place.rank} on {rank.place.host}: {rank.doing}{pid}")
    lost = {answer.host for answer in before.unreachable} if before is not None else set()
    lines += [f"host {a.host} not reached: {a.error}" for a in after.unreachable if a.host not in lost]
    now = {answer.host for answer in after.unreachable}
    lines += [f"host {host} reached again" for host in sorted(lost - now)]
    first = after.first_failure
    if first is not None and (before is None or before.first_failure is None):
        lines.append(f"first failure: {first.host}: {first.message.splitlines()[0]}")
    stamp = time.strftime("%H:%M:%S")
    return [f"{stamp}  {line}" for line in lines]


# stop -----------------------------------------------------------------------------------------------------------------


def stop_page(result: StopResult, width: int) -> Page:
    """How a run was stopped, host by host where something is to be said."""
    page = Page(width)
    run = result.run
    if result.by == "nobody":
        page.line(f"{run.name} {run.run}: already {run.state}")
        return page
    page.line(f"{run.name} {run.run}: {run.state}", _STYLES.get(run.state, "bold"))
    for host in result.missing:
        page.prose(f"{host.host}: {host.error}", hang="not reached: ", style="yellow")
    for host in result.stuck:
        what = "; ".join([*([f"cannot be ended: {', '.join(host.left)}"] if host.left else []), host.error]).strip("; ")
        page.prose(f"{host.host}: {what}", hang="not done: ", style="yellow")
    if result.record_error is not None:
        page.prose(str(result.record_error), hang="not recorded: ", style="yellow")
        page.prose("the run is down; what its hosts kept of it is there still", hang="note: ")
    if result.missing or result.stuck or result.record_error is not None:
        page.prose(f"run `cpupp stop {run.run}` again when that is mended: it does the rest", hang="hint: ")
    folders = {str(Path(path).parent) for host in result.hosts for path in host.logs}
    for folder in sorted(folders):
        page.line(f"  logs: {folder}", "dim")
    return page


def stop_data(result: StopResult) -> dict[str, Any]:
    """How a run was stopped, as JSON values."""
    return {
        "run": result.run.run,
        "name": result.run.name,
        "state": str(result.run.state),
        "by": result.by,
        "folder": result.run.folder,
        "hosts": [
            {
                "host": host.host,
                "reached": host.reached,
                "found": host.found,
                "left": list(host.left),
                "logs": list(host.logs),
                "error": host.error,
            }
            for host in result.hosts
        ],
    }


def stop_errors(result: StopResult) -> list[CpuppError]:
    """What could not be done."""
    missing = [CpuppError("HOST-UNREACHABLE", h.error, hint=h.hint, where=h.host) for h in result.missing]
    stuck = [
        CpuppError("STOP-STUCK", h.error or f"cannot be ended: {', '.join(h.left)}", hint=h.hint, where=h.host)
        for h in result.stuck
    ]
    return missing + stuck + ([result.record_error] if result.record_error is not None else [])


def stop_exit(results: Sequence[StopResult]) -> ExitCode:
    """5 when a host could not be reached, 1 when something could not be ended or recorded, 0 otherwise."""
    if any(result.missing for result in results):
        return ExitCode.UNREACHABLE
    left = any(result.stuck or result.record_error is not None for result in results)
    return ExitCode.RANK_FAILED if left else ExitCode.OK


# logs -----------------------------------------------------------------------------------------------------------------


def node_prefix(node: int, host: str, ranks: Sequence[int]) -> str:
    """What stands before each line of a vLLM node, as `launch` shows it."""
    return f"[{host} {ranges(ranks)}]" if ranks else f"[{host} vLLM node {node}]"


def print_lines(stream: TextIO, lines: Iterable[str]) -> bool:
    """Write lines; return whether somebody still reads them."""
    text = "".join(f"{visible(line)}\n" for line in lines)
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        forget(stream)
        return False
    return True
