"""The supervision policy: `step(state, event) -> (state, actions)`, pure, and tested by scripted histories.

The gang lives and dies as one: no collective survives the loss of a rank. The first failure is named first, the others
are consequences. Ready means: every announcement matches the plan, the API is healthy, one real completion came back.
Times are seconds of one monotonic clock, passed in with every event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cpupp.errors import ExitCode
from cpupp.plan.backend import GroupPlan
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
from cpupp.plan.failures import Failure, exit_text, order_failures, with_words
from cpupp.plan.handoff import ErrorReport, GroupReport, PeerReport, PluginReport, Report
from cpupp.plan.plan import Plan
from cpupp.plan.runstate import RunState
from cpupp.plan.versions import AFTER_JOINING, JOINED, WORKER_EXCEPTION, phase_of

SETTLE = 1.5
"""After the first sign of failure, how long the others may still speak before the first failure is named: the rank that
dies often says nothing, while its peers log `Connection reset by peer` at once."""
ANNOUNCE_GRACE = 10.0
"""How long after its vLLM node shows a healthy API or loaded weights a missing announcement is still awaited."""
HEALTH_EVERY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One vLLM node: phase is what it is doing now, since when; exit_code is set once its main process ended."""

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    phase: str = "waiting"
    since: float = 0.0
    plugin: bool = False
    pid: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The whole run. stage: idle, starting, proving, ready, failing, stopping, down."""

    nodes: tuple[NodeState, ...]
    head: str
    expected: Mapping[tuple[int, str, tuple[int, ...]], GroupPlan]
    deadline: float
    ask: bool
    stage: str = "idle"
    announced: frozenset[tuple[int, str, tuple[int, ...]]] = frozenset()
    health_pending: bool = False
    health_at: float = 0.0
    healthy_since: float | None = None
    loaded_since: float | None = None
    decide_at: float = 0.0
    failures: tuple[Failure, ...] = ()
    exit_code: int = int(ExitCode.OK)
    outcome: str = "ok"
    ready_at: float | None = None


def initial_state(plan: Plan, *, timeout: float, ask: bool, now: float) -> State:
    """The state before anything was started. timeout: seconds from `now` until the run must be ready."""
    expected = {
        (rank, group.kind, group.ranks): group
        for group in plan.groups
        for rank in group.ranks
        if plan.communicator != "stock"
    }
    nodes = tuple(NodeState(node_rank=n.node_rank, host=n.host, ranks=n.ranks, since=now) for n in plan.nodes)
    return State(nodes=nodes, head=plan.head, expected=expected, deadline=now + timeout, ask=ask)


def status_of(state: State) -> RunState:
    """The run's state in one word."""
    match state.stage:
        case "ready":
            return RunState.READY
        case "failing":
            return RunState.DEGRADED
        case "stopping":
            return RunState.STOPPING
        case "down":
            return RunState.STOPPED if state.outcome in ("ok", "interrupted") else RunState.FAILED
        case _:
            return RunState.STARTING


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the next state and what to do. Never raises on an event that comes late or twice."""
    if state.stage in ("stopping", "down"):
        return _while_stopping(state, event)
    match event:
        case Begin():
            return replace(state, stage="starting"), (StartNodes(),)
        case Interrupted(signum=signum):
            return _stop(replace(state, outcome="interrupted", exit_code=128 + signum))  # as shells count
        case Spawned(node_rank=node, pid=pid):
            return _with_node(state, node, phase="started, importing", since=event.at, pid=pid), ()
        case Logged(node_rank=node, line=line):
            return _logged(state, node, line, event.at), ()
        case Reported(node_rank=node, report=report):
            return _reported(state, node, report, event.at)
        case Health() | Completed() | Asked():
            return _answered(state, event)
        case _:
            return _trouble_or_time(state, event)


def _while_stopping(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    match event:
        case Down():
            return replace(state, stage="down"), ()
        case Interrupted():
            return state, (StopAll(now=True),)
        case Exited(node_rank=node, code=code):
            return _with_node(state, node, exit_code=code, phase="stopped"), ()
        case HostLost(host=host, reason=reason):
            failure = Failure(host=host, node_rank=None, ranks=(), code="HOST-LOST", message=reason)
            return replace(state, failures=(*state.failures, failure)), ()
        case _:
            return state, ()


def _trouble_or_time(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    match event:
        case Exited(node_rank=node, code=code):
            state = _with_node(state, node, exit_code=code, phase=f"exited {code}", since=event.at)
            code_name = "RANK-SIGNAL" if code < 0 else "RANK-EXIT"
            return _fail(state, _node_failure(state, node, code_name, exit_text(code)), event.at), ()
        case RankDied(node_rank=node, rank=rank, pid=pid, code=code):
            text = f"worker process {pid} " + ("is gone" if code is None else exit_text(code))
            return _fail(state, _node_failure(state, node, "RANK-DIED", text, (rank,)), event.at), ()
        case StartFailed(node_rank=node, message=message):
            return _fail(state, _node_failure(state, node, "RANK-START", message), event.at), ()
        case HostLost(host=host, reason=reason):
            ranks = tuple(rank for node in state.nodes if node.host == host for rank in node.ranks)
            failure = Failure(host=host, node_rank=None, ranks=ranks, code="HOST-LOST", message=reason)
            return _fail(state, failure, event.at), ()
        case Tick(at=at, tails=tails):
            return _tick(state, at, tails)
        case _:
            return state, ()


def _tick(state: State, now: float, tails: Mapping[int, tuple[str, ...]]) -> tuple[State, tuple[Action, ...]]:
    if state.stage == "failing":
        if now < state.decide_at:
            return state, ()
        failures = tuple(with_words(failure, tails) for failure in state.failures)
        return _stop(replace(state, failures=order_failures(failures)))
    if state.stage in ("starting", "proving") and now >= state.deadline:
        return _stop(_not_ready(state))
    if state.stage == "starting":
        missing = _missing(state)
        shown = [t for t in (state.healthy_since, state.loaded_since) if t is not None]
        if missing and shown and now >= min(shown) + ANNOUNCE_GRACE:
            return _fail(state, _silent(state, missing), now), ()
        if not state.health_pending and now >= state.health_at:
            return replace(state, health_pending=True), (CheckHealth(),)
    return state, ()


def _answered(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    match event:
        case Health(healthy=healthy) if state.stage == "starting":
            state = replace(state, health_pending=False, health_at=event.at + HEALTH_EVERY)
            if not healthy:
                return replace(state, healthy_since=None), ()
            state = replace(state, healthy_since=state.healthy_since or event.at)
            if _missing(state):
                return state, ()
            return replace(state, stage="proving"), (Complete(),)
        case Completed(error="") if state.stage == "proving":
            actions: tuple[Action, ...] = (AnnounceReady(),)
            return replace(state, stage="ready", ready_at=event.at), (*actions, Ask()) if state.ask else actions
        case Completed(error=error) if state.stage == "proving":
            return _fail(
                state, _head_failure(state, "READY-COMPLETION", f"the first completion failed: {error}"), event.at
            ), ()
        case Asked(error="") if state.stage == "ready" and state.ask:
            return _stop(state)
        case Asked(error=error) if state.stage == "ready" and state.ask:
            return _fail(
                state, _head_failure(state, "ASK-FAILED", f"the question was not answered: {error}"), event.at
            ), ()
        case _:
            return state, ()


def _logged(state: State, node_rank: int, line: str, now: float) -> State:
    if WORKER_EXCEPTION.search(line):
        return _fail(state, _node_failure(state, node_rank, "RANK-EXCEPTION", "a worker raised an exception"), now)
    phase = phase_of(line, state.nodes[node_rank].phase)
    if phase is None:
        return state
    if phase in AFTER_JOINING and state.loaded_since is None:
        state = replace(state, loaded_since=now)
    return _with_node(state, node_rank, phase=phase, since=now)


def _reported(state: State, node_rank: int, report: Report, now: float) -> tuple[State, tuple[Action, ...]]:
    match report:
        case PluginReport():
            return _with_node(state, node_rank, plugin=True), ()
        case PeerReport():  # for agents without a launcher; here the loss itself is seen
            return state, ()
        case ErrorReport(where=where, message=message):
            failure = _node_failure(state, node_rank, "RANK-ERROR", f"{where}: {message}")
            return _fail(state, failure, now), ()
        case GroupReport():
            key = (report.rank, report.kind, tuple(report.ranks))
            wrong = mismatch(state.expected.get(key), report)
            if wrong is None:
                state = replace(state, announced=state.announced | {key})
                return _with_node(state, node_rank, phase=JOINED, since=now), ()
            failure = _node_failure(state, node_rank, "INJECTION-MISMATCH", wrong, (report.rank,))
            return _fail(state, failure, now), ()


def mismatch(group: GroupPlan | None, report: GroupReport) -> str | None:
    """Say how a rank's announcement differs from the plan; None when it matches."""
    name = f"{report.kind} group {report.ranks}"
    if group is None:
        return f"rank {report.rank} announced {name}, which the plan does not have"
    planned = {(link.src, link.dst): link.transport for link in group.links}
    for src, dst, transport in report.links:
        if planned.get((src, dst)) != transport:
            want = planned.get((src, dst), "no such link")
            return f"rank {report.rank}, {name}, link {src}->{dst}: plan {want}, rank {transport} ({report.reason})"
    if group.backend != report.backend:
        return f"rank {report.rank}, {name}: plan {group.backend}, rank {report.backend} ({report.reason})"
    return None


