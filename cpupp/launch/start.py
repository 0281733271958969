"""Start one attempt on the hosts, and before a later one: sessions to the hosts that were lost, another port."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cpupp.errors import CpuppError
from cpupp.launch.api import local_url
from cpupp.launch.contract import Session
from cpupp.launch.run_file import site_record
from cpupp.launch.secret import Secrets
from cpupp.launch.session import run_all
from cpupp.launch.site import site_files, start_request
from cpupp.plan.command import RankCommand
from cpupp.plan.plan import Plan

PATIENCE = 60.0
"""Seconds for one request of a start, where no deadline says otherwise."""
CLEAR_GRACE = 2.0
"""Seconds between TERM and KILL for what a lost host may still run of a former attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One attempt of a run: its plan and commands. created: unix time of the run's launch."""

    plan: Plan
    commands: Sequence[RankCommand]
    run: str
    attempt: int
    created: float
    secrets: Secrets = field(default_factory=Secrets)

    def on_host(
        self,
        session: Session,
        host: str,
        timeout: float = PATIENCE,
        request: Callable[[RankCommand], dict[str, Any]] | None = None,
    ) -> None:
        """Prepare the host and start its vLLM nodes. Raises CpuppError.

        request: makes the `start` request of a command, where it is not that of a vLLM node.
        """
        session.request("prepare", timeout=timeout, **prepare_request(self, host))
        for command in self.commands:
            if command.host == host:
                session.request("start", timeout=timeout, **(request or self.request)(command))

    def request(self, command: RankCommand) -> dict[str, Any]:
        """The agent's `start` request of one vLLM node."""
        host = next(host for host in self.plan.hosts if host.name == command.host)
        return start_request(
            command,
            command.node_rank,
            self.secrets,
            run=self.run,
            attempt=self.attempt,
            node_rank=command.node_rank,
            num_nodes=len(self.plan.nodes),
            mode=self.plan.communicator,
            backend=self.plan.backend,
            no_shm=bool(host.no_shm),
            shares_cores=command.node_rank == 0 and self.plan.shares_cores,
            packed_weights=self.plan.packed_weights,
            tiled_weights=any(rank.tiles for rank in self.plan.ranks if rank.node_rank == command.node_rank),
        )


def prepare_request(start: Start, host: str) -> dict[str, Any]:
    """The agent's `prepare` request: the site folder's files, and what the host keeps of the run beside them."""
    plan = start.plan
    names = [each.name for each in plan.hosts]
    return {
        "run": start.run,
        "attempt": start.attempt,
        "host": host,
        "files": site_files(next(each for each in plan.hosts if each.name == host)),
        "record": site_record(plan, host, created=start.created, api=local_url(plan), names=names),
    }


def reconnect(
    sessions: MutableMapping[str, Session],
    lost: Sequence[str],
    run: str,
    reopen: Callable[[str], Session],
    listen: Callable[[Session], None],
) -> list[CpuppError]:
    """Replace the sessions of lost hosts, all at once, and end what their former agents may still run there.

    Returns one error for each host that cannot be reached; those sessions stay as they are.
    """

    def again(host: str) -> Session:
        _forget(sessions[host])
        session = reopen(host)
        listen(session)
        session.request("run_stop", timeout=CLEAR_GRACE + PATIENCE, run=run, grace=CLEAR_GRACE, host=host)
        return session

    found, errors = run_all({host: partial(again, host) for host in lost})
    sessions.update(found)
    return errors


def _forget(session: Session) -> None:
    session.on_event = lambda host, data: None
    if (close := getattr(session, "close", None)) is not None:
        close(1.0)


def free_port(session: Session, candidates: Sequence[int]) -> int | None:
    """The first of these ports that the host can listen on now; None when there is none, or it does not say."""
    with suppress(CpuppError):
        for port in session.request("bind_check", ports=list(candidates)) if candidates else ():
            if port["free"]:
                return int(port["port"])
    return None
