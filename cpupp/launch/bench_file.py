"""`cpupp bench serve FILE`: servers are launched, measured and taken down, cpupp's own and by hand in turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cpupp.errors import CpuppError
from cpupp.launch.bench_serve import Served, choose_client, measure, served
from cpupp.launch.bench_servers import GRACE_S, ByHand, Launched, Parts, Server
from cpupp.launch.probe import probe_hosts
from cpupp.launch.records import new_run_id
from cpupp.launch.run_hosts import RunHosts
from cpupp.launch.secret import Secrets
from cpupp.launch.session import open_sessions, run_all
from cpupp.plan.bench_serve import BY_HAND, CPUPP, ServeOrder, Start, Turn, sides
from cpupp.plan.by_hand import by_hand_commands
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.command import make_commands
from cpupp.plan.plan import Plan, make_plan
from cpupp.plan.roofline import RankReads
from cpupp.plan.runs import Run
from cpupp.plan.runstate import RunState
from cpupp.plan.status import RankPlace


@dataclass(slots=True, kw_only=True)
class Found:
    """What has been measured so far: by side."""

    starts: list[Start] = field(default_factory=list)
    turns: dict[str, list[Turn]] = field(default_factory=lambda: {CPUPP: [], BY_HAND: []})
    places: tuple[RankPlace, ...] = ()
    reads: tuple[RankReads, ...] = ()


class FileBench:
    """Launches what a cluster file says, as often as it takes. `run` blocks; `stop` may be called meanwhile.

    root: the folder of all records; client: as the user wrote it, which the order has once the first server is up;
    timeout: seconds until a server must serve.
    """

    def __init__(
        self,
        *,
        spec: ClusterSpec,
        raw: bytes,
        file: str,
        secrets: Secrets,
        root: Path,
        order: ServeOrder,
        client: str | None,
        timeout: float,
        accept_new: Callable[[str], None] | None,
        tell: Callable[[str], None],
    ) -> None:
        self.order = order
        self.found = Found()
        self._spec, self._raw, self._file, self._secrets, self._root = spec, raw, file, secrets, root
        self._client, self._timeout, self._accept_new, self._tell = client, timeout, accept_new, tell
        self._server: Server | None = None
        self._stopped = False
        self._turn = threading.Lock()

    def run(self, rounds: int | None) -> Found:
        """Measure. rounds: of both sides; None: cpupp alone, once. Raises CpuppError; all is down then, too."""
        for number, side in [(0, CPUPP)] if rounds is None else sides(rounds):
            if self._stopped:
                break
            self._side(number, side)
        return self.found

    def stop(self) -> None:
        """Take down what runs now; nothing is started any more."""
        with self._turn:
            self._stopped = True
            server = self._server
        if server is not None:
            server.stop()

    def _side(self, number: int, side: str) -> None:
        began = time.monotonic()
        sessions: dict[str, Any] = dict(open_sessions(self._spec, accept_new=self._accept_new, grace_s=GRACE_S))
        try:
            plan = make_plan(self._spec, probe_hosts(self._spec, sessions))
            run = new_run_id()
            server = self._make(side, plan, sessions, run, began)
            with self._turn:
                if self._stopped:
                    return
                self._server = server
            self._measure(number, side, plan, sessions, server, run)
        finally:
            run_all({name: session.close for name, session in sessions.items()})

    def _make(self, side: str, plan: Plan, sessions: dict[str, Any], run: str, began: float) -> Server:
        middle = "" if side == CPUPP else "by-hand-"
        parts = Parts(
            plan=plan,
            commands=make_commands(plan) if side == CPUPP else by_hand_commands(self._spec, plan),
            sessions=sessions,
            run=run,
            folder=self._root / f"{plan.name}-{middle}{run}",
            secrets=self._secrets,
            started=began,
            timeout=self._timeout,
            tell=self._tell,
        )
        return Launched(parts, file=self._file, spec=self._raw) if side == CPUPP else ByHand(parts)

    def _measure(self, number: int, side: str, plan: Plan, sessions: dict[str, Any], server: Server, run: str) -> None:
        name = side.replace("_", " ")
        try:
            try:
                ready = server.start()
            except CpuppError as error:
                self._note(Start(side=side, round=number, ready_s=None, healthy_s=server.healthy_s, error=str(error)))
                if side == CPUPP or server.healthy_s is None:
                    raise
                self._tell(f"round {number + 1}, {name}: ended at its first request")
                return
            self._note(Start(side=side, round=number, ready_s=ready, healthy_s=server.healthy_s))
            self._tell(f"round {number + 1}, {name}: ready after {ready:.1f} s")
            hosts = RunHosts(tuple(sessions), sessions.__getitem__)
            target = self._target(plan, hosts, run, side)
            for turn in measure(hosts, target, self.order, lambda text: self._tell(f"{name}, {text}")):
                self.found.turns[side].append(turn)
        except CpuppError:
            cause = server.error()
            if cause is not None and not self._stopped:
                raise cause from None  # why it ended tells more than that a request has failed
            raise
        finally:
            server.stop()

    def _target(self, plan: Plan, hosts: RunHosts, run: str, side: str) -> Served:
        known = Run(run=run, name=plan.name, state=RunState.READY)
        target = served(known, hosts, self._spec, self._secrets.api_key(plan.head))
        model = plan.model_facts
        place = next(host for host in plan.hosts if host.name == target.api.head)
        api = replace(target.api, python=place.python, model=place.model)
        if model is not None and model.vocab_size:
            api = replace(api, vocabulary=model.vocab_size)
        if self._client is not None:
            self.order = replace(self.order, client=choose_client(self._client, hosts, api))
            self._client = None
        if side == CPUPP:
            self.found.places = tuple(
                RankPlace(rank=r.rank, host=r.host, node_rank=r.node_rank, stage=r.stage, tp_index=r.tp_index)
                for r in plan.ranks
            )
            reads = tuple(r.reads for r in plan.ranks if r.reads is not None)
            self.found.reads = reads if len(reads) == len(plan.ranks) else ()
        return replace(target, api=api)

    def _note(self, start: Start) -> None:
        self.found.starts.append(start)
