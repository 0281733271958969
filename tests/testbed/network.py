"""The network of a test bed: one bridge on this machine, one veth pair to each host."""

from __future__ import annotations

import ipaddress
import json
import random
import subprocess
from pathlib import Path

from tests.testbed.sweep import BRIDGE_PREFIX, VETH_PREFIX

CANDIDATES = ipaddress.ip_network("10.64.0.0/10")
FIRST_HOST = 11  # .1 is the bridge, that is: the launcher
# One full GSO packet and more; with less the kernel cuts packets, and the link gets slower than asked.
BURST_BYTES = 256 * 1024


def call(*argv: str) -> str:
    """Run a command to its end and return what it printed; raises with what it complained about."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(argv)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def free_subnet() -> ipaddress.IPv4Network:
    """A random private /24 that overlaps no address and no route of this machine."""
    used = [ipaddress.ip_network("127.0.0.0/8")]
    for link in json.loads(call("ip", "-4", "-json", "address", "show") or "[]"):
        for entry in link.get("addr_info", []):
            used.append(ipaddress.ip_network(f"{entry['local']}/{entry['prefixlen']}", strict=False))
    for route in json.loads(call("ip", "-4", "-json", "route", "show", "table", "all") or "[]"):
        if route["dst"] != "default":
            used.append(ipaddress.ip_network(route["dst"], strict=False))
    for _ in range(1000):
        start = int(CANDIDATES.network_address) + 256 * random.randrange(CANDIDATES.num_addresses // 256)
        subnet = ipaddress.IPv4Network((start, 24))
        if not any(subnet.overlaps(other) for other in used):
            return subnet
    raise RuntimeError(f"no free /24 in {CANDIDATES}")


class Bridge:
    """The switch of a bed. Its own address is where the launcher stands."""

    def __init__(self, bed_id: str) -> None:
        self.bed_id = bed_id
        self.name = f"{BRIDGE_PREFIX}{bed_id}"
        self.subnet = free_subnet()
        self.address = str(self.subnet[1])
        call("ip", "link", "add", self.name, "type", "bridge")
        call("ip", "address", "add", f"{self.address}/{self.subnet.prefixlen}", "dev", self.name)
        call("ip", "link", "set", self.name, "up")

    def plug(self, index: int, pid: int, interface: str) -> Link:
        """Connect the network namespace of process `pid`, where the link is called `interface`."""
        link = Link(self, f"{VETH_PREFIX}{self.bed_id}-{index}", interface, str(self.subnet[FIRST_HOST + index]))
        call("ip", "link", "add", link.name, "type", "veth", "peer", "name", interface, "netns", str(pid))
        link.up()
        return link


class Link:
    """The cable of one host; `name` is its end on this machine, `interface` its end in the host."""

    def __init__(self, bridge: Bridge, name: str, interface: str, address: str) -> None:
        self.bridge = bridge
        self.name = name
        self.interface = interface
        self.address = address

    def up(self) -> None:
        """Connect: undo `down` and `drop`."""
        call("ip", "link", "set", self.name, "master", self.bridge.name, "up")

    def down(self) -> None:
        """Pull the cable: the host sees that it has lost its carrier."""
        call("ip", "link", "set", self.name, "down")

    def drop(self) -> None:
        """Lose every packet, silently: to the host the link still looks up."""
        call("ip", "link", "set", self.name, "nomaster")

    def limit(self, rate: str) -> None:
        """Limit what the host receives to `rate` (as tc writes it, e.g. 100mbit)."""
        call(*tbf(self.name, rate))

    def bytes_sent(self) -> int:
        """Bytes that the host has sent, with all headers."""
        return self._count("rx_bytes")

    def bytes_received(self) -> int:
        """Bytes that the host has received, with all headers."""
        return self._count("tx_bytes")

    def _count(self, counter: str) -> int:
        # Seen from this end of the cable, so what the host sends is what we receive.
        return int(Path(f"/sys/class/net/{self.name}/statistics/{counter}").read_text(encoding="ascii"))


def tbf(interface: str, rate: str) -> list[str]:
    """The tc command that limits what leaves through `interface` to `rate`."""
    limit = ["rate", rate, "burst", str(BURST_BYTES), "latency", "50ms"]
    return ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", *limit]
