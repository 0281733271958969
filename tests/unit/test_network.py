"""Addresses and interfaces of the data plane."""

from __future__ import annotations

import pytest

from cpupp.errors import CpuppError
from cpupp.plan.facts import HostFacts
from cpupp.plan.network import Endpoint, best_address, data_plane, is_loopback, one_network
from cpupp.plan.plan import make_plan
from tests.unit.factory import cluster, host, interface, machines, port, route

PAIR = cluster("a", "b", pipeline=2)
LO = interface("lo", "127.0.0.1")


def where(found: dict[str, Endpoint]) -> dict[str, tuple[str, str]]:
    """Address and interface of each host."""
    return {name: (endpoint.address, endpoint.interface) for name, endpoint in found.items()}


def test_the_address_that_ssh_reached() -> None:
    assert where(data_plane(PAIR, machines("a", "b"))) == {"a": ("10.0.0.1", "eth0"), "b": ("10.0.0.2", "eth0")}


def test_a_name_that_maps_to_loopback_is_never_used() -> None:  # pytorch #15592, gloo #223
    facts = machines("a", "b", name_resolves_to=("127.0.1.1",))
    assert where(data_plane(PAIR, facts))["a"] == ("10.0.0.1", "eth0")


def test_interface_names_may_differ_by_host() -> None:  # vllm #7074
    facts = machines("a", "b")
    facts["b"] = host("b", 2, interfaces=(LO, interface("enp3s0", "10.0.0.2")))
    assert where(data_plane(PAIR, facts)) == {"a": ("10.0.0.1", "eth0"), "b": ("10.0.0.2", "enp3s0")}


def bridged(**changes: object) -> HostFacts:
    """A host that SSH reached by its docker bridge."""
    bridge, real = interface("docker0", "172.17.0.1"), interface("eth1", "10.0.0.1")
    return host("a", 1, interfaces=(LO, bridge, real), ssh_address="172.17.0.1", **changes)


def test_a_container_bridge_is_never_chosen() -> None:  # DeepSpeed #2920
    by_route = {"a": bridged(routes=(route("b", "10.0.0.2", "10.0.0.1", "eth1"),)), "b": host("b", 2)}
    assert where(data_plane(PAIR, by_route))["a"] == ("10.0.0.1", "eth1")
    by_interface = {"a": bridged(), "b": host("b", 2)}
    assert where(data_plane(PAIR, by_interface))["a"] == ("10.0.0.1", "eth1")


def test_a_bridge_that_the_user_names_is_taken_with_a_warning() -> None:
    spec = cluster({"name": "a", "address": "172.17.0.1"}, "b", pipeline=2)
    plan = make_plan(spec, {"a": bridged(), "b": host("b", 2)})
    assert plan.nodes[0].endpoint.interface == "docker0"
    assert any(text.startswith("host a: 172.17.0.1 is on docker0, a bridge of containers") for text in plan.warnings)


def test_ssh_and_data_address_may_differ() -> None:  # sparkrun #157
    spec = cluster({"name": "a", "ssh": "me@jump", "address": "192.168.0.1"}, "b", pipeline=2)
    facts = machines("a", "b")
    facts["a"] = host("a", 1, interfaces=(LO, interface("eth0", "10.0.0.1"), interface("ib0", "192.168.0.1")))
    assert where(data_plane(spec, facts))["a"] == ("192.168.0.1", "ib0")


def test_an_address_that_is_not_on_the_host() -> None:
    spec = cluster({"name": "a", "address": "1.2.3.4"}, "b", pipeline=2)
    with pytest.raises(CpuppError) as caught:
        data_plane(spec, machines("a", "b"))
    assert caught.value.message == ("host a: address 1.2.3.4 is on none of its interfaces; there: 10.0.0.1 (eth0)")


def test_a_named_interface_must_be_there() -> None:
    spec = cluster("a", "b", pipeline=2, network={"interface": "ib0"})
    with pytest.raises(CpuppError, match="host a: interface 'ib0' does not exist; there: lo"):
        data_plane(spec, machines("a", "b"))


