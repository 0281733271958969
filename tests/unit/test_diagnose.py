"""doctor's checks: each shows the fault on a host that has it, and is silent on one that has not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cpupp.plan.checks import CHECKS
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.diagnose import Report, diagnose
from cpupp.plan.facts import HostFacts, ShmFacts
from cpupp.plan.findings import Finding
from cpupp.render_report import catalogue_text, report_data, report_page
from tests.unit.factory import cluster, engine, host, machines, model_folder, one_machine, port, route

PAIR = cluster("a", "b", pipeline=2, serve={"host": "127.0.0.1"})
MIB = 1 << 20


def wrong(report: Report) -> list[tuple[str, str, str]]:
    """Severity, code and host of everything that is not in order."""
    return [(f.severity, f.code, f.host) for f in report.findings if f.severity != "ok"]


def test_a_healthy_pair_is_in_order() -> None:
    report = diagnose(PAIR, machines("a", "b"))
    assert wrong(report) == []
    assert report.count("ok") > 15
    assert [group.backend for group in report.groups] == ["gloo"]


def test_every_check_says_what_it_is_about() -> None:
    assert all(entry.about and entry.run.__doc__ for entry in CHECKS.values())


Change = Callable[[HostFacts], HostFacts]


def changed(**fields: Any) -> Change:
    """A host with other facts."""
    return lambda fact: replace(fact, **fields)


FAULTS: list[tuple[str, str, Change, str]] = [
    ("error", "ENGINE", changed(engine=engine(error="no such file", vllm="")), "b"),
    ("error", "ENGINE", changed(engine=engine(vllm="0.17.0")), "b"),
    ("warning", "ENGINE", changed(engine=engine(vllm="0.99.0")), "b"),
    ("error", "ENGINE-PARITY", changed(engine=engine(vllm="0.31.0")), ""),
    ("error", "ENGINE-PARITY", changed(engine=engine(torch="2.12.0")), ""),
    ("error", "ENGINE-PARITY", changed(engine=engine(python_version="3.12.1")), ""),
    ("warning", "CPU", changed(cpu_quota=1.5), "b"),
    ("error", "CPU-ISA", changed(isa=("sse4_2",)), "b"),
    ("warning", "CPU-ISA", changed(isa=("avx2",)), ""),
    ("warning", "MEMORY", changed(memory_limit=8 << 30), "b"),
    ("error", "SHM", changed(shm=ShmFacts(device=9, size=64 * MIB, free=60 * MIB, writable=True)), "b"),
    ("error", "SHM", changed(shm=ShmFacts(device=9, size=0, free=0, writable=False)), "b"),
    ("warning", "PRELOAD", changed(engine=engine(tcmalloc="")), "b"),
    ("warning", "PRELOAD", changed(engine=engine(iomp="")), "b"),
    ("warning", "LIMITS", changed(ulimits={"nofile": 1024}), "b"),
    ("error", "MODEL", changed(model=model_folder(error="No such file or directory")), "b"),
    (
        "error",
        "MODEL",
        changed(model=model_folder(config={"num_hidden_layers": 1, "hidden_size": 1, "vocab_size": 1})),
        "b",
    ),
    ("error", "MODEL-PARITY", changed(model=model_folder(digest="e" * 64)), ""),
    ("warning", "NET-LOOPBACK-NAME", changed(name_resolves_to=("127.0.1.1",)), "b"),
    ("error", "NET-ROUTE", changed(routes=(route("a", "10.0.0.1", "", "", "Network is unreachable"),)), "b"),
    ("warning", "ENVIRONMENT", changed(environment={"GLOO_SOCKET_IFNAME": "eth9", "PATH": "/bin"}), "b"),
]


@pytest.mark.parametrize(("severity", "code", "change", "where"), FAULTS, ids=lambda v: v if isinstance(v, str) else "")
def test_each_fault_is_found_on_the_host_that_has_it(severity: str, code: str, change: Change, where: str) -> None:
    facts = machines("a", "b")
    facts["b"] = change(facts["b"])
    report = diagnose(PAIR, facts)
    assert (severity, code, where) in wrong(report)
    assert "a" not in {f.host for f in report.findings if f.severity != "ok"}
    for finding in report.findings:
        if finding.severity != "ok":
            assert finding.title
            assert finding.evidence
            assert finding.cause
            assert finding.fix


def test_an_unreachable_host_is_an_error_in_its_own_words() -> None:
    report = diagnose(PAIR, {"a": host("a")}, {"b": ("connection refused by 10.0.0.2:22", "is sshd running there?")})
    assert wrong(report) == [("error", "HOST-REACH", "b")]
    finding = report.findings[0]
    assert (finding.evidence, finding.fix) == ("connection refused by 10.0.0.2:22", "is sshd running there?")


def test_a_taken_port_names_its_holder() -> None:
    facts = machines("a", "b")
    facts["a"] = replace(facts["a"], ports=(port(8000, holder="pid 12 (nginx)"),))
    found = [f for f in diagnose(PAIR, facts).findings if f.code == "PORT"]
    assert [(f.severity, f.evidence) for f in found] == [("error", "pid 12 (nginx)")]


def test_an_impossible_plan_is_an_error() -> None:
    for spec in (cluster("a", "b", pipeline=3), cluster({"name": "a", "slots": 3}, tensor=3)):
        report = diagnose(spec, machines(*(h.name for h in spec.hosts)))
        assert ("error", "PLAN", "") in wrong(report)


def test_faults_of_stock_vllm_are_cured_or_warned_about() -> None:
    def faults(mode: str) -> list[Finding]:
        spec = cluster("a", "b", pipeline=2, engine={"communicator": mode})
        report = diagnose(spec, machines("a", "b", engine=engine(vllm="0.18.0")))
        return [f for f in report.findings if f.code == "ENGINE-FAULTS"]

    assert {f.severity for f in faults("links")} == {"ok"}
    assert {f.severity for f in faults("stock")} == {"warning"}


def test_the_need_of_dev_shm_is_summed_over_entries_that_share_it() -> None:
    facts = one_machine("a", "b", shm=ShmFacts(device=1, size=150 * MIB, free=150 * MIB, writable=True))
    titles = [f.title for f in diagnose(PAIR, facts).findings if f.code == "SHM"]
    assert titles == ["/dev/shm has 150 MiB free, 144 MiB needed"] * 2


def test_the_remedy_for_dev_shm_counts_what_is_in_it() -> None:
    full = ShmFacts(device=1, size=8 << 30, free=10 * MIB, writable=True)
    (found,) = [f for f in diagnose(PAIR, machines("a", "b")).findings if f.code == "SHM" and f.host == "a"]
    assert found.title == "/dev/shm has 32768 MiB free, 64 MiB needed"
    found = next(f for f in diagnose(PAIR, machines("a", "b", shm=full)).findings if f.code == "SHM")
    assert found.title == "/dev/shm is too small"
    assert found.fix.startswith("mount -o remount,size=9g /dev/shm")


def test_a_dev_shm_without_a_limit_is_large_enough() -> None:  # statfs of tmpfs with size=0 tells zeros
    facts = machines("a", "b", shm=ShmFacts(device=1, size=0, free=0, writable=True))
    titles = [f.title for f in diagnose(PAIR, facts).findings if f.code == "SHM"]
    assert titles == ["/dev/shm has no limit, 64 MiB needed"] * 2


def test_this_machine_alone_has_no_cluster_checks() -> None:
    report = diagnose(None, {"here": host("here", model=model_folder(error="x"))})
    assert not {"MODEL", "PORT", "NET-ADDRESS", "PLAN", "ENGINE-FAULTS"} & {f.code for f in report.findings}
    assert report.groups == ()
    assert wrong(report) == []


def test_nothing_known_is_no_crash() -> None:
    spec: ClusterSpec = PAIR
    failures = {"a": ("x", "y"), "b": ("x", "y")}
    assert {f.host for f in diagnose(spec, {}, failures).findings if f.severity == "error"} == {"a", "b"}
    assert diagnose(None, {}).findings == ()


def test_the_page_of_a_sick_pair(golden: Callable[[str, str], None]) -> None:
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], name_resolves_to=("127.0.1.1",), engine=engine(vllm="0.31.0", tcmalloc=""))
    report = diagnose(PAIR, facts)
    assert [f.code for f in report.findings if f.severity == "error"] == ["ENGINE-PARITY"]  # not once more by PLAN
    golden("doctor.sick-pair.txt", report_page("cluster test, 2 hosts", report, facts).text())
    data = report_data(report, facts)
    assert set(data) == {"findings", "groups", "hosts"}


def test_the_catalogue_in_docs_is_the_codes(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/checks.md", catalogue_text())
