"""doctor on real hosts: each fault is made there, found there, and not found on the host beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cpupp.launch.examine import Examination
from cpupp.launch.probe import probe_all
from cpupp.launch.session import AgentSession, open_sessions, run_all
from cpupp.launch.transport import LocalTransport
from cpupp.plan.checks import CHECKS
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.diagnose import Report, diagnose
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Finding
from cpupp.plan.health import LeftoverFacts
from cpupp.plan.selection import needs_of
from tests.testbed.bed import Bed, Host, HostOptions, hosts
from tests.testbed.fake_engine import make_engine, make_model
from tests.testbed.models import ROOT

STALE = 'import sys,time;time.sleep(600);"vllm.entrypoints.cli.main"'
HOLD = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print(1, flush=True)
time.sleep(600)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Two hosts; b has another name for itself, variables of its own, few files, and a /dev/shm of 64 MiB."""

    bed: Bed
    spec: ClusterSpec
    sessions: dict[str, AgentSession]
    facts: dict[str, HostFacts]
    folder: Path

    def examination(self, spec: ClusterSpec | None = None) -> Examination:
        """What measures, with the facts of the beginning."""
        return Examination(spec or self.spec, self.sessions, self.facts, lambda _: None)

    def report(self, *codes: str, spec: ClusterSpec | None = None, probed: bool = False) -> Report:
        """Diagnose with these checks. probed: with facts of this moment, not of the beginning."""
        spec, facts = spec or self.spec, self.facts
        if probed:
            facts, errors = probe_all(spec, self.sessions)
            assert errors == []
        examination = Examination(spec, self.sessions, facts, lambda _: None)
        measured = examination.measure(needs_of(CHECKS, codes) - {"vllm"}, with_file=True)
        assert examination.failures == {}
        return diagnose(spec, facts, {}, codes, **measured)

    def found(self, *codes: str, spec: ClusterSpec | None = None, probed: bool = False) -> dict[str, Finding]:
        """What is not in order, by host."""
        return {f.host: f for f in self.report(*codes, spec=spec, probed=probed).findings if f.severity != "ok"}

    def changed(self, **b: Any) -> ClusterSpec:
        """The cluster with other keys for b."""
        data = self.spec.model_dump(exclude_defaults=True)
        data["hosts"][1].update(b)
        return ClusterSpec.model_validate(data)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix="cpupp-doctor-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        python = make_engine(folder / "engine")
        model = make_model(folder / "model")
        shutil.copytree(model, folder / "other")
        sick = HostOptions(
            shm_size="16m",
            env={"GLOO_SOCKET_IFNAME": "^lo,docker0", "VLLM_PORT": "5000", "HF_HOME": "/hub"},
        )
        with hosts(HostOptions(), sick) as bed:
            two_machines(bed)
            data = {
                "name": "sick",
                "model": {"path": str(model)},
                "parallel": {"pipeline": 2},
                "engine": {"python": python},
                "hosts": [{"name": host.name, "ssh": host.ssh} for host in bed],
            }
            spec = ClusterSpec.model_validate(data)
            sessions = open_sessions(spec, ssh_config=bed.ssh_config)
            try:
                facts, errors = probe_all(spec, sessions)
                assert errors == []
                yield Place(bed=bed, spec=spec, sessions=sessions, facts=facts, folder=folder)
            finally:
                run_all({name: session.close for name, session in sessions.items()})
    finally:
        shutil.rmtree(folder)


