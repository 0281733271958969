"""What doctor measures beyond the facts of a plan, as far as the chosen checks need it: fields of `findings.Case`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.pairs import measure_pairs
from cpupp.launch.session import AgentSession, run_all
from cpupp.plan.asking import architectures, asked_flags, one_of_each_build, preloads
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import FactsError, HostFacts, decode
from cpupp.plan.health import HealthFacts, TimingFacts, VllmFacts

NUM_PINGS = 5
HEALTH_S = 60.0
ASK_VLLM_S = 250.0

T = TypeVar("T")
Measured = dict[str, Any]


class Examination:
    """Measures on all hosts at once; `tell` gets a line for each step that takes seconds.

    failures grows by the hosts that failed meanwhile: host -> (what went wrong, hint).
    """

    def __init__(
        self,
        spec: ClusterSpec,
        sessions: Mapping[str, AgentSession],
        facts: Mapping[str, HostFacts],
        tell: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.sessions = {name: sessions[name] for name in facts}
        self.facts = facts
        self.tell = tell
        self.failures: dict[str, tuple[str, str]] = {}

    def measure(self, needs: Collection[str], *, with_file: bool) -> Measured:
        """Return what is needed. with_file: whether spec is a cluster file's, not the stand-in for this machine."""
        found: Measured = {}
        if "health" in needs:
            found["health"] = self._each(HealthFacts, "health", self._health_orders(with_file), HEALTH_S)
        if "pairs" in needs:  # alone: an import beside it would be measured too
            found["pairs"], lost = measure_pairs(self.spec, self.sessions, self.facts, self.tell)
            self._note(lost)
        asking = threading.Thread(target=self._ask_vllm, args=(found,), daemon=True)
        if "vllm" in needs and with_file:
            asking.start()  # seconds of imports, beside all else
        if "timing" in needs:
            found["timing"] = self._timing()
        if asking.ident is not None:
            asking.join()
        return found

    def clean(self) -> dict[str, list[dict[str, Any]]]:
        """Remove dead leftovers of this user from every /dev/shm; return name and size of each, by host."""
        return self._run({name: partial(session.request, "clean") for name, session in self.sessions.items()})

    def _health_orders(self, with_file: bool) -> dict[str, dict[str, Any]]:
        spec = self.spec if with_file else None
        return {
            name: {
                "model_path": self.spec.model.path,
                "preloads": preloads(spec, name, fact),
                "ask_hub": bool(fact.model.error) and with_file,
            }
            for name, fact in self.facts.items()
        }

    def _each(self, kind: type[T], op: str, orders: Mapping[str, dict[str, Any]], timeout_s: float) -> dict[str, T]:
        def ask(name: str) -> T:
            try:
                return decode(kind, self.sessions[name].request(op, timeout=timeout_s, **orders[name]))
            except FactsError as error:
                message = f"the agent sent facts that cannot be read: {error}"
                raise CpuppError("PROBE-FACTS", message, where=name, exit_code=ExitCode.UNREACHABLE) from None

        return self._run({name: partial(ask, name) for name in orders})

    def _ask_vllm(self, found: Measured) -> None:
        groups = one_of_each_build(self.facts)
        order = {"flags": asked_flags(self.spec, self.facts), "architectures": architectures(self.facts)}
        for name in groups:
            self.tell(f"asking vLLM {self.facts[name].engine.vllm} on {name}: it takes seconds to import")
        began = time.monotonic()
        orders = {name: {**order, "python": self.facts[name].engine.python} for name in groups}
        found["vllm"] = self._each(VllmFacts, "ask_vllm", orders, ASK_VLLM_S)
        if groups:
            self.tell(f"vLLM has answered after {time.monotonic() - began:.1f} s")

    def _timing(self) -> dict[str, TimingFacts]:
        return self._run({name: partial(_time, session) for name, session in self.sessions.items()})

    def _run(self, tasks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        results, errors = run_all(tasks)
        self._note(errors)
        return results

    def _note(self, errors: Iterable[CpuppError]) -> None:
        self.failures.update({error.where: (error.message, error.hint) for error in errors})


def _time(session: AgentSession) -> TimingFacts:
    """Ask for the host's clock a few times; the quickest answer tells best how far it is ahead."""
    samples = []
    for _ in range(NUM_PINGS):
        sent, wall = time.monotonic(), time.time()
        there = float(session.request("clock")["time"])
        took = time.monotonic() - sent
        samples.append((took, there - (wall + took / 2)))
    return TimingFacts(round_trips=tuple(took for took, _ in samples), ahead_s=min(samples)[1])
