"""The supervision policy: `step(state, event) -> (state, actions)`, pure, and tested by scripted histories.

The gang lives and dies as one: no collective survives the loss of a rank. The first failure is named first, the others
are consequences; where the cluster file says so, all come again. Ready means: every announcement matches the plan, the
API is healthy, one real completion came back. Times are seconds of one monotonic clock, passed in with every event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cpupp.errors import ExitCode
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
    Exited,
    Halted,
    Health,
    HostAway,
    HostLost,
    Interrupted,
    KeeperLost,
    Logged,
    RankDied,
    Reconnect,
    Reconnected,
    Reported,
    Spawned,
    StartFailed,
    StartNodes,
    StopAll,
    Suspended,
    Tick,
)
from cpupp.plan.failures import Failure, exit_text, order_failures, with_words
from cpupp.plan.gang import State, next_attempt, node_failure, with_node
from cpupp.plan.handoff import ErrorReport, GroupReport, PluginReport, Report
from cpupp.plan.joining import mismatch, missing, silent
from cpupp.plan.milestones import advance, overdue
from cpupp.plan.restart import Attempt, verdict
from cpupp.plan.versions import AFTER_JOINING, JOINED, SERVING, WORKER_EXCEPTION, phase_of

SETTLE = 1.5
"""After the first sign of failure, how long the others may still speak before the first failure is named: the rank that
dies often says nothing, while its peers log `Connection reset by peer` at once."""
ANNOUNCE_GRACE = 10.0
"""How long after its vLLM node shows a healthy API or loaded weights a missing announcement is still awaited."""
HEALTH_EVERY = 0.5
SUSPENDED_FOR = 10.0
"""Seconds after the launcher's return in which what the agents did meanwhile is still coming in."""

Next = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event) -> Next:
    """Return the next state and what to do. Never raises on an event that comes late or twice."""
    if state.stage in ("stopping", "down"):
        return _while_stopping(state, event)
    if state.stage in ("restarting", "reconnecting"):
        return _between_attempts(state, event)
    new, actions = _while_running(state, event)
    return (advance(new, event.at) if new.stage in ("starting", "proving", "ready") else new), actions


def _while_running(state: State, event: Event) -> Next:
    match event:
        case Begin():
            return replace(state, stage="starting"), (StartNodes(),)
        case Interrupted(signum=signum):
            return _interrupted(state, signum)
        case Spawned(node_rank=node, pid=pid):
            return with_node(state, node, phase="started, importing", since=event.at, pid=pid), ()
        case Logged(node_rank=node, line=line):
            return _logged(state, node, line, event.at), ()
        case Reported(node_rank=node, report=report):
            return _reported(state, node, report, event.at)
        case Health() | Completed() | Asked() | Detached():
            return _answered(state, event)
        case Tick(at=at, tails=tails):
            return _tick(state, at, tails)
        case Suspended(at=at, seconds=seconds):
            return replace(state, suspended=(at, seconds)), ()
        case _:
            return _trouble(state, event), ()


def _while_stopping(state: State, event: Event) -> Next:
    match event:
        case Down() if state.stage == "stopping":
            return _ended(state, event.at)
        case Interrupted() if state.stage == "stopping":
            # Whatever was the matter before, there is no next attempt now.
            if state.outcome in ("failed", "not_ready"):
                state = replace(state, restart=replace(state.restart, policy="never"))
            return state, (StopAll(now=True),)
        case Exited(node_rank=node, code=code):
            return with_node(state, node, exit_code=code, phase="stopped"), ()
        case HostLost(host=host, reason=reason) if state.stage == "stopping":
            failure = Failure(host=host, node_rank=None, ranks=(), code="HOST-LOST", message=reason)
            return replace(state, failures=(*state.failures, failure)), ()
        case _:
            return state, ()


