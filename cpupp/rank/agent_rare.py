"""The operations that no launch needs: those of `cpupp doctor`, `init` and `bench serve`. Standard library only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035  # Python 3.8 cannot subscript collections.abc.Callable

from . import agent_ask_vllm, agent_find, agent_firewall, agent_health, agent_leftovers, agent_pairs
from .agent_doors import Doors
from .agent_load import Load

if TYPE_CHECKING:
    from .agent_children import Children


class Rare:
    """operations: name -> what answers the request."""

    def __init__(self, children: Children, sources: dict[str, str]) -> None:
        doors = Doors()
        load = Load(children, sources)
        self.operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "find": agent_find.find_things,
            "clock": agent_health.clock,
            "health": lambda request: agent_health.health_facts(request, children),
            "ask_vllm": lambda request: agent_ask_vllm.ask_vllm(request, children),
            "clean": lambda request: agent_leftovers.clean(time.time()),
            "doors_open": lambda request: {**doors.open(request), "firewall": agent_firewall.firewall()},
            "doors_close": lambda request: doors.close(),
            "pairs_reach": agent_pairs.reach,
            "pairs_measure": agent_pairs.measure,
            "load_find": load.find,
            "load_run": load.run,
        }