def two_machines(bed: Bed) -> None:
    """Give b a boot id of its own, and map a's name to its address; b's is loopback, as Debian has it."""
    a, b = bed
    boot_id = b.folder / "boot_id"
    boot_id.write_text("11111111-2222-3333-4444-555555555555\n", encoding="ascii")
    b.run(["mount", "--bind", str(boot_id), "/proc/sys/kernel/random/boot_id"])
    (a.folder / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{a.address} host-a\n", encoding="utf-8")


def leave(host: Host, name: str, size: int = 1 << 20, uid: int = 0) -> Path:
    """A file in the host's /dev/shm that was written an hour ago."""
    path = host.path(f"/dev/shm/{name}")
    path.write_bytes(bytes(size))
    os.chown(path, uid, uid)
    an_hour_ago = time.time() - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    return path


def leftovers(place: Place, host: Host) -> dict[str, LeftoverFacts]:
    """What the host says of its /dev/shm, by name."""
    told = place.examination().measure({"health"}, with_file=True)["health"]
    return {entry.name: entry for entry in told[host.name].leftovers}


def test_what_is_wrong_with_b_and_not_with_a(place: Place) -> None:
    codes = (
        "SHM",
        "ENVIRONMENT",
        "NET-LOOPBACK-NAME",
        "CPU-SET",
        "CLOCK",
        "MODEL-PARITY",
        "MODEL-FILES",
        "PRELOAD-LOAD",
    )
    report = place.report(*codes)
    bad = {(f.code, f.host) for f in report.findings if f.severity in ("error", "warning")}
    assert bad == {("SHM", "b"), ("ENVIRONMENT", "b"), ("NET-LOOPBACK-NAME", "b")}
    (found,) = [f for f in report.findings if f.code == "ENVIRONMENT" and f.severity == "warning"]
    assert found.evidence == "GLOO_SOCKET_IFNAME=^lo,docker0 (the plan sets eth0), VLLM_PORT=5000 (dropped)"
    if len(os.sched_getaffinity(0)) > 1:
        assert {f.host: f.severity for f in report.findings if f.code == "CPU-SET"} == {"a": "info", "b": "info"}
    follow_loopback_fix(place, next(f.fix for f in report.findings if f.code == "NET-LOOPBACK-NAME" and f.host == "b"))
    assert place.found("NET-LOOPBACK-NAME", probed=True) == {}


def follow_loopback_fix(place: Place, fix: str) -> None:
    """Do to b's /etc/hosts what the fix says: its line in, every other line with that name out."""
    b = place.bed[1]
    line, _, rest = fix.partition("in /etc/hosts of b: `")[2].partition("`")
    assert rest == ", and no other line with that name"
    kept = [old for old in b.run(["cat", "/etc/hosts"]).stdout.splitlines() if line.split()[1] not in old.split()]
    b.run(["tee", "/etc/hosts"], stdin="\n".join([*kept, line, ""]))


def test_dev_shm_that_runs_no_code_or_cannot_be_written(place: Place) -> None:
    _, b = place.bed
    assert place.found("SHM-MOUNT") == {}
    b.run(["mount", "-o", "remount,noexec", "/dev/shm"])
    try:
        found = place.found("SHM-MOUNT")
        assert {name: f.severity for name, f in found.items()} == {"b": "info"}
        b.run(["mount", "-o", "remount,ro", "/dev/shm"])
        assert {name: f.severity for name, f in place.found("SHM-MOUNT").items()} == {"b": "error"}
        assert place.found("SHM", probed=True)["b"].title == "/dev/shm is not writable"
    finally:
        b.run(["mount", "-o", "remount,rw,exec", "/dev/shm"])
    assert place.found("SHM-MOUNT") == {}


def test_only_dead_leftovers_of_this_user_are_removed(place: Place) -> None:
    _, b = place.bed
    names = ("psm_dead", "psm_mapped", "psm_others", "my-data", "psm_young")
    paths = {name: leave(b, name, uid=4243 if name == "psm_others" else 0) for name in names}
    paths["psm_young"].touch()
    holder = b.popen([sys.executable, "-c", HOLD, "/dev/shm/psm_mapped"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        states = {name: entry.state for name, entry in leftovers(place, b).items()}
        assert states == {"psm_dead": "dead", "psm_mapped": "alive", "psm_others": "dead", "psm_young": "alive"}
        found = place.report("SHM-LEFTOVERS").findings
        assert [(f.severity, f.host) for f in found if f.severity != "ok"] == [("warning", "b"), ("info", "b")]
        assert "psm_dead (1.0 MiB, 60 min old, root)" in next(f for f in found if f.severity == "warning").evidence
        removed = place.examination().clean()
        assert removed == {"a": [], "b": [{"name": "psm_dead", "size": 1 << 20}]}
        assert {name for name, path in paths.items() if path.exists()} == set(names) - {"psm_dead"}
    finally:
        holder.kill()
        holder.communicate()
        for path in paths.values():
            path.unlink(missing_ok=True)
    assert place.found("SHM-LEFTOVERS") == {}


def test_a_stale_vllm_is_told_with_its_pid_and_lives_on(place: Place) -> None:
    _, b = place.bed
    stale = b.popen([sys.executable, "-c", STALE])
    try:
        measured = place.examination().measure({"health"}, with_file=True)
        (found,) = [p for p in measured["health"]["b"].processes if p.pid == stale.pid]
        assert (found.kind, found.run, found.owner) == ("vllm", "", "root")
        report = diagnose(place.spec, place.facts, {}, ("PROCESSES",), **measured)
        assert any(str(stale.pid) in f.fix for f in report.findings if f.host == "b" and f.severity == "warning")
        assert stale.poll() is None
    finally:
        stale.kill()
        stale.wait()


def test_a_library_is_tried_where_it_is_preloaded(place: Place) -> None:
    broken = place.bed[1].path("/tmp/libbroken.so")
    broken.write_bytes(b"\x7fELF\x02")
    for path, words in (
        ("/tmp/libbroken.so", "cannot be read"),
        ("/elsewhere/libx.so", "cannot open shared object file"),
    ):
        found = place.found("PRELOAD-LOAD", spec=place.changed(engine={"env": {"LD_PRELOAD": path}}))
        assert set(found) == {"b"}
        assert found["b"].severity == "error"
        assert found["b"].evidence.startswith(f"LD_PRELOAD={path}: ")
        assert words in found["b"].evidence or path == "/tmp/libbroken.so"
    assert place.found("PRELOAD-LOAD") == {}


def test_another_snapshot_is_named_by_its_files(place: Place) -> None:
    model = place.folder / "model"
    place.bed[1].run(["mount", "--bind", str(place.folder / "other"), str(model)])
    try:
        assert place.found("MODEL-PARITY", "MODEL-FILES") == {}
        other = place.folder / "other"
        (other / "tokenizer.json").write_text('{"a": 1}', encoding="utf-8")
        assert place.found("MODEL-PARITY", "MODEL-FILES")[""].code == "MODEL-FILES"
        text = (other / "config.json").read_text(encoding="utf-8")
        (other / "config.json").write_text(text.replace("512", "256"), encoding="utf-8")
        (found,) = [f for f in place.report("MODEL-PARITY", probed=True).findings if f.severity == "error"]
        assert found.evidence.startswith("config.json (a: ")
    finally:
        place.bed[1].run(["umount", str(model)])


def test_the_command_shows_errors_first_and_measures_only_what_is_chosen(place: Place) -> None:
    file = place.folder / "sick.yaml"
    file.write_text(json.dumps(place.spec.model_dump(exclude_defaults=True, mode="json")), encoding="utf-8")

    def doctor(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "cpupp", "doctor", *words]
        return subprocess.run(
            argv, capture_output=True, text=True, cwd=ROOT, env=place.bed.env, timeout=120, check=False
        )

    leave(place.bed[1], "psm_old")
    done = doctor(str(file), "--skip", "ENGINE-FLAGS,ENGINE-ARCHITECTURE", "--clean")
    assert done.returncode == 4
    assert done.stdout.index("Errors") < done.stdout.index("Warnings") < done.stdout.index("In order")
    assert "SHM  b: /dev/shm is too small" in done.stdout
    assert "psm_old  1048576 bytes" in done.stdout
    assert place.bed[1].shm() == []
    done = doctor(str(file), "--only", "CLOCK", "--json")
    assert done.returncode == 0
    assert {f["code"] for f in json.loads(done.stdout)["data"]["findings"]} == {"CLOCK"}
    done = doctor(str(file), "--only", "CLOKC")
    assert done.returncode == 2
    assert "did you mean CLOCK" in done.stderr


def test_vllm_itself_is_asked() -> None:
    flags = ["--nnodes", "--max-model-len", "--no-enable-prefix-caching", "--headless", "--turbo"]
    order = {"python": sys.executable, "flags": flags, "architectures": ["LlamaForCausalLM", "NoSuchForCausalLM"]}
    with AgentSession("here", LocalTransport()) as session:
        answer = session.request("ask_vllm", timeout=180, **order)
    assert answer == {
        "unknown_flags": ["--turbo"],
        "architectures": {"LlamaForCausalLM": "pipeline", "NoSuchForCausalLM": "absent"},
        "error": "",
    }
