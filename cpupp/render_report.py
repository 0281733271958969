"""A doctor's report as a page, and as the `data` of the envelope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cpupp.plan.checks import CHECKS
from cpupp.plan.diagnose import Report
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Finding
from cpupp.plan.health import HealthFacts
from cpupp.plan.pairs import PairFacts
from cpupp.render import WIDTH, Page
from cpupp.render_groups import add_groups, groups_data
from cpupp.render_pairs import add_pairs
from cpupp.render_sizes import count, gib

_STYLE = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "bold red"}


def report_page(
    title: str,
    report: Report,
    facts: Mapping[str, HostFacts],
    width: int = WIDTH,
    *,
    health: Mapping[str, HealthFacts] | None = None,
    pairs: Sequence[PairFacts] = (),
    verbose: bool = False,
) -> Page:
    """Lay out a report: the hosts, what is wrong, what is right (a line for each host, or all), the groups, the sum."""
    page = Page(width)
    page.line(f"doctor: {title}", "bold")
    if facts:
        page.heading("Hosts")
        page.table(
            ("host", "hostname", "CPUs", "NUMA", "memory", "/dev/shm", "Python", "torch", "vLLM", "Linux", "libc"),
            [_host_row(name, fact, (health or {}).get(name)) for name, fact in facts.items()],
        )
    for severity, heading in (("error", "Errors"), ("warning", "Warnings"), ("info", "Worth knowing")):
        wrong = [finding for finding in report.findings if finding.severity == severity]
        if wrong:
            page.heading(heading)
            for several in _alike(wrong):
                _wrong(page, several)
    _right(page, [finding for finding in report.findings if finding.severity == "ok"], verbose)
    add_pairs(page, pairs)
    if report.groups:
        add_groups(page, report.groups, report.details)
    page.line()
    page.line(summary(report), _STYLE[_worst(report)])
    return page


def add_cleaned(page: Page, cleaned: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Say what `--clean` has removed, by host."""
    page.heading("Removed from /dev/shm")
    rows = [(name, str(entry["name"]), f"{entry['size']} bytes") for name, found in cleaned.items() for entry in found]
    if rows:
        page.table(("host", "file", "size"), rows)
    else:
        page.line("  nothing: no host has dead files of this user")


def _right(page: Page, right: Sequence[Finding], verbose: bool) -> None:
    if not right:
        return
    page.heading("In order")
    if verbose:
        page.table(("check", "host", "found", "evidence"), [(f.code, f.host, f.title, f.evidence) for f in right])
        return
    for host in dict.fromkeys(finding.host for finding in right):
        codes = dict.fromkeys(finding.code for finding in right if finding.host == host)
        page.line(f"  {host or 'all together'}: {count(len(codes), 'check')}")
    page.line("  --verbose shows each", "dim")


def _alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Put together what is said of several hosts in the same words."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.title, finding.cause, finding.fix), []).append(finding)
    return list(groups.values())


def _host_row(name: str, fact: HostFacts, health: HealthFacts | None) -> tuple[str, ...]:
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
        fact.kernel.partition("-")[0],
        health.glibc.removeprefix("glibc ") if health else "",
    )


def _wrong(page: Page, several: Sequence[Finding]) -> None:
    first = several[0]
    hosts = ", ".join(finding.host for finding in several if finding.host)
    page.prose(
        f"{hosts}: {first.title}" if hosts else first.title, hang=f"{first.code}  ", style=_STYLE[first.severity]
    )
    texts = {finding.host: finding.evidence for finding in several}
    evidence = first.evidence
    if len(set(texts.values())) > 1:
        evidence = "; ".join(f"{host}: {text}" for host, text in texts.items())
    for name, text in (("evidence", evidence), ("cause", first.cause)):
        if text:
            page.prose(" ".join(text.split()), indent="    ", hang=f"{name}: ".ljust(10))
    if first.fix:  # never broken: what is in it is pasted
        page.line(f"    {'fix: ':10}{' '.join(first.fix.split())}")


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


def report_data(report: Report, facts: Mapping[str, HostFacts], pairs: Sequence[PairFacts] = ()) -> dict[str, Any]:
    """The report as JSON values; `hosts` has all facts."""
    return {
        "findings": [asdict(finding) for finding in report.findings],
        "groups": groups_data(report.groups, report.details),
        "pairs": [asdict(pair) for pair in pairs],
        "hosts": {name: asdict(fact) for name, fact in facts.items()},
    }
