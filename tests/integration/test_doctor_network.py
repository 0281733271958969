"""doctor's network checks on real hosts: every fault is found with its code and its pair, and not on a healthy pair."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from cpupp.launch.pairs import measure_pairs
from cpupp.launch.probe import probe_hosts
from cpupp.launch.session import AgentSession, open_session, open_sessions, run_all
from cpupp.plan.checks import CHECKS
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.diagnose import Report, diagnose
from cpupp.plan.pairs import PairFacts
from cpupp.plan.selection import chosen_codes
from tests.testbed.bed import Bed, Host, hosts
from tests.testbed.need import need_tool
from tests.testbed.network import tbf

MASTER = 29555
NET = chosen_codes(CHECKS, ["NET"], ())
INPUT = "add table inet filter; add chain inet filter input { type filter hook input priority 0; }"
HIGH_PORTS = "tcp dport 32768-60999 ct state new"
"""A stateful firewall's view of what comes in to ports that the kernel chooses."""


class Place:
    """Three hosts with an open session each, and what a doctor finds of them."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        entries = [{"name": host.name, "ssh": host.name} for host in bed]
        self.spec = ClusterSpec.model_validate(
            {
                "name": "net",
                "model": {"path": "/none"},
                "parallel": {"pipeline": len(entries)},
                "engine": {"python": sys.executable},
                "hosts": entries,
                "network": {"master_port": MASTER},
            }
        )
        self.sessions: dict[str, AgentSession] = open_sessions(self.spec, ssh_config=bed.ssh_config)

        self.facts = probe_hosts(self.spec, self.sessions)

    def reopen(self, name: str) -> None:
        """A new session, for a connection that begins anew."""
        (host,) = (host for host in self.spec.hosts if host.name == name)
        self.sessions[name] = open_session(host, 30.0, ssh_config=self.bed.ssh_config)

    def look(self) -> tuple[Report, dict[tuple[str, str], PairFacts]]:
        """What is found, and the ways by (src, dst)."""
        pairs, errors = measure_pairs(self.spec, self.sessions, self.facts)
        assert errors == []
        return diagnose(self.spec, self.facts, codes=NET, pairs=pairs), {(pair.src, pair.dst): pair for pair in pairs}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    need_tool("nft", "ss")
    with hosts(3) as bed:
        made = Place(bed)
        try:
            yield made
        finally:
            run_all({name: session.close for name, session in made.sessions.items()})


@contextlib.contextmanager
def rules(host: Host, *lines: str) -> Iterator[None]:
    """nftables rules on a host, for a while."""
    host.run(["nft", "-f", "-"], stdin="\n".join(lines) + "\n")
    try:
        yield
    finally:
        host.run(["nft", "flush", "ruleset"])


def wrong(report: Report) -> list[tuple[str, str, str]]:
    """Severity, code and host of what is not in order."""
    return [(f.severity, f.code, f.host) for f in report.findings if f.severity not in ("ok", "info")]


def states(pair: PairFacts) -> list[tuple[str, str]]:
    return [(port.kind, port.state) for port in pair.ports]


def listening(host: Host) -> list[str]:
    """Addresses that somebody on the host listens at, its sshd left out."""
    lines = host.run(["ss", "-Htln"]).stdout.splitlines()
    return [address for line in lines if not (address := line.split()[3]).endswith(":22")]


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


OPEN = [("master", "open"), ("high", "open"), ("high", "open")]


def test_healthy_hosts_are_in_order_measured_and_closed_again(place: Place) -> None:
    report, ways = place.look()
    assert len(ways) == 6
    assert {tuple(states(pair)) for pair in ways.values()} == {tuple(OPEN)}
    for pair in ways.values():
        assert pair.latency_s is not None
        assert pair.jitter_s is not None
        assert 0 < pair.latency_s < 0.1
        assert (pair.bytes_per_s or 0) > 1e6
        assert pair.mtu == 1500
    assert [found for found in wrong(report) if found[1] != "NET-SPEED"] == []  # other tests may load this machine
    assert {"NET-PORTS", "NET-MTU", "NET-FAMILY", "NET-SUBNET"} <= {f.code for f in report.findings}
    assert [listening(host) for host in place.bed] == [[], [], []]  # the sessions are open still


@pytest.mark.parametrize(
    ("verdict", "state"), [("drop", "dropped"), ("reject with tcp reset", "refused"), ("reject", "refused")]
)
def test_only_the_master_port_is_open(place: Place, verdict: str, state: str) -> None:  # pytorch #44544
    _, b, _ = place.bed
    with rules(b, INPUT, f"add rule inet filter input {HIGH_PORTS} {verdict}"):
        report, ways = place.look()
        assert (
            states(ways["a", "b"]) == states(ways["c", "b"]) == [("master", "open"), ("high", state), ("high", state)]
        )
        assert states(ways["b", "a"]) == states(ways["a", "c"]) == OPEN
        assert [found for found in wrong(report) if found[1] == "NET-PORTS"] == [("error", "NET-PORTS", "b")]
        (finding,) = (f for f in report.findings if f.severity == "error")
        assert finding.title == (
            f"connections from a, c to the ports that ranks choose (its master port is open) are {state}"
        )
        if verdict != "drop":
            return
        command = finding.fix.removeprefix("on b, until its next reboot: ")
        assert "nft 'insert rule inet filter input ip saddr { 10." in command
        b.run(["sh", "-c", command])  # the printed fix is one
        report, ways = place.look()
        assert states(ways["a", "b"]) == OPEN
        assert [f for f in report.findings if f.severity == "error"] == []


def test_a_firewall_of_the_head_on_the_master_port(place: Place) -> None:
    with rules(
        place.bed[0], INPUT, f"add rule inet filter input tcp dport {MASTER} reject with icmpx admin-prohibited"
    ):
        report, ways = place.look()
    assert states(ways["b", "a"])[0] == ("master", "unreachable")
    (finding,) = (f for f in report.findings if f.severity == "error")
    assert (finding.code, finding.host) == ("NET-PORTS", "a")
    assert finding.title == f"connections from b, c to the master port {MASTER} are unreachable"


def test_another_host_and_a_stranger_answer(place: Place) -> None:
    a, b, c = place.bed
    code = "import socket\ns = socket.create_server(('', 4444))\nwhile 1: s.accept()[0].sendall(b'220 hello there\\n')"
    stranger = c.popen([sys.executable, "-c", code])
    chain = "add table ip nat; add chain ip nat output { type nat hook output priority -100; }"
    translate = f"add rule ip nat output tcp dport {MASTER} ip daddr"
    to_c, to_stranger = (
        f"{translate} {a.address} dnat to {c.address}",
        f"{translate} {c.address} dnat to {c.address}:4444",
    )
    try:
        wait_until(lambda: listening(c) != [])
        with rules(b, chain, to_c, to_stranger):
            report, ways = place.look()
    finally:
        stranger.kill()
        stranger.wait()
    assert (ways["b", "a"].ports[0].state, ways["b", "a"].ports[0].detail) == ("wrong-host", "c")
    assert ways["b", "c"].ports[0].state == "stranger"
    assert states(ways["c", "a"]) == states(ways["a", "c"]) == OPEN
    (finding,) = (f for f in report.findings if f.severity == "error")
    assert (finding.code, finding.host) == ("NET-PORTS", "a")
    assert finding.title == f"connections from b to the master port {MASTER} are answered by the wrong host"


def test_large_packets_vanish(place: Place) -> None:
    _, b, _ = place.bed
    chain = "add table inet t; add chain inet t out { type filter hook output priority 0; }"
    b.run(["ip", "link", "set", "dev", b.interface, "gso_max_segs", "1"])  # packets as they are on a cable
    with rules(
        b, chain, "add rule inet t out meta l4proto tcp tcp dport != 22 tcp sport != 22 meta length gt 1300 drop"
    ):
        report, ways = place.look()
        assert ("high", "stalled") in states(ways["b", "a"])
        assert ways["b", "a"].passes == 1280
        assert states(ways["a", "c"]) == OPEN
        assert wrong(report).count(("error", "NET-MTU", "b")) == 2  # to a and to c
        assert {found[1] for found in wrong(report) if found[0] == "error"} == {"NET-MTU"}
        finding = next(f for f in report.findings if f.code == "NET-MTU" and f.severity == "error")
        assert "packets of up to 1280 bytes arrive" in finding.evidence
        assert f"on b, until its next reboot: ip link set dev {b.interface} mtu 1280" in finding.fix
        place.sessions["b"].close()
        b.run(["ip", "link", "set", "dev", b.interface, "mtu", "1280"])
        place.reopen("b")
        before, place.facts = place.facts, probe_hosts(place.spec, place.sessions)
        report, ways = place.look()
    place.facts = before
    b.run(["ip", "link", "set", "dev", b.interface, "mtu", "1500"])
    b.run(["ip", "link", "set", "dev", b.interface, "gso_max_segs", "65535"])
    assert states(ways["b", "a"]) == states(ways["a", "b"]) == OPEN
    assert [found for found in wrong(report) if found[1] == "NET-MTU"] == [("warning", "NET-MTU", "")]


def test_a_slow_link_and_a_taken_master_port_are_named(place: Place) -> None:  # vllm #39015
    _, b, _ = place.bed
    code = f"import socket,time; s = socket.create_server(('', {MASTER})); time.sleep(60)"
    holder = b.popen([sys.executable, "-c", code])
    subprocess.run(tbf(b.link.name, "20mbit"), check=True)  # what b receives
    try:
        wait_until(lambda: listening(b) != [])
        report, ways = place.look()
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", b.link.name, "root"], check=True)
        holder.kill()
        holder.wait()
    assert 2e5 < (ways["a", "b"].bytes_per_s or 0) < 4e6  # slower still where the machine is busy
    assert (ways["a", "c"].bytes_per_s or 0) > 1e7
    slow = [f for f in report.findings if f.code == "NET-SPEED" and f.title.startswith("the way to b is slow")]
    assert {f.host for f in slow} == {"a", "c"}
    assert ways["a", "b"].master_taken.startswith(f"pid {holder.pid} (python")
    assert states(ways["a", "b"]) == OPEN[1:]
    assert [f for f in report.findings if f.severity == "error"] == []  # only the head needs it


def test_a_stranger_learns_nothing_and_doors_close_by_themselves(place: Place) -> None:
    a, b, _ = place.bed
    place.sessions["a"].request(
        "doors_open", name="a", key="k", address=a.address, ports=[MASTER], num_high=1, seconds=2
    )
    assert {address.rpartition(":")[0] for address in listening(a)} == {a.address}
    code = (
        "import socket,sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])));"
        "s.sendall(b'cpupp-pair 1 2\\n'); print(s.recv(100))"
    )
    assert b.run([sys.executable, "-c", code, a.address, str(MASTER)], check=False).stdout.strip() in ("b''", "")
    wait_until(lambda: listening(a) == [], 10)


def test_doors_on_ipv6(place: Place) -> None:  # vllm #18986
    a, b, _ = place.bed
    for index, host in enumerate((a, b), 1):
        host.run(["ip", "address", "add", f"fd00:77::{index}/64", "dev", host.interface, "nodad"])
    session = place.sessions["a"]
    door = session.request("doors_open", name="a", key="k", address="fd00:77::1", ports=[], num_high=1, seconds=9)
    (port,) = door["high"]
    target = {"peer": "a", "address": "fd00:77::1", "ports": [port], "block": port}
    (row,) = place.sessions["b"].request("pairs_reach", key="k", targets=[target])
    assert (row["state"], row["mtu"]) == ("open", 1500)
    (row,) = place.sessions["b"].request("pairs_reach", key="another", targets=[target])
    assert row["state"] == "stranger"  # no key, no answer
    session.request("doors_close")
    (row,) = place.sessions["b"].request("pairs_reach", key="k", targets=[target])
    assert row["state"] == "refused"
