"""diagnose(spec, facts) -> Report: the findings of every check, and the groups with backend and reason.

The checks live in `checks/`; this module runs them and knows nothing of what they check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpupp.plan.auto import settle_parallel
from cpupp.plan.backend import GroupPlan, plan_groups
from cpupp.plan.checks import CHECKS
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import UNREACHED, Case, Finding
from cpupp.plan.grid import make_grid, slots_equation
from cpupp.plan.group_detail import GroupDetail, group_details
from cpupp.plan.model import readable_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings, in the order of the catalogue, and the groups.

    No groups when ranks cannot be seated, or no host was reached.
    """

    findings: tuple[Finding, ...]
    groups: tuple[GroupPlan, ...]
    details: tuple[GroupDetail, ...] = ()

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(finding.severity == severity for finding in self.findings)


def diagnose(
    spec: ClusterSpec | None,
    facts: Mapping[str, HostFacts],
    failures: Mapping[str, tuple[str, str]] | None = None,
    codes: Iterable[str] | None = None,
    **measured: Any,
) -> Report:
    """Run the checks with these codes (None: all) on what is known. Never raises for what a host or a file may hold.

    measured: further fields of `Case`. Hosts that were not reached are told whatever the codes.
    """
    if spec is not None and spec.parallel.auto:
        spec, _ = settle_parallel(spec, readable_model(facts), facts)
    case = Case(spec=spec, facts=facts, failures=failures or {}, **measured)
    wanted = set(CHECKS if codes is None else codes)
    entries = [entry for code, entry in CHECKS.items() if code in wanted or (code == UNREACHED and failures)]
    findings = [replace(found, code=entry.code) for entry in entries for found in entry.run(case)]
    groups: tuple[GroupPlan, ...] = ()
    details: tuple[GroupDetail, ...] = ()
    if spec is not None and facts and slots_equation(spec) is None:
        grid = make_grid(spec)
        groups, details = plan_groups(spec, grid, facts), group_details(spec, grid, facts)
    return Report(findings=tuple(findings), groups=groups, details=details)
