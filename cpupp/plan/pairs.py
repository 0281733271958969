"""PairFacts: the way from one host to another as knocking and measuring found it; and who measures when. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cpupp.plan.facts import HostFacts
from cpupp.plan.network import Endpoint

STREAM_S = 0.4
SHORTEST_STREAM_S = 0.08
MEASURE_BUDGET_S = 6.0
ROUND_OVERHEAD_S = 0.15
"""Of one round beside its two streams: round trips of the latency, connections, the request itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortReach:
    """One port that was knocked at. kind: `master` or `high` (one that the kernel chose, as gloo's are).

    state: `open`, `refused`, `dropped`, `unreachable`, `silent`, `stranger`, `wrong-host` or `stalled` (see
    rank/agent_pairs.py); detail: in the host's own words, the host that answered, or what stalled.
    """

    port: int
    kind: str
    state: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """The way from `src` to `dst`, names of the cluster file; `address` is that of `dst` on the data plane.

    firewall: of `dst` (rank/agent_firewall.py); master_taken: who holds the master port on `dst`, so that nobody could
    knock there; mtu: the kernel's path MTU, 0 when unknown; passes: largest packet (bytes) that arrives where large
    ones stall, 0 when none stall or none of the usual sizes arrives; latency_s, jitter_s: median round trip of small
    messages, and what its 90th percentile is above that; bytes_per_s: of one TCP stream from src to dst. None: not
    measured.
    """

    src: str
    dst: str
    address: str
    ports: tuple[PortReach, ...]
    firewall: str
    master_taken: str
    mtu: int
    passes: int
    latency_s: float | None
    jitter_s: float | None
    bytes_per_s: float | None

    def blocked(self, kind: str) -> PortReach | None:
        """The first port of this kind through which peers cannot talk; None when all can."""
        return next((port for port in self.ports if port.kind == kind and port.state != "open"), None)

    @property
    def open_port(self) -> int | None:
        """A port of the kernel's choice that is open, for measuring."""
        return next((port.port for port in self.ports if port.kind == "high" and port.state == "open"), None)


def distinct(endpoints: Mapping[str, Endpoint], names: Iterable[str]) -> dict[str, str]:
    """Return host -> address of those that can be paired: of entries with one address (one machine) the first."""
    found: dict[str, str] = {}
    for name in names:
        address = endpoints[name].address
        if address not in found.values():
            found[name] = address
    return found


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in as few rounds as possible, and in a round no host twice (a round-robin tournament)."""
    places: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    made = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        duels = zip(places[:half], reversed(places[half:]), strict=True)
        made.append([(one, two) for one, two in duels if one is not None and two is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return made


def stream_seconds(left_s: float, num_rounds: int) -> float:
    """Seconds of one stream, of two in each of the rounds to come, so that all end within `left_s`."""
    share = (left_s / max(1, num_rounds) - ROUND_OVERHEAD_S) / 2
    return min(STREAM_S, max(SHORTEST_STREAM_S, share))


def network_of(fact: HostFacts, address: str) -> str:
    """The subnet of an address of this host, as `10.0.0.0/24`; empty when the host does not hold it."""
    for interface in fact.interfaces:
        for own, prefix in zip(interface.addresses, interface.prefixes, strict=True):
            if own == address and prefix:
                return str(ipaddress.ip_network(f"{own.partition('%')[0]}/{prefix}", strict=False))
    return ""
