"""diagnose(spec, facts) -> Report: the findings of every check, and the groups with backend and reason.

The checks live in `checks.py`; this module runs them and knows nothing of what they check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cpupp.plan import checks
from cpupp.plan.backend import GroupPlan, plan_groups
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Case, Finding
from cpupp.plan.grid import make_grid, slots_equation


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings, in the order of the catalogue, and the groups (empty when ranks cannot be seated)."""

    findings: tuple[Finding, ...]
    groups: tuple[GroupPlan, ...]

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(finding.severity == severity for finding in self.findings)


def diagnose(
    spec: ClusterSpec | None,
    facts: Mapping[str, HostFacts],
    failures: Mapping[str, tuple[str, str]] | None = None,
) -> Report:
    """Run every check on what is known. Never raises for what a host or a file may hold."""
    case = Case(spec=spec, facts=facts, failures=failures or {})
    findings = [replace(found, code=entry.code) for entry in checks.CHECKS.values() for found in entry.run(case)]
    groups: tuple[GroupPlan, ...] = ()
    if spec is not None and slots_equation(spec) is None:
        groups = plan_groups(spec, make_grid(spec), facts)
    return Report(findings=tuple(findings), groups=groups)
