"""Which run a verb is about, with open ways to its hosts: by its record, or by asking the hosts of a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpupp.errors import CpuppError, CpuppErrors, ExitCode
from cpupp.launch.config import load_cluster
from cpupp.launch.run_hosts import RunHosts, hosts_of, spec_of
from cpupp.launch.run_look import refresh
from cpupp.launch.runs import all_runs, recorded
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.grid import make_grid, slots_equation
from cpupp.plan.hoststate import Site, read_sites
from cpupp.plan.runs import HostRef, Run, choose, joined, looks_like_file, runs_found
from cpupp.plan.status import RankPlace, Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run, the ways to its hosts, and the cluster file where the user gave one. Whoever gets it closes `hosts`.

    unreachable: the errors of hosts that were asked and did not answer.
    """

    run: Run
    hosts: RunHosts
    spec: ClusterSpec | None = None
    unreachable: tuple[CpuppError, ...] = ()

    def recorded(self) -> Recorded:
        """What the run's folder tells; without one, the ranks of the cluster file."""
        found = recorded(self.run)
        return found if found.places or self.spec is None else Recorded(places=places_of(self.spec))


def find(root: Path, wanted: str | None, file: str | None) -> Target:
    """The run that RUN and --file name. root: the folder of all records.

    Raises CpuppError: RUN-NONE, RUN-UNKNOWN, RUN-AMBIGUOUS, what is wrong with the file, or why no host answers.
    """
    if file is None and wanted is not None and is_cluster_file(root, wanted):
        wanted, file = None, wanted
    if file is None:
        run = _choose(lambda: all_runs(root), wanted)
        return Target(run=run, hosts=hosts_of(spec_of(run)))
    return _ask_hosts(root, wanted, load_cluster(file))


def _choose(known: Callable[[], Sequence[Run]], wanted: str | None) -> Run:
    """The run that is meant. Before a choice is refused, hosts are asked whether detached runs still live."""
    try:
        return choose(known(), wanted)
    except CpuppError as error:
        if error.code != "RUN-AMBIGUOUS":
            raise
        refresh(known())
        return choose(known(), wanted)


def is_cluster_file(root: Path, wanted: str) -> bool:
    """Whether RUN is meant as a cluster file: by its looks, or it is one and its name is no run's."""
    if looks_like_file(wanted):
        return True
    if not Path(wanted).is_file():
        return False
    return not any(wanted == run.name or run.run.startswith(wanted) for run in _readable_runs(root))


def _readable_runs(root: Path) -> list[Run]:
    """Every run that has a record here; none where records cannot be read: the hosts know their runs, too."""
    try:
        return all_runs(root)
    except CpuppError:
        return []


def _ask_hosts(root: Path, wanted: str | None, spec: ClusterSpec) -> Target:
    hosts = hosts_of(spec)
    try:
        answers, errors = hosts.ask_all("runs")
        if not answers:
            raise CpuppErrors(errors)
        sites = [site for answer in answers.values() for site in read_sites(answer)]
        run = choose_on_hosts(root, wanted, spec, sites, errors)
    except BaseException:
        hosts.close()
        raise
    return Target(run=run, hosts=hosts, spec=spec, unreachable=tuple(errors))


def choose_on_hosts(
    root: Path, wanted: str | None, spec: ClusterSpec, sites: Sequence[Site], errors: Sequence[CpuppError]
) -> Run:
    """The run of this cluster file that is meant, of those that hosts and records know."""
    refs = tuple(HostRef(name=host.name, ssh=host.ssh, local=host.local) for host in spec.hosts)
    found = runs_found(spec.name, refs, sites)

    def known() -> list[Run]:
        return joined([run for run in _readable_runs(root) if run.name == spec.name], found)

    if known():
        return _choose(known, wanted)
    names = ", ".join(sorted({error.where for error in errors}))
    message = f"no run of cluster {spec.name} is on its hosts" + (
        f", as far as they answer (not: {names})" if names else ""
    )
    code = ExitCode.UNREACHABLE if errors else ExitCode.USAGE
    raise CpuppError("RUN-NONE", message, hint="`cpupp ps --all` lists what this machine has launched", exit_code=code)


def places_of(spec: ClusterSpec) -> tuple[RankPlace, ...]:
    """The ranks that a cluster file makes; none when its slots do not fit."""
    if slots_equation(spec) is not None:
        return ()
    return tuple(
        RankPlace(rank=s.rank, host=s.host, node_rank=s.node_rank, stage=s.stage, tp_index=s.tp_index)
        for s in make_grid(spec).seats
    )
