"""The loop of one run: events in, `lifecycle.step`, actions out, until every host is down; then a RunResult."""

from __future__ import annotations

import queue
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from cpupp.errors import CpuppError
from cpupp.launch.actions import Actions
from cpupp.launch.agent_events import AgentEvents
from cpupp.launch.api import public_url
from cpupp.launch.contract import LaunchOptions, Ready, Session, View
from cpupp.launch.logs import NodeLog, attempt_folder, open_logs
from cpupp.launch.records import RunRecord
from cpupp.launch.result import RunResult, run_result
from cpupp.launch.run_file import RunFile
from cpupp.launch.runs import json_of
from cpupp.launch.start import Start
from cpupp.plan.command import RankCommand
from cpupp.plan.events import (
    Action,
    AnnounceReady,
    AnnounceRestart,
    Ask,
    Begin,
    CheckHealth,
    Complete,
    Detach,
    Detached,
    Event,
    Health,
    Interrupted,
    Logged,
    Reconnect,
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
from cpupp.plan.start_times import start_data, start_steps

TICK = 0.2
SUSPENDED_S = 10.0
"""Seconds between two turns of the loop from which on the launcher itself was stopped."""
FAILED_GRACE = 2.0
"""Seconds between TERM and KILL once a rank is lost: no request can end well, and those who wait want to know."""

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
        self.record = RunRecord(options.folder, options.secrets.mask, view.note)
        self.run_file = RunFile(self.record, plan, run=options.run, file=options.file)
        self.started = options.started if options.started is not None else time.monotonic()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._actions = Actions(
            Start(
                plan=plan,
                commands=commands,
                run=options.run,
                attempt=1,
                created=self.run_file.data["started"],
                secrets=options.secrets,
            ),
            sessions,
            options,
            put=self._queue.put,
            listen=self._listen,
        )
        self._logs: dict[int, NodeLog] = {}
        self._events = AgentEvents({}, view.note)
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
        self._open_attempt(self._actions.start)
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
                self._actions.stop_all(options.grace)
            self._close_attempt()
        result = run_result(
            state,
            run=options.run,
            answer=self._actions.answer,
            folder=options.folder,
            started=self.started,
            leftovers=tuple(dict.fromkeys(self._actions.leftovers)),
        )
        settled = json_of(options.folder / "result.json")
        if isinstance(settled, dict) and settled.get("leftovers") == []:
            # A `cpupp stop` has asked the hosts itself, while this process was suspended.
            result = replace(result, leftovers=())
        self._write_result(state, result)
        return result

    def _write_result(self, state: State, result: RunResult) -> None:
        self.record.event("result", outcome=result.outcome, exit_code=result.exit_code)
        if result.outcome == "detached":
            shifts = {str(node): log.shift for node, log in self._logs.items()}
            self.run_file.update(detached=True, status=status_of(state), log_shifts=shifts)
        else:
            self.record.write("result.json", result)
            self.run_file.update(status=status_of(state), detached=False)
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
            self._actions.lost.add(host)
        elif attempt != self._actions.start.attempt:
            return []
        if data.get("event") == "gone" and not data.get("left"):
            self._actions.gone.add(int(data["node"]))
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
        self._actions.begin(start)
        folder = attempt_folder(self.record.logs, start.attempt)
        self._logs = open_logs(folder, {n.node_rank: n.host for n in self.plan.nodes}, self.options.secrets.mask)
        self._events = AgentEvents(self._logs, self.view.note)
        self._stopping = 0
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

    # Actions ----------------------------------------------------------------------------------------------------------

    def _act(self, action: Action, state: State) -> None:
        do = self._actions
        match action:
            case StartNodes():
                if state.attempt > 1:
                    self._open_attempt(do.coming)
                for host in self.sessions:
                    do.run(do.start_host, host)
            case CheckHealth():
                do.run(do.check_health)
            case Complete():
                do.run(do.complete)
            case AnnounceReady():
                self._announce_ready(state)
            case Ask():
                do.run(do.ask)
            case Detach():
                self._detach()
            case StopAll(now=now, failed=failed):
                self._stopping += 1
                grace = 0.0 if now else min(self.options.grace, FAILED_GRACE) if failed else self.options.grace
                do.run(do.stop_all, grace)
            case AnnounceRestart(wait=wait):
                self._close_attempt()
                self._announce_restart(state, wait)
            case Reconnect():
                do.run(do.reconnect, state.attempt)

    def _detach(self) -> None:
        if self.plan.restart.policy != "never":
            self.view.note("nobody restarts a detached run: a failure ends it, whatever `restart` says")
        try:
            # Before any host hears of it: when this process is killed in between, the hosts decide what lives.
            self.run_file.update(detached=True, must=True)
        except CpuppError as error:
            self._queue.put(Detached(at=time.monotonic(), error=error.message))
            return
        self._actions.run(self._actions.detach)

    def _announce_ready(self, state: State) -> None:
        seconds = (state.ready_at or time.monotonic()) - self.started
        steps = start_steps(state, self.started if state.attempt == 1 else state.attempt_at)
        self.record.event("ready", seconds=round(seconds, 3), start=start_data(steps))
        self.run_file.update(start=start_data(steps))
        ready = Ready(
            url=public_url(self.plan),
            model=self.plan.served_name,
            seconds=seconds,
            key_source=self.plan.key_source,
            stays=self.options.detach,
            start=steps,
        )
        self.view.ready(ready)


def _awake() -> float:
    """Seconds of a clock that runs on while this process is stopped, and while its machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
