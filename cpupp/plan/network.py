"""The data plane: the address and the interface of every host, from the route to its peers.

Never loopback unless every host is this machine (pytorch #15592, gloo #223: a hostname that maps to 127.0.1.1), and
never a container bridge unless the user names it (DeepSpeed #2920). One concrete interface name a host: names may
differ by host, and gloo crashes on the `^lo` syntax (aws-do-eks #50).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cpupp.errors import CpuppError
from cpupp.plan.cluster import ClusterSpec, HostSpec
from cpupp.plan.facts import HostFacts, InterfaceFacts, PortFacts

_CONTAINER_BRIDGES = ("docker", "br-", "virbr", "cni", "podman", "lxcbr", "lxdbr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a host is on the data plane: its address, the interface that holds it (empty when unknown), and why."""

    address: str
    interface: str
    reason: str


def is_loopback(address: str) -> bool:
    """True for 127.0.0.0/8, ::1 and the name localhost; False for other names."""
    if address.lower() in ("localhost", "localhost.localdomain"):
        return True
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False


def url_host(address: str) -> str:
    """An address as it stands before a port: IPv6 in brackets (vllm #18986)."""
    return f"[{address}]" if ":" in address else address


def is_container_bridge(interface: str) -> bool:
    """True for the bridges that container and VM engines make; their addresses repeat on every host."""
    return interface.startswith(_CONTAINER_BRIDGES)


def everything_is_here(spec: ClusterSpec) -> bool:
    """True when every host of the file is the launcher's own machine (`local: true`)."""
    return all(host.local for host in spec.hosts)


