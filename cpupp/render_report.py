"""A doctor's report as a page, and as the `data` of the envelope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cpupp.plan.checks import CHECKS
from cpupp.plan.diagnose import Report
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Finding
from cpupp.render import WIDTH, Page
from cpupp.render_groups import add_groups, groups_data
from cpupp.render_plan import count, gib

_STYLE = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "bold red"}


def report_page(title: str, report: Report, facts: Mapping[str, HostFacts], width: int = WIDTH) -> Page:
    """Lay out a report: the hosts, what is wrong, what is right, the groups, the sum."""
    page = Page(width)
    page.line(f"doctor: {title}", "bold")
    if facts:
        page.heading("Hosts")
        page.table(
            ("host", "hostname", "CPUs", "NUMA", "memory", "/dev/shm", "Python", "torch", "vLLM"),
            [_host_row(name, fact) for name, fact in facts.items()],
        )
    for severity, heading in (("error", "Errors"), ("warning", "Warnings"), ("info", "Worth knowing")):
        wrong = [finding for finding in report.findings if finding.severity == severity]
        if wrong:
            page.heading(heading)
            for finding in wrong:
                _wrong(page, finding)
    right = [finding for finding in report.findings if finding.severity == "ok"]
    if right:
        page.heading("In order")
        page.table(("check", "host", "found", "evidence"), [(f.code, f.host, f.title, f.evidence) for f in right])
    if report.groups:
        add_groups(page, report.groups, report.details)
    page.line()
    page.line(summary(report), _STYLE[_worst(report)])
    return page


def _host_row(name: str, fact: HostFacts) -> tuple[str, ...]:
    return (
        name,
        fact.hostname,
        str(len(fact.cpus)),
        str(len({cpu.numa for cpu in fact.cpus})),
        gib(fact.memory_total),
        gib(fact.shm.size),
        fact.engine.python_version,
        fact.engine.torch,
        fact.engine.vllm,
    )


def _wrong(page: Page, finding: Finding) -> None:
    host = f"{finding.host}: " if finding.host else ""
    page.prose(f"{host}{finding.title}", hang=f"{finding.code}  ", style=_STYLE[finding.severity])
    for name, text in (("evidence", finding.evidence), ("cause", finding.cause), ("fix", finding.fix)):
        if text:
            page.prose(" ".join(text.split()), indent="    ", hang=f"{name}: ".ljust(10))


def _worst(report: Report) -> str:
    return "error" if report.count("error") else "warning" if report.count("warning") else "ok"


def summary(report: Report) -> str:
    """`2 errors, 1 warning, 14 in order`."""
    parts = [count(report.count("error"), "error"), count(report.count("warning"), "warning")]
    if report.count("info"):
        parts.append(f"{report.count('info')} worth knowing")
    return f"{', '.join(parts)}, {report.count('ok')} in order"


def catalogue_text() -> str:
    """docs/checks.md: every check with its code."""
    rows = "".join(
        f"| [`{entry.code}`](#{entry.code.lower()}) | {', '.join(entry.severities)} | {entry.about} |\n"
        for entry in CHECKS.values()
    )
    sections = "".join(
        f"\n## {entry.code}\n\nIn order: {entry.about}. Otherwise: {', '.join(entry.severities)}.\n\n"
        f"- Cause: {entry.why}.\n- Fix: {entry.fix}.\n"
        for entry in CHECKS.values()
    )
    return (
        "# The checks of `cpupp doctor`\n\n"
        "Made from the code (`pytest tests/unit --update-golden`). A finding is `ok`, `info` (worth knowing, nothing\n"
        "to do), `warning` (it runs, but costs or surprises) or `error` (it would fail, or answer wrongly). Errors\n"
        "make `cpupp doctor` exit with 4. `--only` and `--skip` take codes, or what codes begin with (`NET`).\n\n"
        f"| code | when not `ok` | what is in order when it is `ok` |\n| --- | --- | --- |\n{rows}{sections}"
    )


def report_data(report: Report, facts: Mapping[str, HostFacts]) -> dict[str, Any]:
    """The report as JSON values; `hosts` has all facts."""
    return {
        "findings": [asdict(finding) for finding in report.findings],
        "groups": groups_data(report.groups, report.details),
        "hosts": {name: asdict(fact) for name, fact in facts.items()},
    }
