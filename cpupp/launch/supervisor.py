"""The loop of one run: events in, `lifecycle.step`, actions out, until every host is down; then a RunResult."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cpupp.errors import CpuppError
from cpupp.launch.api import Answer, HeadApi, local_url, public_url
from cpupp.launch.logs import NodeLog, open_logs
from cpupp.launch.records import RunRecord
from cpupp.launch.run_file import RunFile, site_record
from cpupp.launch.secret import Secrets
from cpupp.launch.site import site_files, start_request
from cpupp.plan.command import RankCommand
from cpupp.plan.events import (
    Action,
    AnnounceReady,
    Ask,
    Asked,
    Begin,
    CheckHealth,
    Complete,
    Completed,
    Down,
    Event,
    Exited,
    Health,
    HostLost,
    Interrupted,
    Logged,
    RankDied,
    Reported,
    Spawned,
    StartFailed,
    StartNodes,
    StopAll,
    Tick,
)
from cpupp.plan.failures import Failure
from cpupp.plan.handoff import HandoffError, decode_report
from cpupp.plan.lifecycle import State, initial_state, status_of, step
from cpupp.plan.plan import HostPlan, Plan
from cpupp.plan.shown import shown_command, shown_plan

TICK = 0.2
STOP_SLACK = 3.0
"""Seconds beyond the grace within which a host must have answered a stop order."""


class Session(Protocol):
    """What the supervisor needs of launch/session.py's AgentSession."""

    on_event: Callable[[str, dict[str, Any]], None]

    def request(self, op: str, *, timeout: float = ..., **params: Any) -> Any:
        """Ask the host's agent. Raises CpuppError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the user is told when the model serves: the API's base URL, the model's name, seconds since launch.

    needs_key: the API answers only to those who have its key.
    """

    url: str
    model: str
    seconds: float
    needs_key: bool = False


class View(Protocol):
    """Where progress is shown (render.py)."""

    def phase(self, node_rank: int, host: str, phase: str, seconds: float) -> None:
        """A vLLM node does something else now."""

    def log(self, node_rank: int, host: str, line: str) -> None:
        """A vLLM node wrote a line."""

    def ready(self, ready: Ready) -> None:
        """The model serves."""

    def note(self, text: str) -> None:
        """Anything else the user should know now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """timeout: seconds until ready; grace: seconds between TERM and KILL; started: monotonic start of the command.

    file: the cluster file's absolute path; spec: its bytes; secrets: values for the ranks, hidden in all records.
    """

    run: str
    folder: Path
    timeout: float = 600.0
    grace: float = 5.0
    ask: str | None = None
    max_tokens: int = 128
    attempt: int = 1
    started: float | None = None
    file: str = ""
    spec: bytes = b""
    secrets: Secrets = field(default_factory=Secrets)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How the run ended: outcome `ok`, `failed`, `not_ready` or `interrupted`; the first failure is the cause."""

    outcome: str
    exit_code: int
    first_failure: Failure | None
    consequences: tuple[Failure, ...]
    answer: Answer | None
    folder: Path
    ready_seconds: float | None
    leftovers: tuple[str, ...]


