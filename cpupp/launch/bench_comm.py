"""The loop of one `cpupp bench comm`: the agents start a rank on every slot, until all have measured or one fails.

The gang lives and dies as one here too: the first rank that fails is named, all are taken down, nothing is left.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.contract import Session
from cpupp.launch.logs import NodeLog, open_logs
from cpupp.launch.records import RunRecord
from cpupp.launch.result import RunResult
from cpupp.launch.site import start_request
from cpupp.launch.start import Start
from cpupp.launch.stop import stop_hosts
from cpupp.plan.bench_order import BenchDone, BenchTimes, decode_line
from cpupp.plan.command import RankCommand
from cpupp.plan.failures import Failure, exit_text, order_failures
from cpupp.plan.handoff import ErrorReport, GroupReport, HandoffError
from cpupp.plan.joining import mismatch
from cpupp.plan.lifecycle import SETTLE
from cpupp.plan.plan import HostPlan, Plan
from cpupp.plan.shown import shown_command, shown_plan

TICK = 0.2
GRACE_S = 1.0
_CAUSES = ("HOST-LOST", "RANK-SIGNAL", "RANK-START")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """run: run id; folder: where the record goes; timeout: seconds for everything."""

    run: str
    folder: Path
    timeout: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """How it ended, and all times that came back."""

    run: RunResult
    times: tuple[BenchTimes, ...]


class BenchRun:
    """Runs the ranks on open sessions. `run` blocks until everything is down; `interrupt` may be called from signals.

    commands: of `bench_commands`, one a rank. tell: called with each piece of progress.
    """

    def __init__(
        self,
        plan: Plan,
        commands: Sequence[RankCommand],
        sessions: Mapping[str, Session],
        options: BenchOptions,
        tell: Callable[[str], None],
    ) -> None:
        self.plan, self.commands, self.sessions, self.options, self.tell = plan, commands, sessions, options, tell
        self.record = RunRecord(options.folder)
        self._started, self._created = time.monotonic(), time.time()
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._logs: dict[int, NodeLog] = {}
        self._expected = {(rank, g.kind, g.ranks): g for g in plan.groups for rank in g.ranks}
        self._joined: set[tuple[int, str, tuple[int, ...]]] = set()
        self._done: set[int] = set()
        self._times: list[BenchTimes] = []
        self._failures: list[Failure] = []
        self._leftovers: list[str] = []
        self._decide_at: float | None = None
        self._signum = 0

    def interrupt(self, signum: int) -> None:
        """Ask for the end. Only enqueues: safe in a signal handler."""
        self._queue.put(("", {"event": "signal", "signum": signum}))

    def run(self) -> BenchResult:
        """Start, measure, take down. Whatever happens inside, every host is ordered to stop before this returns."""
        self._logs = open_logs(self.record.logs, {c.node_rank: c.host for c in self.commands})
        self.record.write(
            "plan.json", {"plan": shown_plan(self.plan), "commands": [shown_command(c) for c in self.commands]}
        )
        for session in self.sessions.values():
            session.on_event = lambda host, data: self._queue.put((host, data))
        self.tell(f"starting {len(self.commands)} ranks on {', '.join(self.sessions)}")
        try:
            for host in self.sessions:
                threading.Thread(target=self._start, args=(host,), daemon=True, name=f"start-{host}").start()
            while not self._over():
                try:
                    self._take(*self._queue.get(timeout=TICK))
                except queue.Empty:
                    continue
        finally:
            self._stop()
            while not self._queue.empty():
                host, data = self._queue.get()
                if data.get("event") == "output":
                    self._take(host, data)
            for log in self._logs.values():
                log.close()
        result = BenchResult(run=self._result(), times=tuple(self._times))
        self.record.write("result.json", result)
        self.record.close()
        return result

    def _over(self) -> bool:
        now = time.monotonic()
        if self._signum or len(self._done) == len(self.commands):
            return True
        if self._decide_at is None and now > self._started + self.options.timeout:
            for command in self.commands:
                if command.node_rank not in self._done:
                    self._fail(command.node_rank, "BENCH-TIMEOUT", f"not done after {self.options.timeout:g} s")
            return True
        return self._decide_at is not None and now >= self._decide_at

    # What comes in

    def _take(self, host: str, data: dict[str, Any]) -> None:
        rank = data.get("node", -1)
        match data.get("event"):
            case "signal":
                self._signum = data["signum"]
            case "fault":
                raise data["error"]
            case "lost":
                self._lose(host, str(data.get("reason", "connection lost")))
            case "failed":
                self._fail(rank, "RANK-START", data["message"])
            case "output":
                self._logs[rank].feed(data["data"])
            case "report":
                self._report(rank, data["line"])
            case "spawned":
                self.record.event("Spawned", data={"node_rank": rank, "pid": data["pid"]})
            case "exited" if rank not in self._done:
                code = data["code"]
                self._fail(rank, "RANK-SIGNAL" if code < 0 else "RANK-EXIT", exit_text(code))

    def _report(self, rank: int, line: str) -> None:
        try:
            report = decode_line(line)
        except HandoffError as error:
            self.tell(f"rank {rank} sent a report that cannot be read: {error}")
            return
        self.record.event("Reported", data={"node_rank": rank, "report": report})
        match report:
            case BenchTimes():
                if report.nanoseconds and not any(_block(t) == _block(report) for t in self._times):
                    self.tell(f"measured {_block(report)}")
                self._times.append(report)
            case BenchDone():
                self._done.add(rank)
            case ErrorReport(where=where, message=message):
                self._fail(rank, "RANK-EXCEPTION", f"{where}: {message}")
            case GroupReport():
                self._join(rank, report)
            case _:
                pass

    def _join(self, rank: int, report: GroupReport) -> None:
        key = (report.rank, report.kind, tuple(report.ranks))
        if self.plan.communicator == "links" and (wrong := mismatch(self._expected.get(key), report)) is not None:
            self._fail(rank, "BENCH-MISMATCH", wrong)
        self._joined.add(key)
        if len(self._joined) == len(self._expected):
            self.tell(f"all groups joined after {time.monotonic() - self._started:.0f} s")

    def _fail(self, rank: int, code: str, message: str) -> None:
        """Note the first failure of a rank; the others have SETTLE seconds for theirs."""
        if any(failure.node_rank == rank for failure in self._failures):
            return
        host = self.commands[rank].host
        self._add(Failure(host=host, node_rank=rank, ranks=(rank,), code=code, message=message))

    def _lose(self, host: str, reason: str) -> None:
        ranks = tuple(command.node_rank for command in self.commands if command.host == host)
        self._add(Failure(host=host, node_rank=None, ranks=ranks, code="HOST-LOST", message=reason))

    def _add(self, failure: Failure) -> None:
        self._failures.append(failure)
        self.record.event("Failed", data=failure)
        if self._decide_at is None:
            self._decide_at = time.monotonic() + SETTLE

    # What goes out

    def _start(self, host: str) -> None:
        session, options = self.sessions[host], self.options
        ranks = [command for command in self.commands if command.host == host]
        start = Start(plan=self.plan, commands=ranks, run=options.run, attempt=1, created=self._created)
        try:
            start.on_host(session, host, request=self._start_params)
        except CpuppError as error:
            if error.code == "HOST-LOST":  # the session says so itself, once
                return
            self._queue.put((host, {"event": "failed", "node": ranks[0].node_rank, "message": str(error)}))
        except Exception as error:  # a fault of ours: without this, `run` would wait until its time is over
            self._queue.put((host, {"event": "fault", "error": error}))

    def _host(self, name: str) -> HostPlan:
        return next(host for host in self.plan.hosts if host.name == name)

    def _start_params(self, command: RankCommand) -> dict[str, Any]:
        rank = self.plan.ranks[command.node_rank]
        order = start_request(
            command,
            rank.rank,
            run=self.options.run,
            attempt=1,
            node_rank=rank.node_rank,
            mode="links",
            backend=self.plan.backend,
            no_shm=bool(self._host(command.host).no_shm),
        )
        return {**order, "cores": list(rank.cores)}

    def _stop(self) -> None:
        lost = {failure.host for failure in self._failures if failure.code == "HOST-LOST"}
        self._leftovers += stop_hosts(self.sessions, grace=GRACE_S, lost=lost)

    # The end

    def _result(self) -> RunResult:
        failures = sorted(order_failures(tuple(self._failures)), key=lambda f: f.code not in _CAUSES)
        failures = [replace(f, last_lines=self._tail(f.node_rank)) for f in failures]
        outcome, code = "ok", ExitCode.OK
        if self._signum:
            outcome, code = "interrupted", ExitCode.SIGTERM if self._signum == signal.SIGTERM else ExitCode.SIGINT
        elif failures and failures[0].code == "BENCH-TIMEOUT":
            outcome, code = "not_ready", ExitCode.NOT_READY
        elif failures:
            outcome, code = "failed", ExitCode.RANK_FAILED
        return RunResult(
            outcome=outcome,
            exit_code=int(code),
            first_failure=failures[0] if failures else None,
            consequences=tuple(failures[1:]),
            answer=None,
            folder=self.options.folder,
            ready_seconds=None,
            leftovers=tuple(self._leftovers),
        )

    def _tail(self, rank: int | None) -> tuple[str, ...]:
        return () if rank is None else self._logs[rank].tail()


def _block(times: BenchTimes) -> str:
    return f"{times.op} {times.group} {'-'.join(map(str, times.ranks))}, {times.bytes} bytes"
