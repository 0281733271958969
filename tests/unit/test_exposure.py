"""Doors that are open to strangers are warned of, with the way to close them; loopback and keys are left in peace."""

from __future__ import annotations

from typing import Any

import pytest

from cpupp.launch.config import load_cluster
from cpupp.plan.diagnose import diagnose
from cpupp.plan.exposure import exposures, is_public
from cpupp.plan.host_env import DROPPED_ENV, KEPT_ENV, passes
from cpupp.plan.network import data_plane
from cpupp.plan.plan import make_plan
from tests.unit.factory import cluster, host, interface, machines, one_machine

PUBLIC = "93.184.216.34"


def doors(spec: Any, facts: Any = None) -> list[str]:
    return [door.what for door in exposures(spec, data_plane(spec, facts or {}))]


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({}, ["the API listens on all interfaces without a key"]),
        ({"serve": {"host": "::"}}, ["the API listens on all interfaces without a key"]),
        ({"serve": {"host": PUBLIC}}, [f"the API listens on the public address {PUBLIC} without a key"]),
        ({"serve": {"host": "127.0.0.1"}}, []),
        ({"serve": {"host": "::1"}}, []),
        ({"serve": {"host": "localhost"}}, []),
        ({"serve": {"host": "10.0.0.1"}}, []),
        ({"serve": {"api_key_env": "K"}}, []),
        ({"engine": {"secrets": {"VLLM_API_KEY": "env"}}}, []),
        ({"engine": {"args": {"api-key": ["x"]}}}, []),
        ({"engine": {"args": {"api_key": ""}}}, ["the API listens on all interfaces without a key"]),
    ],
)
def test_the_api(sections: dict[str, Any], wanted: list[str]) -> None:
    assert doors(cluster("a", **sections)) == wanted


def test_a_public_data_plane() -> None:
    facts = {"a": host("a", 1, interfaces=(interface("eth0", PUBLIC),), ssh_address=PUBLIC), "b": host("b", 2)}
    spec = cluster("a", "b", pipeline=2, serve={"host": "127.0.0.1"})
    assert doors(spec, facts) == [f"{PUBLIC} on the data plane is a public address"]
    (text,) = [text for text in make_plan(spec, facts).warnings if PUBLIC in text]
    assert text.startswith("host a: ")
    assert "hosts[].address" in text
    (finding,) = [f for f in diagnose(spec, facts).findings if f.code == "EXPOSED"]
    assert (finding.severity, finding.host) == ("warning", "a")


def test_docker_s_address_on_the_data_plane() -> None:
    bridge = {"interfaces": (interface("docker0", "172.17.0.1"), interface("eth1", "10.0.0.1"))}
    spec = cluster({"name": "a", "address": "172.17.0.1"}, "b", pipeline=2, serve={"host": "127.0.0.1"})
    (what,) = doors(spec, {"a": host("a", 1, **bridge), "b": host("b", 2)})
    assert what.startswith("172.17.0.1 is on docker0")


def test_one_host_has_no_data_plane_to_close() -> None:
    facts = {"a": host("a", 1, interfaces=(interface("eth0", PUBLIC),), ssh_address=PUBLIC)}
    assert doors(cluster("a", serve={"host": "127.0.0.1"}), facts) == []


def test_private_networks_are_not_public() -> None:
    private = ("10.1.2.3", "192.168.0.1", "172.16.0.1", "100.64.0.1", "fd00::1", "fe80::1%eth0", "127.0.0.1", "host")
    assert [address for address in private if is_public(address)] == []
    assert is_public("2606:4700::1111")


def test_the_demo_does_not_nag() -> None:
    spec = load_cluster("examples/demo.yaml")
    warnings = make_plan(spec, one_machine("a", "b", ssh_address="")).warnings
    assert [text for text in warnings if "key" in text or "public" in text] == []


@pytest.mark.parametrize("name", ["PATH", "LC_ALL", "HF_HOME", "https_proxy", "KRB5CCNAME", "MALLOC_ARENA_MAX"])
def test_what_of_a_host_s_environment_passes(name: str) -> None:
    assert passes(name, (*KEPT_ENV, "KRB5CCNAME", "MALLOC_*"))


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "VLLM_X", "OMP_PLACES", "FOO", "PATHS"])
def test_what_does_not_pass(name: str) -> None:
    assert not passes(name, (*KEPT_ENV, "VLLM_*", "OMP_PLACES"))


def test_nothing_that_passes_is_forbidden() -> None:
    assert [name for name in KEPT_ENV if name.startswith(DROPPED_ENV)] == []


def test_doctor_tells_what_stays_behind() -> None:
    facts = machines("a")
    environment = {"HF_HOME": "/x", "HF_TOKEN": "(set)", "CONDA_SHLVL": "2"}
    facts["a"] = host("a", 1, environment=environment)
    found = [f for f in diagnose(cluster("a"), facts).findings if f.code == "ENVIRONMENT"]
    assert [(f.severity, f.evidence) for f in found] == [
        ("warning", "HF_TOKEN=(set) (dropped)"),
        ("ok", "CONDA_SHLVL"),
        ("ok", "HF_HOME: /x"),
    ]