def _missing(state: State) -> list[tuple[int, str, tuple[int, ...]]]:
    return sorted(set(state.expected) - state.announced)


def _silent(state: State, missing: list[tuple[int, str, tuple[int, ...]]]) -> Failure:
    rank, kind, ranks = missing[0]
    node = next(n for n in state.nodes if rank in n.ranks)
    loaded = "the plugin was loaded" if node.plugin else "cpupp's plugin was never loaded (is VLLM_PLUGINS set?)"
    message = f"rank {rank} never announced its {kind} group {list(ranks)}: {loaded}"
    hint = "without it vLLM runs its stock communicator; see the log of that node"
    return Failure(
        host=node.host, node_rank=node.node_rank, ranks=(rank,), code="INJECTION-MISSING", message=message, hint=hint
    )


def _not_ready(state: State) -> State:
    missing = {rank for rank, _, _ in _missing(state)}
    late = [n for n in state.nodes if missing & set(n.ranks)] or list(state.nodes)
    late.sort(key=lambda n: (not n.phase.startswith(("waiting", "started")), n.node_rank))
    failures = [
        Failure(
            host=n.host,
            node_rank=n.node_rank,
            ranks=n.ranks,
            code="NOT-READY",
            message=f"not ready in time; last seen: {n.phase}",
            hint="raise --timeout if it was still making progress",
        )
        for n in late
    ]
    return replace(
        state,
        failures=(*state.failures, *failures),
        outcome="not_ready",
        exit_code=int(ExitCode.NOT_READY),
    )


def _node_failure(state: State, node_rank: int, code: str, message: str, ranks: tuple[int, ...] = ()) -> Failure:
    node = state.nodes[node_rank]
    return Failure(host=node.host, node_rank=node_rank, ranks=ranks or node.ranks, code=code, message=message)


def _head_failure(state: State, code: str, message: str) -> Failure:
    return _node_failure(state, 0, code, message)


def _fail(state: State, failure: Failure, now: float) -> State:
    if any((f.node_rank, f.host, f.code) == (failure.node_rank, failure.host, failure.code) for f in state.failures):
        return state
    state = replace(state, failures=(*state.failures, failure))
    if state.stage == "failing":
        return state
    return replace(
        state, stage="failing", decide_at=now + SETTLE, outcome="failed", exit_code=int(ExitCode.RANK_FAILED)
    )


def _stop(state: State) -> tuple[State, tuple[Action, ...]]:
    return replace(state, stage="stopping"), (StopAll(),)


def _with_node(state: State, node_rank: int, **changes: object) -> State:
    nodes = list(state.nodes)
    nodes[node_rank] = replace(nodes[node_rank], **changes)  # type: ignore[arg-type]  # field names are checked by replace
    return replace(state, nodes=tuple(nodes))
