"""The actions of a run that take time: each in a thread of its own, and what came of it goes back as an event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

from cpupp.errors import CpuppError
from cpupp.launch.api import Answer, HeadApi
from cpupp.launch.contract import LaunchOptions, Session
from cpupp.launch.detach import detach_hosts
from cpupp.launch.start import Start, free_port, reconnect
from cpupp.launch.stop import stop_hosts
from cpupp.plan.events import (
    Asked,
    Completed,
    Detached,
    Down,
    Event,
    Health,
    HostAway,
    Reconnected,
    StartFailed,
)

ASK_TIMEOUT = 600.0


class Actions:
    """Does on the hosts what the policy orders.

    start: the attempt that runs; coming: the one that `reconnect` has made ready. lost: hosts without a session that
    works; gone: vLLM nodes of which nothing is left, as their agents told; both are kept by those who hear the agents.
    leftovers: what the stops of this attempt may have left, in words; answer: that to --ask.
    put: takes every event, and any exception that is a fault of ours. listen: connects a new session to an attempt.
    """

    def __init__(
        self,
        start: Start,
        sessions: MutableMapping[str, Session],
        options: LaunchOptions,
        *,
        put: Callable[[Event | Exception], None],
        listen: Callable[[Session, int], None],
    ) -> None:
        self.start = self.coming = start
        self.lost: set[str] = set()
        self.gone: set[int] = set()
        self.leftovers: list[str] = []
        self.answer: Answer | None = None
        self._sessions = sessions
        self._options = options
        self._put = put
        self._listen = listen

    def begin(self, start: Start) -> None:
        """From now on this attempt is the one that runs; nothing of it is left behind yet."""
        self.start = start
        self.gone.clear()
        self.leftovers.clear()

    def run(self, target: Callable[..., None], *args: Any) -> None:
        """Run one of the methods below in a thread."""

        def work() -> None:
            try:
                target(*args)
            except Exception as error:  # a fault of ours: without this, the run would wait for ever for its event
                self._put(error)

        threading.Thread(target=work, daemon=True, name=f"cpupp-{target.__name__}").start()

    def start_host(self, host: str) -> None:
        """Prepare a host and start its vLLM nodes; their own events tell of success."""
        plan = self.start.plan
        try:
            self.start.on_host(self._sessions[host], host, timeout=plan.deadlines["spawn"])
        except CpuppError as error:
            if error.code == "HOST-LOST":  # the session says so itself, once
                return
            node = next(node.node_rank for node in plan.nodes if node.host == host)
            self._put(StartFailed(at=time.monotonic(), node_rank=node, message=error.message))

    def check_health(self) -> None:
        """Ask the head's /health. Another's API on the port is a failure: both would get a share of the requests."""
        try:
            healthy = self._api.healthy()
        except CpuppError as error:
            message = f"{error.message}: choose another serve.port, or end that process"
            self._put(StartFailed(at=time.monotonic(), node_rank=0, message=message))
            return
        self._put(Health(at=time.monotonic(), healthy=healthy))

    def complete(self) -> None:
        """Request one completion."""
        timeout = self._options.timeout or self.start.plan.deadlines["answer"]
        error = _error_of(lambda: self._api.complete(timeout=timeout))
        self._put(Completed(at=time.monotonic(), error=error))

    def ask(self) -> None:
        """Ask the user's question."""
        question, timeout = self._options.ask or "", self._options.timeout or ASK_TIMEOUT

        def work() -> None:
            self.answer = self._api.ask(question, max_tokens=self._options.max_tokens, timeout=timeout)

        error = _error_of(work)
        self._put(Asked(at=time.monotonic(), error=error))

    def detach(self) -> None:
        """Leave the run to the agents."""
        errors = detach_hosts(self._sessions)
        self._put(Detached(at=time.monotonic(), error="; ".join(errors)))

    def stop_all(self, grace: float) -> None:
        """Stop every host and wait for it, in bounded time."""
        busy = {node.host for node in self.start.plan.nodes if node.node_rank not in self.gone}
        lost = frozenset(self.lost)
        self.leftovers += stop_hosts(self._sessions, grace=grace, lost=lost, clean=lost - busy)
        self._put(Down(at=time.monotonic()))

    def reconnect(self, attempt: int) -> None:
        """Make ready for an attempt, while nothing runs on any host: sessions to lost hosts, another port."""
        options, lost = self._options, sorted(self.lost)
        errors: list[CpuppError] = []
        if lost:
            assert options.reopen is not None

            def listen(session: Session) -> None:
                self._listen(session, attempt)

            errors = reconnect(self._sessions, lost, options.run, options.reopen, listen)
        at = time.monotonic()
        self.lost &= {error.where for error in errors}
        for error in errors:
            self._put(HostAway(at=at, host=error.where, reason=error.message))
        if errors:
            return
        plan = self.start.plan
        port = free_port(self._sessions[plan.head], options.spare_ports)
        if port is None:
            self.coming = replace(self.start, attempt=attempt)
        else:
            plan = replace(plan, master_port=port)
            self.coming = replace(self.start, plan=plan, commands=options.commands(plan), attempt=attempt)
        self._put(Reconnected(at=time.monotonic()))

    @property
    def _api(self) -> HeadApi:
        plan = self.start.plan
        return HeadApi(plan, self._sessions[plan.head], self._options.secrets.api_key(plan.head))


def _error_of(work: Callable[[], None]) -> str:
    try:
        work()
    except CpuppError as error:
        return error.message
    return ""
