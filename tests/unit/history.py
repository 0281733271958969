"""Runs under test: feed events to the policy, keep every action."""

from __future__ import annotations

from collections.abc import Mapping

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.events import (
    Action,
    Begin,
    Completed,
    Down,
    Event,
    Exited,
    Health,
    Reconnect,
    Reconnected,
    Reported,
    Spawned,
    StartNodes,
    StopAll,
    Tick,
)
from cpupp.plan.gang import State, initial_state
from cpupp.plan.handoff import GroupReport, PluginReport
from cpupp.plan.lifecycle import SETTLE, step
from cpupp.plan.plan import Plan, make_plan


def pair(communicator: str = "links", **more: object) -> Plan:
    """A plan of two hosts, pipeline 2, made without facts."""
    return make_plan(
        ClusterSpec.model_validate(
            {
                "name": "pair",
                "model": {"path": "m", "num_layers": 4},
                "parallel": {"pipeline": 2},
                "engine": {"communicator": communicator},
                "hosts": [{"name": "a", "ssh": "a"}, {"name": "b", "ssh": "b"}],
                **more,
            }
        ),
        {},
    )


def announcement(rank: int, transport: str = "gloo") -> GroupReport:
    """What rank `rank` of the pair says of its pipeline group."""
    links = [[0, 1, transport], [1, 0, transport]]
    return GroupReport(rank=rank, pid=100 + rank, kind="pp", ranks=[0, 1], backend=transport, links=links, reason="r")


class History:
    """A run under test: feed events, keep every action."""

    def __init__(
        self,
        *,
        ask: bool = False,
        detach: bool = False,
        timeout: float | None = None,
        communicator: str = "links",
        deadlines: Mapping[str, float] | None = None,
        restart: Mapping[str, object] | None = None,
    ) -> None:
        plan = pair(communicator, deadlines=dict(deadlines or {}), restart=dict(restart or {}))
        self.state: State = initial_state(plan, timeout=timeout, ask=ask, detach=detach, now=0.0)
        self.actions: list[Action] = []

    def feed(self, *events: Event) -> tuple[Action, ...]:
        """Feed events, return the actions of these."""
        before = len(self.actions)
        for event in events:
            self.state, actions = step(self.state, event)
            self.actions.extend(actions)
        return tuple(self.actions[before:])

    def started(self) -> History:
        """Both vLLM nodes run."""
        if self.state.stage == "idle":
            self.feed(Begin(at=0))
        self.feed(Spawned(at=1, node_rank=0, pid=10), Spawned(at=1, node_rank=1, pid=11))
        return self

    def joined(self) -> History:
        """Both ranks announced what the plan says."""
        for node in (0, 1):
            self.feed(Reported(at=2, node_rank=node, report=PluginReport(pid=1, vllm="0.32.0", mode="links")))
            self.feed(Reported(at=3, node_rank=node, report=announcement(node)))
        return self

    def serving(self) -> History:
        """The model serves."""
        self.started().joined().feed(Health(at=4, healthy=True), Completed(at=5, error=""))
        assert self.state.stage == "ready"
        return self

    def failed(self, at: float, event: Event | None = None) -> tuple[Action, ...]:
        """Rank 1 fails and everything is taken down; the actions of the last step."""
        self.feed(event or Exited(at=at, node_rank=1, code=3))
        assert self.feed(Tick(at=at + SETTLE)) == (StopAll(failed=True),)
        return self.feed(Down(at=at + 5))

    def restarted(self, at: float) -> History:
        """The next attempt begins at `at`."""
        assert self.feed(Tick(at=at)) == (Reconnect(),)
        assert self.feed(Reconnected(at=at)) == (StartNodes(),)
        return self

    def codes(self) -> list[str]:
        """Codes of the failures, first the one that is named first."""
        return [failure.code for failure in self.state.failures]
