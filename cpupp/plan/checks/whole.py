"""Checks of the whole: open doors, and whether a launch is possible. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.plan.checks.wording import from_error
from cpupp.plan.exposure import exposures
from cpupp.plan.findings import Case, Finding, check, ok, warning
from cpupp.plan.network import data_plane
from cpupp.plan.plan import make_plan
from cpupp.plan.secret import literal_warnings

OWN_CHECK = ("ENGINE-", "MODEL-", "PARITY", "NET-")
"""Codes of a plan's errors that another check reports in more words."""


@check(
    "EXPOSED",
    "neither the API nor the data plane is open to strangers, and the file holds no secret",
    severities="warning",
    why="whoever reaches the port can use the model, or run code on the ranks",
    fix="docs/security.md: a key for the API, a private network for the ranks",
)
def exposed(case: Case) -> Iterator[Finding]:
    """The warnings of a plan about doors, each with how to close it."""
    if case.spec is None:
        return
    try:
        endpoints = data_plane(case.spec, case.facts)
    except CpuppError:  # NET-ADDRESS says it
        endpoints = {}
    doors = exposures(case.spec, endpoints)
    for door in doors:
        yield warning(door.host, door.what, evidence=door.why, cause="it is open to strangers", fix=door.fix)
    literals = literal_warnings(case.spec)
    for text in literals:
        what, _, cure = text.partition(": ")
        cause = "whoever reads the file has it"
        yield warning("", what, evidence="the cluster file", cause=cause, fix=cure)
    if not doors and not literals:
        yield ok("", "nothing is open to strangers", f"the API listens on {case.spec.serve.host}")


@check(
    "PLAN",
    "a launch with this file and these facts is possible",
    severities="error",
    why="the launch would stop at the same place",
    fix="change the file as the finding says",
    needs=("bandwidth",),
)
def plan_is_possible(case: Case) -> Iterator[Finding]:
    """What only the whole plan shows: slots, layers, heads, memory. Codes of single errors are in the evidence."""
    if case.spec is None or case.failures:
        return
    try:
        made = make_plan(case.spec, case.facts)
    except CpuppErrors as problems:
        yield from (from_error(p) for p in problems.errors if not p.code.startswith(OWN_CHECK))
    except CpuppError as problem:
        if not problem.code.startswith(OWN_CHECK):
            yield from_error(problem)
    else:
        yield ok("", f"{len(made.ranks)} ranks on {len(made.hosts)} hosts", made.kv.reason)
