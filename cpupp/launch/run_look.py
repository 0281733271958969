"""A run as it is now: its record read anew and its hosts asked, once or again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cpupp.errors import CpuppError
from cpupp.launch.run_collect import settle
from cpupp.launch.run_hosts import HostPoll, hosts_of, spec_of
from cpupp.launch.run_stop import is_over
from cpupp.launch.runs import recorded, run_in
from cpupp.launch.session import run_all
from cpupp.plan.runs import Run
from cpupp.plan.status import Recorded, RunStatus, run_status

if TYPE_CHECKING:
    from cpupp.launch.run_find import Target
    from cpupp.plan.cluster import ClusterSpec

BETWEEN_S = 1.2
"""Seconds between two rounds: agents write what their processes use once a second, and a rate needs two values."""
LIST_PATIENCE_S = 10.0
"""How long a list of runs waits for the hosts of detached ones."""


class Look:
    """Looks at one run. Whoever makes it closes it; the ways to the hosts stay the target's."""

    def __init__(self, target: Target) -> None:
        self.target = target
        # What is over is all in the record: then no host need be there any more.
        over = is_over(target.run)
        self._poll = None if over else HostPoll(target.hosts, target.run.run, every_s=BETWEEN_S)

    def wait(self) -> None:
        """Wait until every host has answered twice, or has failed to."""
        if self._poll is not None:
            self._poll.wait(2)

    def status(self) -> RunStatus:
        """The run as it is now, by what is known at this moment."""
        run = self.target.run
        if run.folder:
            run = run_in(Path(run.folder)) or run
        before, after = ({}, {}) if self._poll is None else self._poll.answers()
        return run_status(run, self.target.recorded(), before, after, now=time.time())

    def close(self) -> None:
        """Ask no more."""
        if self._poll is not None:
            self._poll.close()


def note_end(status: RunStatus) -> None:
    """Write into the record of a detached run that it has ended: nobody else is there to do it."""
    run = status.run
    if not run.folder or not run.detached or status.unreachable:
        return
    latest = run_in(Path(run.folder))
    if latest is None or latest.state.ended:
        return
    if status.state.ended:
        failures = [status.first_failure] if status.first_failure is not None else []
        with suppress(CpuppError):
            settle(run, Path(run.folder), status.state, failures, whole=False)


def look_at_all(runs: Sequence[Run]) -> list[RunStatus]:
    """The runs of a list as they are now: the hosts of live detached ones are asked, all at once, each by one way."""
    specs: dict[str, ClusterSpec] = {}
    together: dict[str, list[Run]] = {}
    for run in runs:
        if run.detached and run.live:
            with suppress(CpuppError):
                spec = spec_of(run)
                key = spec.model_dump_json(include={"hosts", "deadlines"})
                specs[key] = spec
                together.setdefault(key, []).append(run)
    looked, _ = run_all({key: partial(_glance, specs[key], group) for key, group in together.items()})
    answered = {name: status for statuses in looked.values() for name, status in statuses.items()}
    return [answered.get(run.run) or run_status(run, Recorded(), {}, {}, now=time.time()) for run in runs]


def refresh(runs: Sequence[Run]) -> None:
    """Note in the records of detached runs that count as live which of them have ended since."""
    for status in look_at_all([run for run in runs if run.detached and run.live]):
        note_end(status)


def _glance(spec: ClusterSpec, runs: Sequence[Run]) -> dict[str, RunStatus]:
    """Runs on the same hosts."""
    ends = time.monotonic() + LIST_PATIENCE_S
    looked = {}
    with hosts_of(spec) as hosts:
        polls = [HostPoll(hosts, run.run, every_s=BETWEEN_S) for run in runs]
        for run, poll in zip(runs, polls, strict=True):
            poll.wait(1, max(0.0, ends - time.monotonic()))
            poll.close()
            before, after = poll.answers()
            looked[run.run] = run_status(run, recorded(run), before, after, now=time.time())
    return looked
