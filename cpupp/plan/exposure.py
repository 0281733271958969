"""What strangers could reach: the API without a key, and the data plane, which has no authentication of its own."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.network import Endpoint, is_container_bridge
from cpupp.plan.secret import has_api_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """One open door: the host, what is open, why it matters, and how to close it."""

    host: str
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"host {self.host}: {self.what}: {self.why}; {self.fix}"


def exposures(spec: ClusterSpec, endpoints: Mapping[str, Endpoint]) -> list[Exposure]:
    """Every open door that the cluster file and the addresses on the data plane show."""
    found = _api(spec)
    if len(spec.hosts) > 1:
        for name, endpoint in endpoints.items():
            found += _data_plane(name, endpoint)
    return found


def _api(spec: ClusterSpec) -> list[Exposure]:
    host, port = spec.serve.host, spec.serve.port
    everywhere = _is_unspecified(host)
    if has_api_key(spec) or not (everywhere or is_public(host)):
        return []
    where = "on all interfaces" if everywhere else f"on the public address {host}"
    return [
        Exposure(
            host=spec.hosts[0].name,
            what=f"the API listens {where} without a key",
            why=f"whoever reaches port {port} can use the model",
            fix="set `serve.api_key_env: NAME` (docs/security.md), or `serve.host: 127.0.0.1` behind a proxy or tunnel",
        )
    ]


def _data_plane(name: str, endpoint: Endpoint) -> list[Exposure]:
    if is_container_bridge(endpoint.interface):
        return [
            Exposure(
                host=name,
                what=f"{endpoint.address} is on {endpoint.interface}, a bridge of containers or VMs",
                why="such addresses repeat on every host and lead nowhere, and containers reach them",
                fix="set hosts[].address or network.interface to the network between the hosts",
            )
        ]
    if is_public(endpoint.address):
        return [
            Exposure(
                host=name,
                what=f"{endpoint.address} on the data plane is a public address",
                why="ranks neither encrypt nor authenticate, so whoever reaches it can read and run code there",
                fix="set hosts[].address to one of a private network or VPN, or let a firewall admit the hosts alone",
            )
        ]
    return []


def is_public(address: str) -> bool:
    """Whether an address is reachable from the internet as far as addresses go; False for names."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    except ValueError:
        return False


def _is_unspecified(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_unspecified
    except ValueError:
        return False