class Supervisor:
    """Runs one plan on open sessions. `run` blocks until everything is down; `interrupt` may be called from signals."""

    def __init__(
        self,
        plan: Plan,
        commands: Sequence[RankCommand],
        sessions: Mapping[str, Session],
        options: LaunchOptions,
        view: View,
    ) -> None:
        self.plan = plan
        self.commands = commands
        self.sessions = sessions
        self.options = options
        self.view = view
        self.record = RunRecord(options.folder, options.secrets.mask)
        self.run_file = RunFile(self.record, plan, run=options.run, file=options.file)
        self.started = options.started if options.started is not None else time.monotonic()
        self.answer: Answer | None = None
        self._api = HeadApi(plan, sessions[plan.head], options.secrets.api_key(plan.head))
        self._hosts: dict[str, HostPlan] = {host.name: host for host in plan.hosts}
        self._queue: queue.SimpleQueue[Event | tuple[str, dict[str, Any]] | Exception] = queue.SimpleQueue()
        self._logs: dict[int, NodeLog] = {}
        self._rank_pids: dict[tuple[int, int], int] = {}
        self._leftovers: list[str] = []
        self._lost: set[str] = set()
        self._stopping = 0

    def interrupt(self, signum: int) -> None:
        """Ask for an orderly end; a second call ends without grace. Only enqueues: safe in a signal handler."""
        self._queue.put(Interrupted(at=time.monotonic(), signum=signum))

    def run(self) -> RunResult:
        """Start, watch, and take down. Whatever happens inside, every host is ordered to stop before this returns."""
        now = time.monotonic()
        options = self.options
        self._logs = open_logs(self.record.logs, {n.node_rank: n.host for n in self.plan.nodes}, options.secrets.mask)
        self.record.write("spec.yaml", options.spec)
        self.record.write(
            "plan.json", {"plan": shown_plan(self.plan), "commands": [shown_command(c) for c in self.commands]}
        )
        for session in self.sessions.values():
            session.on_event = lambda host, data: self._queue.put((host, data))
        state = initial_state(self.plan, timeout=options.timeout, ask=options.ask is not None, now=now)
        try:
            state = self._advance(state, Begin(at=now))
            while state.stage != "down":
                state = self._turn(state)
        finally:
            if state.stage != "down":
                self._stop_everywhere(now=False)
            self._drain()
            for log in self._logs.values():
                log.close()
        result = self._result(state)
        self.record.event("result", outcome=result.outcome, exit_code=result.exit_code)
        self.record.write("result.json", result)
        self.run_file.update(status=status_of(state))
        self.record.close()
        return result

    def _turn(self, state: State) -> State:
        try:
            item = self._queue.get(timeout=TICK)
        except queue.Empty:
            return self._tick(state)
        if isinstance(item, Exception):
            raise item
        events = self._translate(*item) if isinstance(item, tuple) else [item]
        for event in events:
            state = self._advance(state, event)
        if state.stage in ("failing", "starting", "proving"):  # a talkative rank must not starve the clock
            state = self._tick(state)
        return state

    def _tick(self, state: State) -> State:
        tails = {n: log.tail() for n, log in self._logs.items()} if state.stage == "failing" else {}
        return self._advance(state, Tick(at=time.monotonic(), tails=tails))

    def _drain(self) -> None:
        """Write what ranks said last: their output may arrive behind the word that they are down."""
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, tuple) and item[1].get("event") == "output":
                self._translate(*item)

    def _advance(self, state: State, event: Event) -> State:
        if not isinstance(event, Tick | Logged | Health):
            self.record.event(type(event).__name__, data=event)
        new, actions = step(state, event)
        if new.stage not in (state.stage, "down"):  # the end is told when its result is written
            self.run_file.update(status=status_of(new))
        for before, after in zip(state.nodes, new.nodes, strict=True):
            if before.phase != after.phase:
                seconds = event.at - self.started
                self.view.phase(after.node_rank, after.host, after.phase, seconds)
                self.record.event("phase", node_rank=after.node_rank, phase=after.phase, seconds=round(seconds, 3))
        for action in actions:
            self._act(action, new)
        return new

    # Events from the agents -------------------------------------------------------------------------------------------

    def _translate(self, host: str, data: dict[str, Any]) -> list[Event]:
        at = time.monotonic()
        kind, node = data.get("event"), data.get("node")
        if kind == "lost":
            self._lost.add(host)
            return [HostLost(at=at, host=host, reason=str(data.get("reason", "connection lost")))]
        if not isinstance(node, int) or node not in self._logs:
            return []
        match kind:
            case "output":
                return self._output(node, host, data["data"], at)
            case "report":
                return self._reported(node, data["line"], at)
            case "spawned":
                return [Spawned(at=at, node_rank=node, pid=data["pid"])]
            case "exited":
                return [Exited(at=at, node_rank=node, code=data["code"])]
            case "process_exited":
                rank = self._rank_pids.get((node, data["pid"]))
                if rank is None:
                    return []
                return [RankDied(at=at, node_rank=node, rank=rank, pid=data["pid"], code=data.get("code"))]
            case _:
                return []

    def _output(self, node: int, host: str, data: str, at: float) -> list[Event]:
        lines = self._logs[node].feed(data)
        if not self._stopping:  # what ranks say while they are stopped is in the log, and no news
            for line in lines:
                self.view.log(node, host, line)
        return [Logged(at=at, node_rank=node, line=line) for line in lines]

    def _reported(self, node: int, line: str, at: float) -> list[Event]:
        try:
            report = decode_report(line)
        except HandoffError as error:
            self.view.note(f"vLLM node {node} sent a report that cannot be read: {error}")
            return []
        rank, pid = getattr(report, "rank", None), getattr(report, "pid", None)
        if rank is not None and pid is not None:
            self._rank_pids[(node, pid)] = rank
        return [Reported(at=at, node_rank=node, report=report)]

    # Actions ----------------------------------------------------------------------------------------------------------

    def _act(self, action: Action, state: State) -> None:
        match action:
            case StartNodes():
                for host in self.sessions:
                    self._thread(self._start_host, host)
            case CheckHealth():
                self._thread(self._check_health)
            case Complete():
                self._thread(self._complete)
            case AnnounceReady():
                seconds = (state.ready_at or time.monotonic()) - self.started
                self.record.event("ready", seconds=round(seconds, 3))
                url, key = public_url(self.plan), self.plan.needs_key
                self.view.ready(Ready(url=url, model=self.plan.served_name, seconds=seconds, needs_key=key))
            case Ask():
                self._thread(self._ask)
            case StopAll(now=now):
                self._stopping += 1
                if now or self._stopping == 1:
                    self._thread(self._stop_everywhere, now)

    def _thread(self, target: Callable[..., None], *args: Any) -> None:
        def work() -> None:
            try:
                target(*args)
            except Exception as error:  # a fault of ours: without this, `run` would wait for ever for what it asked for
                self._queue.put(error)

        threading.Thread(target=work, daemon=True, name=f"cpupp-{target.__name__}").start()

    def _start_host(self, host: str) -> None:
        session, options = self.sessions[host], self.options
        nodes = [command for command in self.commands if command.host == host]
        try:
            session.request(
                "prepare",
                timeout=60,
                run=options.run,
                attempt=options.attempt,
                host=host,
                files=site_files(self._hosts[host]),
                record=site_record(
                    self.plan,
                    host,
                    created=self.run_file.data["started"],
                    api=local_url(self.plan),
                    names=list(self._hosts),
                ),
            )
            for command in nodes:
                session.request("start", timeout=60, **self._start_params(command))
        except CpuppError as error:
            if error.code == "HOST-LOST":  # the session says so itself, once
                return
            at = time.monotonic()
            self._queue.put(StartFailed(at=at, node_rank=nodes[0].node_rank, message=error.message))

    def _start_params(self, command: RankCommand) -> dict[str, Any]:
        return start_request(
            command,
            command.node_rank,
            self.options.secrets,
            run=self.options.run,
            attempt=self.options.attempt,
            node_rank=command.node_rank,
            mode=self.plan.communicator,
            backend=self.plan.backend,
            no_shm=bool(self._hosts[command.host].no_shm),
            num_nodes=len(self.plan.nodes),
        )

    def _check_health(self) -> None:
        self._queue.put(Health(at=time.monotonic(), healthy=self._api.healthy()))

    def _complete(self) -> None:
        error = ""
        try:
            self._api.complete(timeout=self.options.timeout)
        except CpuppError as failure:
            error = failure.message
        self._queue.put(Completed(at=time.monotonic(), error=error))

    def _ask(self) -> None:
        error = ""
        try:
            question = self.options.ask or ""
            self.answer = self._api.ask(question, max_tokens=self.options.max_tokens, timeout=self.options.timeout)
        except CpuppError as failure:
            error = failure.message
        self._queue.put(Asked(at=time.monotonic(), error=error))

    def _stop_everywhere(self, now: bool) -> None:
        grace = 0.0 if now else self.options.grace
        threads = [
            threading.Thread(target=self._stop_host, args=(host, grace), daemon=True)
            for host in self.sessions
            if host not in self._lost
        ]
        for thread in threads:
            thread.start()
        limit = time.monotonic() + grace + STOP_SLACK
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))
        for host in sorted(self._lost):
            self._leftovers.append(f"host {host} cannot be reached: its agent takes its ranks down by itself")
        self._queue.put(Down(at=time.monotonic()))

    def _stop_host(self, host: str, grace: float) -> None:
        try:
            self.sessions[host].request("stop", timeout=grace + STOP_SLACK, grace=grace)
        except CpuppError as error:
            if host not in self._lost:
                self._leftovers.append(f"perhaps, host {host}: {error.message}: its agent goes on by itself")

    # The end ----------------------------------------------------------------------------------------------------------

    def _result(self, state: State) -> RunResult:
        failures = tuple(self._with_lines(failure) for failure in state.failures)
        if state.outcome in ("ok", "interrupted") and failures:
            self._leftovers += [f"{f.host}: {f.message}" for f in failures]
            failures = ()
        return RunResult(
            outcome=state.outcome,
            exit_code=state.exit_code,
            first_failure=failures[0] if failures else None,
            consequences=failures[1:],
            answer=self.answer,
            folder=self.options.folder,
            ready_seconds=None if state.ready_at is None else state.ready_at - self.started,
            leftovers=tuple(self._leftovers),
        )

    def _with_lines(self, failure: Failure) -> Failure:
        if failure.last_lines or failure.node_rank is None:
            return failure
        return replace(failure, last_lines=self._logs[failure.node_rank].tail())
