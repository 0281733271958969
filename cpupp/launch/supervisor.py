"""The loop of one run: events in, `lifecycle.step`, actions out, until every host is down; then a RunResult."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cpupp.errors import CpuppError
from cpupp.launch.agent_events import AgentEvents
from cpupp.launch.api import Answer, HeadApi, public_url
from cpupp.launch.contract import LaunchOptions, Ready, Session, View
from cpupp.launch.detach import detach_hosts
from cpupp.launch.logs import NodeLog, attempt_folder, open_logs
from cpupp.launch.records import RunRecord
from cpupp.launch.result import RunResult, run_result
from cpupp.launch.run_file import RunFile
from cpupp.launch.start import Start, free_port, reconnect
from cpupp.launch.stop import stop_hosts
from cpupp.plan.command import RankCommand
from cpupp.plan.events import (
    Action,
    AnnounceReady,
    AnnounceRestart,
    Ask,
    Asked,
    Begin,
    CheckHealth,
    Complete,
    Completed,
    Detach,
    Detached,
    Down,
    Event,
    Health,
    HostAway,
    Interrupted,
    Logged,
    Reconnect,
    Reconnected,
    StartFailed,
    StartNodes,
    StopAll,
    Suspended,
    Tick,
)
from cpupp.plan.gang import State, initial_state, status_of
from cpupp.plan.lifecycle import step
from cpupp.plan.milestones import DEADLINES, MILESTONES
from cpupp.plan.plan import Plan
from cpupp.plan.shown import shown_command, shown_plan

TICK = 0.2
SUSPENDED_S = 10.0
"""Seconds between two turns of the loop from which on the launcher itself was stopped."""
FAILED_GRACE = 2.0
"""Seconds between TERM and KILL once a rank is lost: no request can end well, and those who wait want to know."""
ASK_TIMEOUT = 600.0

_Item = Event | tuple[int, str, dict[str, Any]] | Exception


class Supervisor:
    """Runs one plan on open sessions. `run` blocks until everything is down; `interrupt` may be called from signals.

    `sessions` is the caller's to close; those of hosts that were lost are replaced in it for another attempt.
    """

    def __init__(
        self,
        plan: Plan,
        commands: Sequence[RankCommand],
        sessions: MutableMapping[str, Session],
        options: LaunchOptions,
        view: View,
    ) -> None:
        self.plan = plan
        self.sessions = sessions
        self.options = options
        self.view = view
        self.record = RunRecord(options.folder, options.secrets.mask)
        self.run_file = RunFile(self.record, plan, run=options.run, file=options.file)
        self.started = options.started if options.started is not None else time.monotonic()
        self.answer: Answer | None = None
        self._start = Start(
            plan=plan,
            commands=commands,
            run=options.run,
            attempt=1,
            created=self.run_file.data["started"],
            secrets=options.secrets,
        )
        self._coming = self._start
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._logs: dict[int, NodeLog] = {}
        self._events = AgentEvents({}, view.note)
        self._leftovers: list[str] = []
        self._lost: set[str] = set()
        self._gone: set[int] = set()  # vLLM nodes of which nothing is left, as their agents told
        self._stopping = 0

    def interrupt(self, signum: int) -> None:
        """Ask for an orderly end; a second call ends without grace. Only enqueues: safe in a signal handler."""
        self._queue.put(Interrupted(at=time.monotonic(), signum=signum))

    def run(self) -> RunResult:
        """Start, watch, and take down. Whatever happens inside, every host is ordered to stop before this returns."""
        options, now = self.options, time.monotonic()
        self.record.write("spec.yaml", options.spec)
        state = initial_state(
            self.plan, timeout=options.timeout, ask=options.ask is not None, detach=options.detach, now=now
        )
        self._open_attempt(self._start)
        turned = _awake()
        try:
            state = self._advance(state, Begin(at=now))
            while state.stage != "down":
                item = self._next()
                before, turned = turned, _awake()
                if turned - before > SUSPENDED_S:
                    state = self._advance(state, Suspended(at=time.monotonic(), seconds=turned - before))
                state = self._turn(state, item)
        finally:
            if state.stage != "down":
                self._stop_all(grace=options.grace)
            self._close_attempt()
        result = run_result(
            state,
            run=options.run,
            answer=self.answer,
            folder=options.folder,
            started=self.started,
            leftovers=tuple(dict.fromkeys(self._leftovers)),
        )
        self._write_result(state, result)
        return result

    def _write_result(self, state: State, result: RunResult) -> None:
        self.record.event("result", outcome=result.outcome, exit_code=result.exit_code)
        if result.outcome == "detached":
            shifts = {str(node): log.shift for node, log in self._logs.items()}
            self.run_file.update(detached=True, status=status_of(state), log_shifts=shifts)
        else:
            self.record.write("result.json", result)
            self.run_file.update(status=status_of(state))
        self.record.close()

    def _next(self) -> _Item | None:
        try:
            return self._queue.get(timeout=TICK)
        except queue.Empty:
            return None

    def _turn(self, state: State, item: _Item | None) -> State:
        if item is None:
            return self._tick(state)
        if isinstance(item, Exception):
            raise item
        for event in self._translate(*item) if isinstance(item, tuple) else [item]:
            state = self._advance(state, event)
        if state.stage in ("failing", "starting", "proving"):  # a talkative rank must not starve the clock
            state = self._tick(state)
        return state

    def _tick(self, state: State) -> State:
        wanted = state.stage in ("failing", "starting", "proving")
        tails = {n: log.tail() for n, log in self._logs.items()} if wanted else {}
        return self._advance(state, Tick(at=time.monotonic(), tails=tails))

    def _translate(self, attempt: int, host: str, data: dict[str, Any]) -> list[Event]:
        if data.get("event") == "lost":
            self._lost.add(host)
        elif attempt != self._start.attempt:
            return []
        if data.get("event") == "gone" and not data.get("left"):
            self._gone.add(int(data["node"]))
        events = self._events.translate(host, data, time.monotonic())
        if not self._stopping:  # what ranks say while they are stopped is in the log, and no news
            for event in events:
                if isinstance(event, Logged):
                    self.view.log(event.node_rank, host, event.line)
        return events

    def _advance(self, state: State, event: Event) -> State:
        if not isinstance(event, Tick | Logged | Health):
            self.record.event(type(event).__name__, data=event)
        new, actions = step(state, event)
        self._tell(state, new, event.at)
        for action in actions:
            self._act(action, new)
        return new

    def _tell(self, old: State, new: State, at: float) -> None:
        """Show and record what this step has changed."""
        seconds = at - self.started
        if new.stage not in (old.stage, "down"):  # the end is told when its result is written
            failure = new.failures[0] if new.failures else None
            self.run_file.update(status=status_of(new), attempt=new.attempt, failure=failure)
        for before, after in zip(old.nodes, new.nodes, strict=True):
            if before.phase != after.phase:
                self.view.phase(after.node_rank, after.host, after.phase, seconds)
                self.record.event("phase", node_rank=after.node_rank, phase=after.phase, seconds=round(seconds, 3))
        if new.milestone > old.milestone:
            name = MILESTONES[new.milestone]
            self.record.event("milestone", milestone=name, attempt=new.attempt, seconds=round(seconds, 3))
            if (coming := new.milestone + 1) < len(MILESTONES):
                self.view.milestone(name, MILESTONES[coming], new.deadlines[DEADLINES[coming]], seconds)

    # Attempts ---------------------------------------------------------------------------------------------------------

    def _open_attempt(self, start: Start) -> None:
        """Everything that an attempt has of its own: logs, plan, translation of events; nothing is left behind yet."""
        self._start = start
        folder = attempt_folder(self.record.logs, start.attempt)
        self._logs = open_logs(folder, {n.node_rank: n.host for n in self.plan.nodes}, self.options.secrets.mask)
        self._events = AgentEvents(self._logs, self.view.note)
        self._stopping = 0
        self._leftovers.clear()
        self._gone.clear()
        commands = [shown_command(command) for command in start.commands]
        self.record.write("plan.json", {"plan": shown_plan(start.plan), "commands": commands})
        for session in self.sessions.values():
            self._listen(session, start.attempt)

    def _listen(self, session: Session, attempt: int) -> None:
        session.on_event = lambda host, data: self._queue.put((attempt, host, data))

    def _close_attempt(self) -> None:
        """Write what ranks said last: their output may arrive behind the word that they are down."""
        kept: list[_Item] = []
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, tuple) and item[2].get("event") == "output":
                self._translate(*item)
            else:
                kept.append(item)
        for item in kept:
            self._queue.put(item)
        for log in self._logs.values():
            log.close()

    def _announce_restart(self, state: State, wait: float) -> None:
        failure = state.attempts[-1].failures[0]
        self.view.note(f"{failure.host}: {failure.message}" if failure.host else failure.message)
        self.view.note(f"attempt {state.attempt} has failed: all start again in {wait:g} s")
        self.record.event("restart", attempt=state.attempt + 1, wait=wait, failure=failure)

    def _reconnect(self, attempt: int) -> None:
        """Make ready for an attempt; runs in a thread of its own, while nothing runs on any host."""
        lost = sorted(self._lost)
        assert self.options.reopen is not None or not lost
        errors: list[CpuppError] = []
        if self.options.reopen is not None:
            listen = partial(self._listen, attempt=attempt)
            errors = reconnect(self.sessions, lost, self.options.run, self.options.reopen, listen)
        at = time.monotonic()
        for error in errors:
            self._queue.put(HostAway(at=at, host=error.where, reason=error.message))
        if errors:
            self._lost &= {error.where for error in errors}
            return
        self._lost.clear()
        port = free_port(self.sessions[self.plan.head], self.options.spare_ports)
        plan = self._start.plan if port is None else replace(self._start.plan, master_port=port)
        commands = self._start.commands if port is None else self.options.commands(plan)
        self._coming = replace(self._start, plan=plan, commands=commands, attempt=attempt)
        self._queue.put(Reconnected(at=time.monotonic()))

    # Actions ----------------------------------------------------------------------------------------------------------

    def _act(self, action: Action, state: State) -> None:
        match action:
            case StartNodes():
                if state.attempt > 1:
                    self._open_attempt(self._coming)
                for host in self.sessions:
                    self._thread(self._start_host, host)
            case CheckHealth():
                self._thread(self._check_health)
            case Complete():
                self._thread(self._complete)
            case AnnounceReady():
                self._announce_ready(state)
            case Ask():
                self._thread(self._ask)
            case Detach():
                self._thread(self._detach)
            case StopAll(now=now, failed=failed):
                self._stopping += 1
                grace = 0.0 if now else min(self.options.grace, FAILED_GRACE) if failed else self.options.grace
                self._thread(self._stop_all, grace)
            case AnnounceRestart(wait=wait):
                self._close_attempt()
                self._announce_restart(state, wait)
            case Reconnect():
                self._thread(self._reconnect, state.attempt)

    def _thread(self, target: Callable[..., None], *args: Any) -> None:
        def work() -> None:
            try:
                target(*args)
            except Exception as error:  # a fault of ours: without this, `run` would wait for ever for what it asked for
                self._queue.put(error)

        threading.Thread(target=work, daemon=True, name=f"cpupp-{target.__name__}").start()

    def _start_host(self, host: str) -> None:
        try:
            self._start.on_host(self.sessions[host], host, timeout=self.plan.deadlines["spawn"])
        except CpuppError as error:
            if error.code == "HOST-LOST":  # the session says so itself, once
                return
            node = next(node.node_rank for node in self.plan.nodes if node.host == host)
            self._queue.put(StartFailed(at=time.monotonic(), node_rank=node, message=error.message))

    def _announce_ready(self, state: State) -> None:
        seconds = (state.ready_at or time.monotonic()) - self.started
        self.record.event("ready", seconds=round(seconds, 3))
        ready = Ready(
            url=public_url(self.plan),
            model=self.plan.served_name,
            seconds=seconds,
            needs_key=self.plan.needs_key,
            stays=self.options.detach,
        )
        self.view.ready(ready)

    @property
    def _api(self) -> HeadApi:
        head = self.plan.head
        return HeadApi(self.plan, self.sessions[head], self.options.secrets.api_key(head))

    def _check_health(self) -> None:
        self._queue.put(Health(at=time.monotonic(), healthy=self._api.healthy()))

    def _complete(self) -> None:
        timeout = self.options.timeout or self.plan.deadlines["answer"]
        error = _error_of(lambda: self._api.complete(timeout=timeout))
        self._queue.put(Completed(at=time.monotonic(), error=error))

    def _ask(self) -> None:
        question, timeout = self.options.ask or "", self.options.timeout or ASK_TIMEOUT

        def ask() -> None:
            self.answer = self._api.ask(question, max_tokens=self.options.max_tokens, timeout=timeout)

        error = _error_of(ask)
        self._queue.put(Asked(at=time.monotonic(), error=error))

    def _detach(self) -> None:
        errors = detach_hosts(self.sessions)
        self._queue.put(Detached(at=time.monotonic(), error="; ".join(errors)))

    def _stop_all(self, grace: float) -> None:
        busy = {node.host for node in self.plan.nodes if node.node_rank not in self._gone}
        lost = frozenset(self._lost)
        self._leftovers += stop_hosts(self.sessions, grace=grace, lost=lost, clean=lost - busy)
        self._queue.put(Down(at=time.monotonic()))


def _error_of(work: Callable[[], None]) -> str:
    try:
        work()
    except CpuppError as error:
        return error.message
    return ""


def _awake() -> float:
    """Seconds of a clock that runs on while this process is stopped, and while its machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