def _ended(state: State, now: float) -> Next:
    """Everything is down: for good, or until the next attempt."""
    attempt = Attempt(
        number=state.attempt,
        outcome=state.outcome,
        failures=state.failures,
        ready_seconds=None if state.ready_at is None else state.ready_at - state.attempt_at,
        seconds=now - state.attempt_at,
    )
    if not any(earlier.number == attempt.number for earlier in state.attempts):  # else interrupted between two
        state = replace(state, attempts=(*state.attempts, attempt))
    if state.outcome not in ("failed", "not_ready"):
        return replace(state, stage="down"), ()
    found = verdict(state.restart, state.attempts)
    if found.wait is None:
        return replace(state, stage="down", not_restarted=found.reason), ()
    return replace(state, stage="restarting", restart_at=now + found.wait), (AnnounceRestart(wait=found.wait),)


def _between_attempts(state: State, event: Event) -> Next:
    match event:
        case Interrupted(signum=signum):
            return _interrupted(replace(state, failures=()), signum)  # they are the former attempt's
        case Tick(at=at) if state.stage == "restarting" and at >= state.restart_at:
            return next_attempt(state, at), (Reconnect(),)
        case Reconnected(at=at) if state.stage == "reconnecting":
            return replace(state, stage="starting", milestone_at=at), (StartNodes(),)
        case HostAway(host=host, reason=reason) | HostLost(host=host, reason=reason) if state.stage == "reconnecting":
            ranks = tuple(rank for node in state.nodes if node.host == host for rank in node.ranks)
            failure = Failure(host=host, node_rank=None, ranks=ranks, code="HOST-AWAY", message=reason)
            return _fail(state, failure, event.at), ()
        case _:
            return state, ()


def _trouble(state: State, event: Event) -> State:
    match event:
        case Exited(node_rank=node, code=code, stopped=stopped, why=why):
            state = with_node(state, node, exit_code=code, phase=f"exited {code}", since=event.at)
            if stopped:  # not by us, or the run would be stopping: the agent ends what it runs before it ends itself
                failure = node_failure(state, node, "RANK-STOPPED", "ended by its agent")
            else:
                failure = node_failure(state, node, "RANK-SIGNAL" if code < 0 else "RANK-EXIT", exit_text(code, why))
        case RankDied(node_rank=node, rank=rank, pid=pid, code=code, why=why):
            text = f"worker process {pid} " + ("is gone" if code is None else exit_text(code, why))
            failure = node_failure(state, node, "RANK-DIED", text, (rank,))
        case Halted(node_rank=node, rank=rank, pid=pid, name=name):
            text = f"process {pid} ({name}) is stopped (SIGSTOP), and does nothing"
            failure = node_failure(state, node, "RANK-HALTED", text, () if rank is None else (rank,))
        case KeeperLost(node_rank=node, message=message):
            failure = node_failure(state, node, "KEEPER-LOST", message)
        case StartFailed(node_rank=node, message=message):
            failure = node_failure(state, node, "RANK-START", message)
        case HostLost(host=host, reason=reason):
            ranks = tuple(rank for node in state.nodes if node.host == host for rank in node.ranks)
            failure = Failure(host=host, node_rank=None, ranks=ranks, code="HOST-LOST", message=reason)
        case _:
            return state
    return _fail(state, failure, event.at)


def _tick(state: State, now: float, tails: Mapping[int, tuple[str, ...]]) -> Next:
    if state.stage == "failing":
        return (state, ()) if now < state.decide_at else _give_up(state, tails)
    if state.stage in ("starting", "proving") and (late := overdue(state, now)) is not None:
        return _give_up(late, tails)
    if state.stage == "starting":
        absent = missing(state)
        shown = [t for t in (state.healthy_since, state.loaded_since) if t is not None]
        if absent and shown and now >= min(shown) + ANNOUNCE_GRACE:
            return _fail(state, silent(state, absent), now), ()
        if not state.health_pending and now >= state.health_at:
            return replace(state, health_pending=True), (CheckHealth(),)
    return state, ()


