"""The supervision policy: `step(state, event) -> (state, actions)`, pure, and tested by scripted histories.

The gang lives and dies as one: no collective survives the loss of a rank. The first failure is named first, the others
are consequences. Ready means: every announcement matches the plan, the API is healthy, one real completion came back.
Times are seconds of one monotonic clock, passed in with every event.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cpupp.errors import ExitCode
from cpupp.plan.backend import GroupPlan
from cpupp.plan.handoff import ErrorReport, GroupReport, PluginReport, Report
from cpupp.plan.plan import Plan
from cpupp.plan.versions import AFTER_JOINING, JOINED, phase_of

SETTLE = 1.5
"""After the first sign of failure, how long the others may still speak before the first failure is named: the rank that
dies often says nothing, while its peers log `Connection reset by peer` at once."""
ANNOUNCE_GRACE = 10.0
"""How long after its vLLM node shows a healthy API or loaded weights a missing announcement is still awaited."""
HEALTH_EVERY = 0.5

_CONSEQUENCE = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|EngineDeadError|Engine core (proc|initialization)|"
    r"Socket closed|gloo|recvBytes|TCPStore|Worker proc .* died",
    re.IGNORECASE,
)
_SIGNAL_MEANING = {
    signal.SIGKILL: "probably out of memory (see `dmesg` on that host)",
    signal.SIGILL: "illegal instruction: this build of vLLM does not fit the CPU",
    signal.SIGBUS: "bus error: /dev/shm is probably full",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong on one vLLM node or host. last_lines are its own log's, oldest first."""

    host: str
    node_rank: int | None
    ranks: tuple[int, ...]
    code: str
    message: str
    hint: str = ""
    last_lines: tuple[str, ...] = ()


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at time `at`."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Event):
    """The supervisor runs: start the vLLM nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed. tails: the last lines of each vLLM node's log, needed when a failure is to be named."""

    tails: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned(Event):
    """A vLLM node's process was started."""

    node_rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed(Event):
    """A vLLM node could not be started at all: the host's own words."""

    node_rank: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(Event):
    """A vLLM node wrote a line."""

    node_rank: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Event):
    """A rank reported (rank/communicator.py, rank/vllm_plugin.py)."""

    node_rank: int
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Event):
    """A vLLM node's main process ended; a negative code is a signal."""

    node_rank: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDied(Event):
    """A worker process that had reported is gone while its vLLM node's main process still runs."""

    node_rank: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost(Event):
    """The agent of a host, or the way to it, is gone."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health(Event):
    """/health answered with 200 (healthy) or not at all."""

    healthy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed(Event):
    """The completion that proves readiness came back (error empty), or did not."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Event):
    """The question of --ask was answered (error empty), or was not."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted(Event):
    """A signal reached the launcher."""

    signum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Down(Event):
    """Every host has stopped, or could not be reached any more."""


# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNodes:
    """Prepare the site folders and start every vLLM node, all hosts at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHealth:
    """Ask the head's /health through its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Request one real completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceReady:
    """Tell the user the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask the user's question over the API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAll:
    """TERM, grace, KILL everywhere. now: the user insists, so no grace."""

    now: bool = False


Action = StartNodes | CheckHealth | Complete | AnnounceReady | Ask | StopAll


# State ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One vLLM node: phase is what it is doing now; trouble is its first line that looks like a failure's cause."""

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


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the next state and what to do. Never raises on an event that comes late or twice."""
    if state.stage in ("stopping", "down"):
        return _while_stopping(state, event)
    match event:
        case Begin():
            return replace(state, stage="starting"), (StartNodes(),)
        case Interrupted(signum=signum):
            code = ExitCode.SIGTERM if signum == signal.SIGTERM else ExitCode.SIGINT
            return _stop(replace(state, outcome="interrupted", exit_code=int(code)))
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
            return _with_node(state, node, exit_code=code, phase=f"exited {code}"), ()
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
        case RankDied(node_rank=node, rank=rank, pid=pid):
            text = f"worker process of rank {rank} (pid {pid}) is gone"
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
        failures = tuple(
            f if f.node_rank is None else replace(f, last_lines=tails.get(f.node_rank, ())) for f in state.failures
        )
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


def order_failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Put the cause first: a failure whose own last lines only tell of a lost peer comes after one that tells more."""

    def weight(failure: Failure) -> int:
        if failure.code in ("RANK-ERROR", "RANK-SIGNAL", "RANK-DIED", "RANK-START", "INJECTION-MISMATCH", "HOST-LOST"):
            return 0
        return 2 if any(_CONSEQUENCE.search(line) for line in failure.last_lines[-8:]) else 1

    return tuple(sorted(failures, key=weight))


def exit_text(code: int) -> str:
    """What an exit code of a vLLM node means, in words."""
    if code >= 0:
        return f"exited with code {code}" + (" although nobody stopped it" if code == 0 else "")
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"killed by signal {-code}"
    meaning = _SIGNAL_MEANING.get(name)
    return f"killed by {name.name}" + (f": {meaning}" if meaning else "")


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
