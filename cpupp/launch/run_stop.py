"""Ending a run, whoever started it: its launcher is asked where it lives on this machine, the hosts otherwise.

Idempotent: what a call cannot finish, because a host is down, the next one does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.run_collect import collect_logs, folder_of, one_at_a_time, settle
from cpupp.launch.run_hosts import RunHosts
from cpupp.launch.runs import first_failure, result_of, run_in, start_ticks
from cpupp.launch.session import run_all
from cpupp.plan.failures import Failure
from cpupp.plan.hoststate import Site, read_sites
from cpupp.plan.runs import LauncherRef, Run
from cpupp.plan.runstate import RunState
from cpupp.plan.status import HostAnswer, host_failures, launcher_lost, newest_attempt, own_site

T = TypeVar("T")
SLACK_S = 10.0
"""Seconds beyond the grace in which a launcher, or a host, must have ended what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStop:
    """What came of it on one host. found: agents of the run that were there; left: what could not be ended there.

    logs: files of the record that got what the host had kept; error: what could not be done, empty when all was;
    reached: whether the host answered.
    """

    host: str
    found: int = 0
    left: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    error: str = ""
    hint: str = ""
    reached: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """How a run was stopped. by: `launcher`, `hosts`, or `nobody` where it had ended already.

    record_error: why the record lacks what the hosts kept; they keep it still.
    """

    run: Run
    by: str
    hosts: tuple[HostStop, ...] = ()
    record_error: CpuppError | None = None

    @property
    def missing(self) -> tuple[HostStop, ...]:
        """The hosts that could not be asked."""
        return tuple(host for host in self.hosts if not host.reached)

    @property
    def stuck(self) -> tuple[HostStop, ...]:
        """The hosts that answered and are not clean."""
        return tuple(host for host in self.hosts if host.reached and (host.left or host.error))


Tell = Callable[[str], None]


def stop_run(run: Run, open_hosts: Callable[[], RunHosts], root: Path, *, grace: float, tell: Tell) -> StopResult:
    """End the run and return when it is down.

    open_hosts: called when the hosts must be asked; root: the folder of all records; tell: shows progress.
    """
    by_launcher = False
    if run.launcher_alive and not run.detached and run.launcher is not None:
        tell(f"asking its launcher, process {run.launcher.pid}, to stop {run.name} {run.run}")
        by_launcher = end_launcher(run.launcher, grace)
        if not by_launcher:
            tell("the launcher does not end: asking the hosts")
        run = run_in(Path(run.folder)) or run
    if is_over(run):
        return StopResult(run=run, by="launcher" if by_launcher else "nobody")
    hosts = open_hosts()
    tell(f"asking {len(hosts.names)} {'host' if len(hosts.names) == 1 else 'hosts'} to end {run.name} {run.run}")
    return _HostsStop(run, hosts, folder_of(run, root), grace).go()


def is_over(run: Run) -> bool:
    """Whether the record says that nothing is left anywhere: then no host need be asked."""
    if not run.state.ended or run.state is RunState.CRASHED:
        return False
    result = result_of(run)
    return not result.get("leftovers") and (not run.detached or bool(result.get("collected")))


def end_launcher(launcher: LauncherRef, grace: float) -> bool:
    """SIGTERM to a launcher of this machine, a second one when the first takes too long; return whether it is gone.

    The first lets it stop its run with its own grace, the second without.
    """
    for _ in range(2):
        with suppress(ProcessLookupError):
            if start_ticks(launcher.pid) == launcher.start:
                os.kill(launcher.pid, signal.SIGTERM)
        end = time.monotonic() + grace + SLACK_S
        while time.monotonic() < end:
            if start_ticks(launcher.pid) != launcher.start:
                return True
            time.sleep(0.05)
    return False