def _answered(state: State, event: Event) -> Next:
    match event:
        case Health(healthy=healthy) if state.stage == "starting":
            state = replace(state, health_pending=False, health_at=event.at + HEALTH_EVERY)
            if not healthy:
                return replace(state, healthy_since=None), ()
            state = replace(state, healthy_since=state.healthy_since or event.at)
            if missing(state):
                return state, ()
            return replace(state, stage="proving"), (Complete(),)
        case Completed(error="") if state.stage == "proving":
            then: tuple[Action, ...] = (Ask(),) if state.ask else (Detach(),) if state.detach else ()
            return replace(state, stage="ready", ready_at=event.at), (AnnounceReady(), *then)
        case Completed(error=error) if state.stage == "proving":
            failure = node_failure(state, 0, "READY-COMPLETION", f"the first completion failed: {error}")
            return _fail(state, failure, event.at), ()
        case Asked(error="") if state.stage == "ready" and state.ask:
            return replace(state, stage="stopping"), (StopAll(),)
        case Asked(error=error) if state.stage == "ready" and state.ask:
            failure = node_failure(state, 0, "ASK-FAILED", f"the question was not answered: {error}")
            return _fail(state, failure, event.at), ()
        case Detached(error="") if state.stage == "ready" and state.detach:
            return replace(state, stage="down", outcome="detached"), ()
        case Detached(error=error) if state.stage == "ready" and state.detach:
            failure = node_failure(state, 0, "DETACH-FAILED", f"the run cannot go on alone: {error}")
            return _fail(state, failure, event.at), ()
        case _:
            return state, ()


def _logged(state: State, node_rank: int, line: str, now: float) -> State:
    if WORKER_EXCEPTION.search(line):
        return _fail(state, node_failure(state, node_rank, "RANK-EXCEPTION", "a worker raised an exception"), now)
    phase = phase_of(line, state.nodes[node_rank].phase)
    if phase is None:
        return state
    if phase in AFTER_JOINING and state.loaded_since is None:
        state = replace(state, loaded_since=now)
    if phase == SERVING:
        state = replace(state, health_at=now)  # nobody needs to wait for the next turn
    return with_node(state, node_rank, phase=phase, since=now)


def _reported(state: State, node_rank: int, report: Report, now: float) -> Next:
    match report:
        case PluginReport():
            return with_node(state, node_rank, plugin=True), ()
        case ErrorReport(where=where, message=message):
            failure = node_failure(state, node_rank, "RANK-ERROR", f"{where}: {message}")
            return _fail(state, failure, now), ()
        case GroupReport():
            key = (report.rank, report.kind, tuple(report.ranks))
            wrong = mismatch(state.expected.get(key), report)
            if wrong is None:
                state = replace(state, announced=state.announced | {key})
                return with_node(state, node_rank, phase=JOINED, since=now), ()
            failure = node_failure(state, node_rank, "INJECTION-MISMATCH", wrong, (report.rank,))
            return _fail(state, failure, now), ()
        case _:
            return state, ()


def _fail(state: State, failure: Failure, now: float) -> State:
    if any((f.node_rank, f.host, f.code) == (failure.node_rank, failure.host, failure.code) for f in state.failures):
        return state
    if state.stage != "failing" and state.suspended is not None and now <= state.suspended[0] + SUSPENDED_FOR:
        state = replace(state, failures=(_stopped_launcher(state.suspended[1]), *state.failures))
    state = replace(state, failures=(*state.failures, failure))
    if state.stage == "failing":
        return state
    return replace(
        state, stage="failing", decide_at=now + SETTLE, outcome="failed", exit_code=int(ExitCode.RANK_FAILED)
    )


def _stopped_launcher(seconds: float) -> Failure:
    message = (
        f"the launcher was stopped for {seconds:.0f} s (Ctrl-Z, or its machine slept), and the agents ended the run"
    )
    hint = "agents end what they run when their launcher gives no sign of life; `launch --detach` runs without one"
    return Failure(host="", node_rank=None, ranks=(), code="LAUNCHER-STOPPED", message=message, hint=hint)


def _give_up(state: State, tails: Mapping[int, tuple[str, ...]]) -> Next:
    failures = order_failures(tuple(with_words(failure, tails) for failure in state.failures))
    first: dict[tuple[int | None, str, str], Failure] = {}
    for failure in failures:  # the words of two may show that they are one
        first.setdefault((failure.node_rank, failure.host, failure.code), failure)
    return replace(state, stage="stopping", failures=tuple(first.values())), (StopAll(failed=True),)


def _interrupted(state: State, signum: int) -> Next:
    # 128 and the signal, as shells count.
    return replace(state, stage="stopping", outcome="interrupted", exit_code=128 + signum), (StopAll(),)
