"""The gang under supervision: the state of every vLLM node and of the run, as `lifecycle.step` passes it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cpupp.errors import ExitCode
from cpupp.plan.backend import GroupPlan
from cpupp.plan.failures import Failure
from cpupp.plan.plan import Plan
from cpupp.plan.restart import Attempt, Restart
from cpupp.plan.runstate import RunState

GroupKey = tuple[int, str, tuple[int, ...]]
"""One announcement that is expected: rank, kind of the group, ranks of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One vLLM node: phase is what it is doing now, since when; exit_code is set once its main process ended.

    reached: when it passed each milestone after the first.
    """

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    phase: str = "waiting"
    since: float = 0.0
    plugin: bool = False
    pid: int | None = None
    exit_code: int | None = None
    reached: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The whole run.

    stage: idle, starting, proving, ready, failing, stopping, restarting (waiting for the next attempt), reconnecting
    (to the hosts that it needs), down. milestone: index in milestones.MILESTONES of what all vLLM nodes have reached,
    at milestone_at. timeout: seconds until ready in all, None without a bound; deadline: when they are over.
    suspended: when the launcher came back from being stopped, and for how many seconds it was.
    """

    nodes: tuple[NodeState, ...]
    head: str
    expected: Mapping[GroupKey, GroupPlan]
    deadlines: Mapping[str, float]
    restart: Restart
    timeout: float | None
    deadline: float | None
    ask: bool
    detach: bool = False
    stage: str = "idle"
    attempt: int = 1
    attempts: tuple[Attempt, ...] = ()
    attempt_at: float = 0.0
    restart_at: float = 0.0
    not_restarted: str = ""
    announced: frozenset[GroupKey] = frozenset()
    milestone: int = 0
    milestone_at: float = 0.0
    health_pending: bool = False
    health_at: float = 0.0
    healthy_since: float | None = None
    loaded_since: float | None = None
    suspended: tuple[float, float] | None = None
    decide_at: float = 0.0
    failures: tuple[Failure, ...] = ()
    exit_code: int = int(ExitCode.OK)
    outcome: str = "ok"
    ready_at: float | None = None


def initial_state(plan: Plan, *, timeout: float | None, ask: bool, now: float, detach: bool = False) -> State:
    """The state before anything was started. timeout: seconds from `now` until the run must be ready."""
    expected = {
        (rank, group.kind, group.ranks): group
        for group in plan.groups
        for rank in group.ranks
        if plan.communicator != "stock"
    }
    nodes = tuple(NodeState(node_rank=n.node_rank, host=n.host, ranks=n.ranks, since=now) for n in plan.nodes)
    return State(
        nodes=nodes,
        head=plan.head,
        expected=expected,
        deadlines=plan.deadlines,
        restart=plan.restart,
        timeout=timeout,
        deadline=None if timeout is None else now + timeout,
        ask=ask,
        detach=detach,
        attempt_at=now,
        milestone_at=now,
    )


def next_attempt(state: State, now: float) -> State:
    """The state before the next attempt: nothing started, everything that the run has seen so far kept."""
    nodes = tuple(NodeState(node_rank=n.node_rank, host=n.host, ranks=n.ranks, since=now) for n in state.nodes)
    return State(
        nodes=nodes,
        head=state.head,
        expected=state.expected,
        deadlines=state.deadlines,
        restart=state.restart,
        timeout=state.timeout,
        deadline=None if state.timeout is None else now + state.timeout,
        ask=state.ask,
        detach=state.detach,
        stage="reconnecting",
        attempt=state.attempt + 1,
        attempts=state.attempts,
        attempt_at=now,
        milestone_at=now,
    )


def with_node(state: State, node_rank: int, **changes: object) -> State:
    """The state with fields of one vLLM node changed."""
    nodes = list(state.nodes)
    nodes[node_rank] = replace(nodes[node_rank], **changes)  # type: ignore[arg-type]  # field names are checked by replace
    return replace(state, nodes=tuple(nodes))


def node_failure(state: State, node_rank: int, code: str, message: str, ranks: tuple[int, ...] = ()) -> Failure:
    """A failure of one vLLM node, of all its ranks unless they are named."""
    node = state.nodes[node_rank]
    return Failure(host=node.host, node_rank=node_rank, ranks=ranks or node.ranks, code=code, message=message)


def status_of(state: State) -> RunState:
    """The run's state in one word."""
    match state.stage:
        case "ready":
            return RunState.READY
        case "failing":
            return RunState.DEGRADED
        case "stopping":
            return RunState.STOPPING
        case "restarting" | "reconnecting":
            return RunState.RESTARTING
        case "down" if state.outcome == "detached":
            return RunState.READY
        case "down":
            return RunState.STOPPED if state.outcome in ("ok", "interrupted") else RunState.FAILED
        case _:
            return RunState.STARTING
