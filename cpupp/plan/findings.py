"""What doctor's checks produce, and the registry that they enter: one function a check, with its code.

A check reads a `Case` and yields findings; it never raises for what a host or a file may hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.health import HealthFacts, TimingFacts, VllmFacts
from cpupp.plan.pairs import PairFacts

SEVERITIES = ("ok", "info", "warning", "error")
"""`info` is worth knowing, and nothing is to be done about it."""

UNREACHED = "HOST-REACH"
"""The check whose errors are told whatever was chosen: the others are silent about such hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found. severity: one of SEVERITIES; host: empty for the whole cluster.

    title: one line; evidence: what was read and where; cause: why it matters; fix: what to do, a command where there is
    one. cause and fix are empty when nothing is wrong (for `ok`, and mostly for `info`).
    """

    code: str
    severity: str
    host: str
    title: str
    evidence: str = ""
    cause: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a check may look at. spec: None when this machine is examined without a cluster file; file: its path.

    failures: host -> (what went wrong, hint) of the hosts that could not be asked. The rest is measured only for checks
    that need it, and empty otherwise: health and timing by host, vllm by host that was asked for its build; pairs: the
    way between every two hosts, both directions.
    """

    spec: ClusterSpec | None
    facts: Mapping[str, HostFacts]
    failures: Mapping[str, tuple[str, str]]
    health: Mapping[str, HealthFacts] = field(default_factory=dict)
    vllm: Mapping[str, VllmFacts] = field(default_factory=dict)
    timing: Mapping[str, TimingFacts] = field(default_factory=dict)
    pairs: tuple[PairFacts, ...] = ()
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of the catalogue: its code, what it is about, and the function that yields its findings.

    about: what is in order when it is ok; why: what happens otherwise; fix: what to do, in general (a finding says it
    for its host); severities: the worst first, without `ok`; needs: names of `Case` fields beside facts that it reads,
    or `bandwidth` (of memory); these are measured only for checks that were chosen.
    """

    code: str
    about: str
    why: str
    fix: str
    severities: tuple[str, ...]
    needs: tuple[str, ...]
    run: Callable[[Case], Iterator[Finding]]


CHECKS: dict[str, Check] = {}
"""The catalogue, in the order in which findings are shown."""

Run = Callable[[Case], Iterator[Finding]]


def check(
    code: str, about: str, *, why: str, fix: str, severities: str, needs: tuple[str, ...] = ()
) -> Callable[[Run], Run]:
    """Register a function as the check `code`; its findings get that code. severities: words with spaces between."""

    def register(run: Run) -> Run:
        assert code not in CHECKS
        ranks = tuple(sorted(severities.split(), key=SEVERITIES.index, reverse=True))
        CHECKS[code] = Check(code=code, about=about, why=why, fix=fix, severities=ranks, needs=needs, run=run)
        return run

    return register


def ok(host: str, title: str, evidence: str = "") -> Finding:
    """A finding that says what is right."""
    return Finding(code="", severity="ok", host=host, title=title, evidence=evidence)


def info(host: str, title: str, evidence: str = "", *, cause: str = "", fix: str = "") -> Finding:
    """A finding that is worth knowing, and nothing has to be done about it; fix: what could be."""
    return Finding(code="", severity="info", host=host, title=title, evidence=evidence, cause=cause, fix=fix)


def warning(host: str, title: str, *, evidence: str, cause: str, fix: str) -> Finding:
    """A finding that costs or surprises, but does not prevent a run."""
    return Finding(code="", severity="warning", host=host, title=title, evidence=evidence, cause=cause, fix=fix)


def error(host: str, title: str, *, evidence: str, cause: str, fix: str) -> Finding:
    """A finding that prevents a run, or makes it fail or answer wrongly."""
    return Finding(code="", severity="error", host=host, title=title, evidence=evidence, cause=cause, fix=fix)
