"""The hosts of a run, asked by those who look at it or end it: every host by itself, so that none holds up another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.config import load_cluster
from cpupp.launch.session import connect_all, run_all
from cpupp.plan.cluster import ClusterSpec, read_spec
from cpupp.plan.hoststate import Site, read_sites
from cpupp.plan.metrics import Load, read_load
from cpupp.plan.runs import Run
from cpupp.plan.status import HostAnswer

ASK_S = 15.0
"""Seconds for one answer: a host that takes longer counts as not reached."""
METRICS_S = 3.0
LOAD_EVERY_S = 5.0
"""Between two looks at /metrics once two are there: vLLM writes a line into its log for each."""
PATIENCE_S = 25.0
"""Seconds until a host that has not answered at all, connecting included, counts as not reached."""


class Session(Protocol):
    """What is needed of launch/session.py's AgentSession."""

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""

    def request(self, op: str, *, timeout: float = ..., **params: Any) -> Any:
        """Ask the host's agent. Raises CpuppError."""

    def close(self) -> None:
        """End the agent and the connection. Never raises."""


Open = Callable[[str], Session]


class RunHosts:
    """Sessions to the hosts, opened when they are first needed, and again after they were lost. Thread-safe."""

    def __init__(self, names: tuple[str, ...], open_session: Open) -> None:
        self.names = names
        self._open = open_session
        self._sessions: dict[str, Session] = {}
        self._locks = {name: threading.Lock() for name in names}
        self._closed = False

    def ask(self, host: str, op: str, /, *, timeout: float = ASK_S, **params: Any) -> Any:
        """Ask one host. Raises CpuppError naming it."""
        try:
            return self._session(host).request(op, timeout=timeout, **params)
        except CpuppError as error:
            error.where = error.where or host
            raise

    def ask_all(self, op: str, /, *, timeout: float = ASK_S, **params: Any) -> tuple[dict[str, Any], list[CpuppError]]:
        """Ask every host at once; return the answers, and the errors of those that gave none."""
        return run_all({name: partial(self.ask, name, op, timeout=timeout, **params) for name in self.names})

    def close(self) -> None:
        """Close all sessions at once."""
        self._closed = True
        sessions = list(self._sessions.values())
        run_all({str(number): session.close for number, session in enumerate(sessions)})

    def _session(self, host: str) -> Session:
        with self._locks[host]:
            session = self._sessions.get(host)
            if session is not None and session.alive:
                return session
            if self._closed:
                raise CpuppError("HOST-LOST", "the connection is closed", where=host, exit_code=ExitCode.UNREACHABLE)
            if session is not None:
                session.close()
            self._sessions[host] = session = self._open(host)
            return session

    def __enter__(self) -> RunHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hosts_of(spec: ClusterSpec) -> RunHosts:
    """The hosts of a cluster file."""
    hosts = {host.name: host for host in spec.hosts}

    def open_session(name: str) -> Session:
        sessions, errors = connect_all(spec.model_copy(update={"hosts": [hosts[name]]}))
        if errors:
            raise errors[0]
        return sessions[name]

    return RunHosts(tuple(hosts), open_session)


def spec_of(run: Run) -> ClusterSpec:
    """The cluster file as it was when the run was launched; of its hosts alone where that cannot be read any more.

    Raises CpuppError RUN-HOSTS when the record names no hosts, or what cannot be one.
    """
    if run.folder:
        with suppress(CpuppError):
            return load_cluster(Path(run.folder) / "spec.yaml")
    hosts = [{"name": host.name, "ssh": host.ssh, "local": host.local} for host in run.hosts]
    if not hosts:
        message = f"the record of run {run.run} names no hosts"
        raise CpuppError("RUN-HOSTS", message, hint="give the cluster file with --file", where=run.folder)
    spec, _ = read_spec({"name": run.name, "model": {"path": "."}, "hosts": hosts})
    if spec is None:
        message = f"the record of run {run.run} is damaged: its hosts cannot be read"
        raise CpuppError("RUN-HOSTS", message, hint="give the cluster file with --file", where=run.folder)
    return spec


def answer_of(hosts: RunHosts, host: str, run: str, *, with_load: bool = True) -> HostAnswer:
    """What a host says of all its runs, and of the load of `run` where it is its head. Never raises a CpuppError."""
    try:
        sites = read_sites(hosts.ask(host, "runs"))
        mine = [site for site in sites if site.run == run and site.host == host and site.held]
        load = _load(hosts, host, mine) if with_load else None
    except CpuppError as error:
        return HostAnswer(host=host, at=time.monotonic(), error=error.message, hint=error.hint)
    return HostAnswer(host=host, at=time.monotonic(), sites=sites, load=load)


def _load(hosts: RunHosts, host: str, sites: list[Site]) -> Load | None:
    url = next((str(site.record["api"]) for site in sites if site.record.get("api")), "")
    if not url:
        return None
    url = url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        reply = hosts.ask(host, "http", timeout=METRICS_S + 5, url=url, http_timeout=METRICS_S)
    except CpuppError:
        return None  # it does not serve yet, or not any more
    return read_load(str(reply["body"]), time.monotonic()) if reply["status"] == 200 else None


class HostPoll:
    """Asks every host again and again, each from a thread of its own. `close` ends the threads, not the sessions."""

    def __init__(self, hosts: RunHosts, run: str, *, every_s: float) -> None:
        self.hosts = hosts
        self._run = run
        self._every_s = every_s
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._last: dict[str, HostAnswer] = {}
        self._before: dict[str, HostAnswer] = {}
        self._rounds = dict.fromkeys(hosts.names, 0)
        self._loads: dict[str, list[Load | None]] = {name: [None, None] for name in hosts.names}
        for name in hosts.names:
            threading.Thread(target=self._follow, args=(name,), daemon=True, name=f"poll-{name}").start()

    def wait(self, rounds: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until every host has answered so often, or has failed to answer."""

        def settled() -> bool:
            return all(self._rounds[name] >= rounds or self._failed(name) for name in self.hosts.names)

        with self._changed:
            self._changed.wait_for(settled, timeout_s)

    def answers(self) -> tuple[Mapping[str, HostAnswer], Mapping[str, HostAnswer]]:
        """The answers before the last and the last ones; a host that never answered is there with an error."""
        with self._changed:
            now = time.monotonic()
            silent = {
                name: HostAnswer(host=name, at=now, error="no answer yet", hint="it may be slow, or gone")
                for name in self.hosts.names
                if name not in self._last
            }
            before = {name: replace(answer, load=self._loads[name][0]) for name, answer in self._before.items()}
            last = {name: replace(answer, load=self._loads[name][1]) for name, answer in self._last.items()}
            return before, {**silent, **last}

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _failed(self, name: str) -> bool:
        return name in self._last and bool(self._last[name].error)

    def _follow(self, name: str) -> None:
        asked = 0.0
        while not self._ended.is_set():
            with_load = self._rounds[name] < 2 or time.monotonic() - asked >= LOAD_EVERY_S
            answer = answer_of(self.hosts, name, self._run, with_load=with_load)
            with self._changed:
                if name in self._last:
                    self._before[name] = self._last[name]
                self._last[name] = answer
                if with_load or answer.error:
                    asked = time.monotonic()
                    self._loads[name] = [self._loads[name][1] if answer.load else None, answer.load]
                self._rounds[name] += 1
                self._changed.notify_all()
            self._ended.wait(self._every_s)