def test_a_named_interface_gives_its_ipv4_address() -> None:
    spec = cluster("a", network={"interface": "ib0"})
    device = interface("ib0", "fe80::1", "fd00::1", "192.168.0.1")
    assert where(data_plane(spec, {"a": host("a", interfaces=(LO, device))}))["a"] == ("192.168.0.1", "ib0")


@pytest.mark.parametrize(
    ("addresses", "best"),
    [(("fe80::1",), ""), (("fe80::1%eth0", "fd00::1"), "fd00::1"), (("fd00::1", "10.0.0.1"), "10.0.0.1"), ((), "")],
)
def test_the_best_address_of_an_interface(addresses: tuple[str, ...], best: str) -> None:
    assert best_address(interface("x", *addresses)) == best


def test_everything_here_is_loopback() -> None:
    spec = cluster({"name": "a", "local": True}, {"name": "b", "local": True}, pipeline=2)
    assert where(data_plane(spec, machines("a", "b"))) == {"a": ("127.0.0.1", "lo"), "b": ("127.0.0.1", "lo")}


def test_two_sshds_of_one_machine_without_a_network() -> None:
    facts = {name: host(name, 1, interfaces=(LO,), ssh_address="127.0.0.1") for name in ("a", "b")}
    assert one_network(PAIR, facts)
    assert where(data_plane(PAIR, facts))["b"] == ("127.0.0.1", "lo")


def test_a_host_without_an_address() -> None:
    facts = {"a": host("a", 1), "b": host("b", 2, interfaces=(LO,), ssh_address="127.0.0.1")}
    with pytest.raises(CpuppError, match=r"host b: no address that its peers could reach \(interfaces: lo"):
        data_plane(PAIR, facts)


def test_one_address_on_two_machines_is_refused() -> None:  # VMs behind NAT are all 10.0.2.15
    device = interface("eth0", "10.0.2.15")
    facts = {n: host(n, i, interfaces=(LO, device), ssh_address="10.0.2.15") for i, n in ((1, "a"), (2, "b"))}
    with pytest.raises(CpuppError, match=r"hosts a and b are two machines, but both have 10\.0\.2\.15"):
        make_plan(PAIR, facts)


def test_a_master_address_that_the_head_does_not_have() -> None:
    spec = cluster("a", "b", pipeline=2, network={"master_addr": "10.9.9.9"})
    with pytest.raises(CpuppError, match=r"network\.master_addr 10\.9\.9\.9 is on no interface of the head a"):
        make_plan(spec, machines("a", "b"))


def test_a_taken_port_names_its_holder() -> None:  # vllm #39015
    facts = {"a": host("a", ports=(port(8000, holder="pid 12 (nginx)"),))}
    with pytest.raises(CpuppError) as caught:
        make_plan(cluster("a"), facts)
    assert str(caught.value) == "host a: serve.port 8000 is taken by pid 12 (nginx)"
    assert caught.value.hint == "on a: kill 12, or choose another serve.port"
    facts = {"a": host("a", ports=(port(8000, holder="pid 12 (python3) of cpupp's run brave-owl"),))}
    with pytest.raises(CpuppError) as caught:
        make_plan(cluster("a"), facts)
    assert caught.value.hint == "cpupp stop brave-owl, or choose another serve.port"


def test_an_address_to_serve_on_that_the_head_does_not_have() -> None:
    spec = cluster("a", "b", pipeline=2, serve={"host": "10.0.0.2"})
    with pytest.raises(CpuppError, match=r"host a: serve\.host 10\.0\.0\.2 is no address of this host"):
        make_plan(spec, machines("a", "b"))
    for good in ("10.0.0.1", "0.0.0.0", "::", "127.0.0.1", "serving.example.org"):
        make_plan(cluster("a", "b", pipeline=2, serve={"host": good}), machines("a", "b"))


def test_auto_takes_a_free_port_of_the_head() -> None:
    assert make_plan(PAIR, machines("a", "b")).master_port == 21000
    spec = cluster("a", "b", pipeline=2, serve={"port": 21000})
    facts = machines("a", "b", ports=(port(21000),))
    assert make_plan(spec, facts).master_port == 21001


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "LOCALHOST"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "node1", "::", "0.0.0.0"])
def test_no_loopback(address: str) -> None:
    assert not is_loopback(address)
