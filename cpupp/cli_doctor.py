"""What `cpupp doctor` does: ask the hosts what the chosen checks need, diagnose, show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cpupp.launch.examine import Examination
from cpupp.launch.probe import probe_all
from cpupp.launch.session import connect_all, run_all
from cpupp.plan.amounts import count
from cpupp.plan.checks import CHECKS
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.diagnose import diagnose
from cpupp.plan.facts import HostFacts
from cpupp.plan.selection import needs_of, nothing_without_file
from cpupp.render import page_width, print_envelope
from cpupp.render_report import add_cleaned, report_data, report_page


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What the hosts said. failures: host -> (what went wrong, hint); measured: further fields of `findings.Case`.

    cleaned: host -> name and size of each leftover that was removed; None when that was not asked for.
    """

    facts: Mapping[str, HostFacts]
    failures: Mapping[str, tuple[str, str]]
    measured: Mapping[str, Any]
    cleaned: Mapping[str, list[dict[str, Any]]] | None


def this_machine() -> ClusterSpec:
    """A cluster of this machine alone, with the Python that runs cpupp as the engine's."""
    here = {"name": "here", "local": True}
    engine = {"python": sys.executable}
    return ClusterSpec.model_validate({"name": "here", "model": {"path": "."}, "hosts": [here], "engine": engine})


def examine(
    spec: ClusterSpec,
    codes: tuple[str, ...],
    *,
    accept_new: Callable[[str], None] | None,
    with_file: bool,
    clean: bool,
    tell: Callable[[str], None],
) -> Examined:
    """Ask every host that can be reached what these checks need to know.

    with_file: whether spec is a cluster file's; clean: remove dead leftovers first; tell: gets lines about progress.
    """
    needs = needs_of(CHECKS, codes)
    sessions, errors = connect_all(spec, accept_new=accept_new)
    try:
        facts, later = probe_all(spec, sessions, bandwidth=with_file and "bandwidth" in needs)
        examination = Examination(spec, sessions, facts, tell)
        cleaned = examination.clean() if clean else None
        measured = examination.measure(needs, with_file=with_file)
    finally:
        run_all({name: session.close for name, session in sessions.items()})
    failures = {error.where: (error.message, error.hint) for error in [*errors, *later]}
    return Examined(facts=facts, failures={**failures, **examination.failures}, measured=measured, cleaned=cleaned)


def show(
    spec: ClusterSpec | None,
    file: str,
    codes: tuple[str, ...],
    examined: Examined,
    *,
    as_json: bool,
    verbose: bool,
) -> bool:
    """Print the report, of this machine when spec is None. Returns whether there is no error in it."""
    report = diagnose(spec, examined.facts, examined.failures, codes, file=file, **examined.measured)
    if spec is None and not report.findings:
        raise nothing_without_file()
    pairs = examined.measured.get("pairs", ())
    ok = report.count("error") == 0
    if as_json:
        data = report_data(report, examined.facts, pairs)
        extra = {} if examined.cleaned is None else {"cleaned": examined.cleaned}
        print_envelope("doctor", ok=ok, data={**data, **extra})
    else:
        title = "this machine" if spec is None else f"cluster {spec.name}, {count(len(spec.hosts), 'host')}"
        health = examined.measured.get("health")
        page = report_page(
            title, report, examined.facts, page_width(sys.stdout), health=health, pairs=pairs, verbose=verbose
        )
        if examined.cleaned is not None:
            add_cleaned(page, examined.cleaned)
        page.show(sys.stdout)
    return ok