def one_network(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> bool:
    """True when the facts show one kernel and one set of interfaces for all hosts (sshd on several local ports)."""
    views = {
        (fact.boot_id, tuple((i.name, i.addresses) for i in fact.interfaces if not i.loopback))
        for name, fact in facts.items()
    }
    return len(views) == 1 and all(host.name in facts for host in spec.hosts)


def best_address(interface: InterfaceFacts) -> str:
    """The address of an interface that peers can use: IPv4 before IPv6, never link-local; empty when there is none."""
    usable = [a for a in interface.addresses if not ipaddress.ip_address(a.split("%")[0]).is_link_local]
    return min(usable, key=lambda a: ":" in a, default="")


def candidate_address(host: HostSpec, fact: HostFacts) -> str:
    """Where the peers should look for a host before routes are known; empty for a local host without `address`."""
    if host.address is not None:
        return host.address
    holder = _interface_of(fact, fact.ssh_address)
    if fact.ssh_address and not is_loopback(fact.ssh_address) and not (holder and is_container_bridge(holder.name)):
        return fact.ssh_address
    return ""


def data_plane(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> dict[str, Endpoint]:
    """Choose the endpoint of every host that has facts; a host without facts gets what the file says, assumed.

    Raises CpuppError NET-ADDRESS or NET-INTERFACE when what the user named is not on that host, and NET-NO-ADDRESS when
    a host has no usable address.
    """
    return {host.name: _endpoint(spec, host, facts) for host in spec.hosts}


def _endpoint(spec: ClusterSpec, host: HostSpec, facts: Mapping[str, HostFacts]) -> Endpoint:
    fact = facts.get(host.name)
    if fact is None:
        return _assumed(spec, host)
    if spec.network.interface != "auto":
        return _named_interface(spec.network.interface, host, fact)
    if host.address is not None:
        return _named_address(host, fact)
    if everything_is_here(spec):
        return Endpoint(address="127.0.0.1", interface="lo", reason="every host is this machine")
    address = candidate_address(host, fact)
    holder = _interface_of(fact, address) if address else None
    if holder is not None:
        return Endpoint(address=address, interface=holder.name, reason="the address that SSH reached")
    for route in fact.routes:
        usable = route.source and not is_loopback(route.source) and not is_container_bridge(route.interface)
        if usable and route.peer != host.name:
            reason = f"the source address of the route to {route.peer}"
            return Endpoint(address=route.source, interface=route.interface, reason=reason)
    for interface in fact.interfaces:
        usable = interface.up and not interface.loopback and not is_container_bridge(interface.name)
        if usable and best_address(interface):
            reason = "the first interface that is up"
            return Endpoint(address=best_address(interface), interface=interface.name, reason=reason)
    if len(spec.hosts) == 1 or one_network(spec, facts):
        return Endpoint(address="127.0.0.1", interface="lo", reason="one machine, without another address")
    raise CpuppError(
        "NET-NO-ADDRESS",
        f"host {host.name}: no address that its peers could reach (interfaces: {_list(fact)})",
        hint=f"give hosts[{host.name}].address, or network.interface",
    )


def _assumed(spec: ClusterSpec, host: HostSpec) -> Endpoint:
    interface = "" if spec.network.interface == "auto" else spec.network.interface
    if everything_is_here(spec):
        return Endpoint(address=host.address or "127.0.0.1", interface=interface or "lo", reason="assumed")
    if host.address is not None:
        return Endpoint(address=host.address, interface=interface, reason="assumed from address")
    target = (host.ssh or "").rpartition("@")[2]
    name = target[1:].partition("]")[0] if target.startswith("[") else target.partition(":")[0]
    return Endpoint(address=name or f"<{host.name}>", interface=interface, reason="assumed from ssh")


def _named_interface(name: str, host: HostSpec, fact: HostFacts) -> Endpoint:
    interface = next((i for i in fact.interfaces if i.name == name), None)
    if interface is None or not best_address(interface):
        what = "does not exist" if interface is None else "has no address"
        raise CpuppError(
            "NET-INTERFACE",
            f"host {host.name}: interface {name!r} {what}; there: {_list(fact)}",
            hint="name an interface that every host has, or use `interface: auto` with hosts[].address",
        )
    address = host.address if host.address in interface.addresses else best_address(interface)
    assert address
    return Endpoint(address=address, interface=name, reason="network.interface")


def _named_address(host: HostSpec, fact: HostFacts) -> Endpoint:
    assert host.address is not None
    interface = _interface_of(fact, host.address)
    if interface is None:
        raise CpuppError(
            "NET-ADDRESS",
            f"host {host.name}: address {host.address} is on none of its interfaces; there: {_usable(fact)}",
            hint=f"gloo must bind the address on the host itself: give one of these as hosts[].address of {host.name}",
        )
    return Endpoint(address=host.address, interface=interface.name, reason="address of the cluster file")


def _interface_of(fact: HostFacts, address: str) -> InterfaceFacts | None:
    return next((i for i in fact.interfaces if address and address in i.addresses), None)


def _usable(fact: HostFacts) -> str:
    """The addresses that peers can reach, with their interfaces."""
    found = [(best_address(i), i.name) for i in fact.interfaces if i.up and not i.loopback]
    return ", ".join(f"{address} ({name})" for address, name in found if address) or _list(fact)


def _list(fact: HostFacts) -> str:
    return ", ".join(f"{i.name} ({', '.join(i.addresses) or 'no address'})" for i in fact.interfaces)


def address_errors(
    spec: ClusterSpec, endpoints: Mapping[str, Endpoint], facts: Mapping[str, HostFacts]
) -> list[CpuppError]:
    """Refuse one address on two machines (VMs behind NAT), and a master address that the head does not have."""
    errors = []
    seen: dict[str, str] = {}
    for name, endpoint in endpoints.items():
        first = seen.setdefault(endpoint.address, name)
        if name in facts and first in facts and facts[name].boot_id != facts[first].boot_id:
            message = f"hosts {first} and {name} are two machines, but both have {endpoint.address} ({endpoint.reason})"
            hint = "give hosts[].address: for each the address that the other reaches"
            errors.append(CpuppError("NET-SAME-ADDRESS", message, hint=hint))
    master, head = spec.network.master_addr, spec.hosts[0].name
    if master != "auto" and head in facts and _is_ip(master) and _interface_of(facts[head], master) is None:
        message = f"network.master_addr {master} is on no interface of the head {head}; there: {_list(facts[head])}"
        errors.append(CpuppError("NET-MASTER-ADDR", message, hint="leave master_addr out: cpupp finds it"))
    return errors


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def how_to_free(host: str, port: PortFacts) -> str:
    """What to do about the holder of a taken port: stop the run that it belongs to, else end the process."""
    found = re.match(r"pid (\d+)(?:.* of cpupp's run (\S+)$)?", port.holder)
    if found is None:
        return "stop that process"
    return f"cpupp stop {found[2]}" if found[2] else f"on {host}: kill {found[1]}"
