"""The milestones of a start, which the whole gang passes together, and the deadline of each."""

from __future__ import annotations

from dataclasses import replace

from cpupp.errors import ExitCode
from cpupp.plan.failures import Failure
from cpupp.plan.gang import NodeState, State
from cpupp.plan.joining import missing
from cpupp.plan.versions import PHASES

MILESTONES = ("connected", "spawned", "imported", "joined", "loaded", "warmed up", "ready")
DEADLINES = ("connect", "spawn", "import", "join", "load", "warm_up", "answer")
"""The key of the cluster file's `deadlines` that says how long the milestone of the same index may take."""

CONNECTED, SPAWNED, IMPORTED, JOINED, LOADED, WARMED_UP, READY = range(len(MILESTONES))
_ORDER = {name: index for index, (name, _) in enumerate(PHASES)}


def advance(state: State, now: float) -> State:
    """The state with the milestone that all vLLM nodes have reached by now; it never goes back."""
    nodes = tuple(_passing(node, _reached(state, node), now) for node in state.nodes)
    if any(new is not old for new, old in zip(nodes, state.nodes, strict=True)):
        state = replace(state, nodes=nodes)
    reached = min(_reached(state, node) for node in nodes)
    return replace(state, milestone=reached, milestone_at=now) if reached > state.milestone else state


def _passing(node: NodeState, reached: int, now: float) -> NodeState:
    num_new = reached - len(node.reached)
    return replace(node, reached=(*node.reached, *[now] * num_new)) if num_new > 0 else node


def _reached(state: State, node: NodeState) -> int:
    return READY if state.ready_at is not None else reached_by(state, node)


def reached_by(state: State, node: NodeState) -> int:
    """The milestone of one vLLM node: its own signs, and what the head could not have done without it."""
    head = state.nodes[0]
    if state.healthy_since is not None or _is_at(head, "starting the API"):
        return WARMED_UP
    if _is_at(node, "warmed up"):
        return WARMED_UP
    if _is_at(node, "weights loaded") or _is_at(head, "warmed up"):
        return LOADED
    if _has_joined(state, node):
        return JOINED
    if node.plugin or _is_at(node, "reading the model's configuration"):
        return IMPORTED
    return SPAWNED if node.pid is not None else CONNECTED


def _has_joined(state: State, node: NodeState) -> bool:
    own = [key for key in state.expected if key[0] in node.ranks]
    return state.announced.issuperset(own) if own else _is_at(node, "loading weights")


def _is_at(node: NodeState, phase: str) -> bool:
    return _ORDER.get(node.phase, -1) >= _ORDER[phase]


def overdue(state: State, now: float) -> State | None:
    """The state with the failures of those who are late, when a deadline has passed; None when none has."""
    if state.deadline is not None and now >= state.deadline:
        absent = {rank for rank, _, _ in missing(state)}
        late = [n for n in state.nodes if absent & set(n.ranks)] or list(state.nodes)
        return _late(state, late, "NOT-READY", "not ready in time", "raise --timeout if it was still making progress")
    coming = state.milestone + 1
    seconds = state.deadlines[DEADLINES[coming]]
    if now < state.milestone_at + seconds:
        return None
    late = [state.nodes[0]] if coming == READY else [n for n in state.nodes if reached_by(state, n) < coming]
    key = DEADLINES[coming]
    return _late(
        state,
        late,
        f"DEADLINE-{key.upper().replace('_', '-')}",
        f"not {MILESTONES[coming]} within {seconds:g} s",
        f"raise deadlines.{key} if it was still making progress",
    )


def _late(state: State, late: list[NodeState], code: str, what: str, hint: str) -> State:
    """The one that is furthest behind comes first: the others may merely wait for it."""
    late.sort(key=lambda n: (_ORDER.get(n.phase, 0), n.since, n.node_rank))
    absent = {rank for rank, _, _ in missing(state)}
    failures = tuple(
        Failure(
            host=n.host,
            node_rank=n.node_rank,
            ranks=tuple(rank for rank in n.ranks if rank in absent) or n.ranks,
            code=code,
            message=f"{what}; last seen: {n.phase}",
            hint=hint,
        )
        for n in late
    )
    return replace(state, failures=(*state.failures, *failures), outcome="not_ready", exit_code=int(ExitCode.NOT_READY))