class _HostsStop:
    """Ends one run on its hosts and brings its record to an end."""

    def __init__(self, run: Run, hosts: RunHosts, folder: Path, grace: float) -> None:
        self.run = run
        self.hosts = hosts
        self.folder = folder
        self.grace = grace
        self.stops: dict[str, HostStop] = {}

    def go(self) -> StopResult:
        """Look, end, collect, forget; at each step with the hosts that came so far."""
        before = self._each(self.hosts.names, self._sites)
        failures = self._failures(before)
        found = self._each(tuple(before), self._stop)
        self.stops.update({name: HostStop(host=name, found=count, left=left) for name, (count, left) in found.items()})
        after = self._own(self._each(tuple(found), self._sites))
        kept = {name: site for name, site in after.items() if site.ended}
        error = self._bring_to_end(kept, failures)
        # What could not be written is not what is: the record may say that the run serves.
        recorded = run_in(self.folder) if error is None else None
        run = recorded or replace(self.run, state=self._state(failures))
        hosts = tuple(self.stops[name] for name in self.hosts.names)
        return StopResult(run=run, by="hosts", hosts=hosts, record_error=error)

    def _bring_to_end(self, kept: Mapping[str, Site], failures: Sequence[Failure]) -> CpuppError | None:
        """Fetch what the hosts keep and write how the run ended; return why the record could not be written."""
        attached_elsewhere = self.run.launcher_alive is None and self.run.launcher is not None and not self.run.detached
        if attached_elsewhere or not (kept or self.run.folder):
            return None
        try:
            with one_at_a_time(self.folder):
                # Another `cpupp stop` may have fetched everything and made the hosts forget it in the meantime.
                latest = run_in(self.folder)
                if latest is None or not is_over(latest):
                    fetched = self._collect(kept)
                    state = self._state(failures)
                    settle(self.run, self.folder, state, failures, whole=state.ended)
                    # Last: what is not in a record that says so must still be somewhere.
                    if fetched:
                        self._each(tuple(kept), lambda name: self.hosts.ask(name, "run_forget", run=self.run.run))
                    if self._state(failures) is not state:
                        settle(self.run, self.folder, self._state(failures), failures, whole=False)
        except CpuppError as error:
            return error
        return None

    def _each(self, names: Sequence[str], work: Callable[[str], T]) -> dict[str, T]:
        """Do something for every host at once; those that fail are noted and left out."""
        done, errors = run_all({name: partial(work, name) for name in names})
        for error in errors:
            reached = error.exit_code != ExitCode.UNREACHABLE
            stop = self.stops.get(error.where, HostStop(host=error.where))
            self.stops[error.where] = replace(stop, error=error.message, hint=error.hint, reached=reached)
        return done

    def _sites(self, name: str) -> tuple[Site, ...]:
        return read_sites(self.hosts.ask(name, "runs"))

    def _own(self, sites: Mapping[str, tuple[Site, ...]]) -> dict[str, Site]:
        answers = {name: HostAnswer(host=name, at=0.0, sites=found) for name, found in sites.items()}
        attempt = newest_attempt(self.run, answers)
        return {name: site for name, a in answers.items() if (site := own_site(a, self.run.run, attempt)) is not None}

    def _stop(self, name: str) -> tuple[int, tuple[str, ...]]:
        limit = self.grace + 2 * SLACK_S
        reply = self.hosts.ask(name, "run_stop", timeout=limit, run=self.run.run, grace=self.grace)
        left = tuple(str(item) for key in ("stuck", "remaining") for item in reply.get(key) or ())
        return int(reply.get("found") or 0), left

    def _failures(self, before: Mapping[str, tuple[Site, ...]]) -> list[Failure]:
        """What had failed before anybody stopped the run: what hosts say later follows from that."""
        known = first_failure(self.folder)
        if known is not None or self.run.state is RunState.STOPPING:
            return [known] if known is not None else []
        found = host_failures(self._own(before))
        lost = launcher_lost(self.run) if self.run.state is RunState.CRASHED and not found else None
        return [lost] if lost is not None else found

    def _collect(self, kept: Mapping[str, Site]) -> bool:
        """Fetch the logs that the hosts keep; return whether all came.

        One machine may be several hosts of the run, and it forgets them all at once.
        """

        def one(name: str) -> tuple[str, ...]:
            return tuple(collect_logs(self.run, self.folder, kept[name], self.hosts))

        logs = self._each(tuple(kept), one)
        for name, paths in logs.items():
            self.stops[name] = replace(self.stops[name], logs=paths)
        return len(logs) == len(kept)

    def _state(self, failures: Sequence[Failure]) -> RunState:
        if any(stop.error or stop.left for stop in self.stops.values()):
            return RunState.STOPPING
        return (
            RunState.FAILED if failures or self.run.state in (RunState.FAILED, RunState.CRASHED) else RunState.STOPPED
        )
