"""The state of a run and of each of its ranks: its record and what its hosts say, put together. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cpupp.plan.failures import Failure, exit_text, with_signal
from cpupp.plan.hoststate import HostFailure, NodeReport, Process, Site
from cpupp.plan.metrics import Load, Speed, speed
from cpupp.plan.runs import Run
from cpupp.plan.runstate import RunState
from cpupp.plan.steps import StepSplit, split


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank belongs; stage and tp_index are None where neither record nor cluster file is at hand."""

    rank: int
    host: str
    node_rank: int
    stage: int | None = None
    tp_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """What one host said when it was asked at `at` (launcher's monotonic seconds), or why it said nothing."""

    host: str
    at: float
    sites: tuple[Site, ...] = ()
    load: Load | None = None
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank. alive is None when its host cannot be asked; cpu is in cores (1.0: one core busy), rss in bytes.

    log_age: seconds since its vLLM node wrote its last line; decode: its decode steps between the two looks.
    """

    place: RankPlace
    alive: bool | None
    doing: str
    pid: int | None = None
    cpu: float | None = None
    rss: int | None = None
    log_age: float | None = None
    decode: StepSplit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as it is now. unreachable: answers of the hosts that could not be asked; age: seconds since it started."""

    run: Run
    state: RunState
    ranks: tuple[RankStatus, ...]
    age: float | None
    load: Load | None = None
    speed: Speed = field(default_factory=Speed)
    first_failure: Failure | None = None
    num_failures: int = 0
    unreachable: tuple[HostAnswer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the run's folder tells beside `run.json`: the phase of each vLLM node, and the first failure."""

    places: tuple[RankPlace, ...] = ()
    phases: Mapping[int, str] = field(default_factory=dict)
    first_failure: Failure | None = None


def run_status(
    run: Run,
    recorded: Recorded,
    before: Mapping[str, HostAnswer],
    after: Mapping[str, HostAnswer],
    *,
    now: float,
) -> RunStatus:
    """Put record and hosts together. before, after: two rounds of answers by host; now: unix seconds."""
    attempt = newest_attempt(run, after)
    sites = {name: site for name, answer in after.items() if (site := own_site(answer, run.run, attempt)) is not None}
    old = {name: site for name, answer in before.items() if (site := own_site(answer, run.run, attempt)) is not None}
    missing = tuple(answer for answer in after.values() if answer.error)
    load = next((answer.load for answer in after.values() if answer.load is not None), None)
    earlier = next((answer.load for answer in before.values() if answer.load is not None), None)
    failures = host_failures(sites)
    state = run_state(run, sites, after, serving=load is not None)
    run = replace(run, attempt=attempt)
    places = recorded.places or places_reported(sites)
    first = recorded.first_failure or (failures[0] if failures else None)
    if first is None and state is RunState.CRASHED:
        first = launcher_lost(run)
    started = run.started or min((site.created for site in sites.values() if site.created), default=0.0)
    return RunStatus(
        run=run,
        state=state,
        ranks=tuple(_rank(place, state, recorded, old, sites, after) for place in places),
        age=now - started if started else None,
        load=load,
        speed=speed(earlier, load),
        first_failure=None if state in (RunState.READY, RunState.STARTING) else first,
        num_failures=len(failures),
        unreachable=missing,
    )


def launcher_lost(run: Run) -> Failure | None:
    """Why a run is `crashed` of which nobody has said anything; None where its launcher had left it to the agents."""
    if run.detached or run.launcher is None:
        return None
    who = f"its launcher, process {run.launcher.pid} on {run.launcher.hostname}"
    message = f"{who}, ended without a word: it was killed, or its machine went down; the agents ended its ranks then"
    hint = "`cpupp stop` makes sure of that; a run with --detach needs no launcher"
    return Failure(host="", node_rank=None, ranks=(), code="LAUNCHER-LOST", message=message, hint=hint)


def newest_attempt(run: Run, answers: Mapping[str, HostAnswer]) -> int:
    """The latest attempt that record or hosts know of."""
    found = [site.attempt for answer in answers.values() for site in answer.sites if site.run == run.run]
    return max([run.attempt, *found])


def own_site(answer: HostAnswer, run: str, attempt: int) -> Site | None:
    """The host's own site of this attempt: machines may carry several hosts of a run. One that lives goes first."""
    mine = [s for s in answer.sites if s.run == run and s.attempt == attempt and s.host == answer.host]
    return max(mine, key=lambda site: (site.held, site.ended, site.time), default=None)


def run_state(run: Run, sites: Mapping[str, Site], answers: Mapping[str, HostAnswer], *, serving: bool) -> RunState:
    """The state of the run. serving: whether its API answers.

    The launcher's word holds while the launcher lives; hosts know it sooner when a rank dies. Without a launcher the
    hosts decide, and where no host can be asked the record is all there is.
    """
    held = [site for site in sites.values() if site.held]
    broken = any(_broken(site) for site in held) or any(site.failure for site in sites.values())
    if run.launcher_alive and not run.detached:
        return RunState.DEGRADED if broken and run.state is RunState.READY else run.state
    if not held:
        return _ended_state(run, sites, answers)
    if run.state in (RunState.STOPPING, RunState.CRASHED):
        return run.state
    reached = [name for name, answer in answers.items() if not answer.error]
    if broken or any(name not in sites or not sites[name].held for name in reached):
        return RunState.DEGRADED
    if not run.state.ended and (run.folder or run.state is not RunState.STARTING):
        return run.state
    return RunState.READY if serving else RunState.STARTING


def _ended_state(run: Run, sites: Mapping[str, Site], answers: Mapping[str, HostAnswer]) -> RunState:
    """The state of a run of which no process was found."""
    if any(site.failure for site in sites.values()):
        return RunState.FAILED
    if any(answer.error for answer in answers.values()) or not answers or run.state.ended:
        return run.state
    if sites:
        # A host that went down in order keeps a record; a folder that is merely left tells of a crash.
        return RunState.STOPPED if all(site.ended for site in sites.values()) else RunState.CRASHED
    return RunState.STOPPED if run.state is RunState.STOPPING else RunState.CRASHED


def _broken(site: Site) -> bool:
    return any(not node.alive for node in site.nodes.values()) or any(
        _gone(node, pid) for node in site.nodes.values() for pid in node.ranks.values()
    )


def _gone(node: NodeReport, pid: int) -> bool:
    process = node.processes.get(pid)
    return bool(node.processes) and (process is None or process.state in ("Z", "X"))


def host_failures(sites: Mapping[str, Site]) -> list[Failure]:
    """What the hosts wrote down, the cause first: own evidence goes before the loss of a peer, then the earlier."""
    found = [(site, site.failure) for site in sites.values() if site.failure is not None]
    found.sort(key=lambda pair: (pair[1].code in ("PEER-LOST", "AGENT-LOST"), pair[1].time))
    return [_failure(site, failure, sites) for site, failure in found]


def _failure(site: Site, failure: HostFailure, sites: Mapping[str, Site]) -> Failure:
    """The failure at the host that it is about: the loss of a peer is written down by another one."""
    lost = failure.code == "PEER-LOST"
    home = next((other for other in sites.values() if lost and failure.node in other.nodes), site)
    node = home.nodes.get(failure.node)
    found = Failure(
        host=_host_of(failure.node, site) if lost and node is None else home.host,
        node_rank=failure.node if failure.node >= 0 else None,
        ranks=tuple(sorted(node.ranks)) if node else (),
        code=failure.code,
        message=failure.message,
        last_lines=failure.last_lines,
    )
    return with_signal(found)


def _host_of(node: int, site: Site) -> str:
    """The host of a vLLM node of which no host knows any more, where the record tells; else that of the site."""
    names = site.record.get("hosts")
    if isinstance(names, list) and len(names) == site.record.get("num_nodes") and 0 <= node < len(names):
        return str(names[node])
    return site.host


def places_reported(sites: Mapping[str, Site]) -> tuple[RankPlace, ...]:
    """The ranks that the hosts know of, where nothing else tells which there should be."""
    places = [
        RankPlace(rank=rank, host=site.host, node_rank=node.node)
        for site in sites.values()
        for node in site.nodes.values()
        for rank in node.ranks
    ]
    return tuple(sorted(places, key=lambda place: place.rank))


def _rank(
    place: RankPlace,
    state: RunState,
    recorded: Recorded,
    before: Mapping[str, Site],
    after: Mapping[str, Site],
    answers: Mapping[str, HostAnswer],
) -> RankStatus:
    site = after.get(place.host)
    node = site.nodes.get(place.node_rank) if site is not None else None
    if site is None or node is None:
        return _absent(place, state, answers.get(place.host))
    if not site.held:
        return RankStatus(place=place, alive=False, doing=_how_it_ended(node, site))
    pid = node.ranks.get(place.rank)
    alive = node.alive and not (pid is not None and _gone(node, pid))
    age = _log_age(place, before.get(place.host), site)
    if not alive:
        return RankStatus(place=place, alive=False, doing=_how_it_ended(node, site), pid=pid, log_age=age)
    process = node.processes.get(pid if pid is not None else node.main_pid)
    single = len(node.ranks) < 2
    return RankStatus(
        place=place,
        alive=True,
        doing=_doing(state, process, recorded.phases.get(place.node_rank, "")),
        pid=pid if pid is not None else node.main_pid or None,
        cpu=_cpu(place, before.get(place.host), site, process),
        rss=process.rss if process is not None else node.rss if single else None,
        log_age=age,
        decode=_decode(place, before.get(place.host), site),
    )


def _decode(place: RankPlace, before: Site | None, after: Site) -> StepSplit | None:
    """The average decode step between two looks at the host."""
    now, earlier = after.steps.get(place.rank), None if before is None else before.steps.get(place.rank)
    return None if now is None or earlier is None else split(now.since(earlier).decode)


def _log_age(place: RankPlace, before: Site | None, after: Site) -> float | None:
    """Seconds since the vLLM node's last line, before the look itself: asking /metrics makes vLLM write one."""
    for site in (before, after):
        node = site.nodes.get(place.node_rank) if site is not None else None
        if site is not None and node is not None and node.log_time:
            return max(0.0, site.time - node.log_time)
    return None


def _absent(place: RankPlace, state: RunState, answer: HostAnswer | None) -> RankStatus:
    if answer is None or answer.error:
        doing = "host not reached" if answer else "ended" if state.ended else ""
        return RankStatus(place=place, alive=False if state.ended else None, doing=doing)
    early = state in (RunState.STARTING, RunState.RESTARTING)
    return RankStatus(
        place=place, alive=False, doing="not started" if early else "gone" if not state.ended else "ended"
    )


def _how_it_ended(node: NodeReport, site: Site) -> str:
    if node.exit_code is None:
        return "died" if node.alive else "ended"
    first = site.failure
    ours = site.ended if first is None else (first.code, first.node) != ("RANK-SIGNAL", node.node)
    if ours and node.exit_code in (-signal.SIGTERM, -signal.SIGKILL):
        return "taken down"
    return exit_text(node.exit_code) if node.exit_code else "exited"


def _doing(state: RunState, process: Process | None, phase: str) -> str:
    if process is not None and process.state in ("T", "t"):
        return "suspended (SIGSTOP)"
    if state in (RunState.READY, RunState.STOPPING):
        return str(state)
    return phase or "running"


def _cpu(place: RankPlace, before: Site | None, after: Site, process: Process | None) -> float | None:
    """Cores busy between the two states that the host wrote; None when it wrote only one."""
    old = before.nodes.get(place.node_rank) if before is not None else None
    if old is None or process is None or before is None or after.time <= before.time:
        return None
    earlier = old.processes.get(process.pid)
    if earlier is None or process.cpu_s < earlier.cpu_s:
        return None
    return (process.cpu_s - earlier.cpu_s) / (after.time - before.time)
