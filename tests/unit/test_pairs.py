"""The ways between hosts: who measures when, what is closed, what a token costs, how it is shown."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from cpupp.plan.checks import CHECKS
from cpupp.plan.diagnose import diagnose
from cpupp.plan.findings import Finding
from cpupp.plan.firewall import admit
from cpupp.plan.model import model_facts
from cpupp.plan.network import Endpoint
from cpupp.plan.pairs import PairFacts, PortReach, distinct, network_of, rounds, stream_seconds
from cpupp.plan.selection import chosen_codes
from cpupp.plan.traffic import token_seconds, traffic_of
from cpupp.render import Page
from cpupp.render_pairs import add_pairs
from tests.unit.factory import LLAMA_70B, cluster, host, interface, machines, model_folder

NET = chosen_codes(CHECKS, ["NET"], ())
MASTER = 29500


def pair(
    src: str, dst: str, *, master: str = "open", high: str = "open", detail: str = "", **changes: Any
) -> PairFacts:
    """A way over 10.0.0.x (host a is .1) with the given states of its ports."""
    ports = (
        PortReach(port=MASTER, kind="master", state=master, detail=""),
        PortReach(port=40000, kind="high", state=high, detail=detail),
        PortReach(port=40001, kind="high", state="open" if high == "stalled" else high, detail=""),
    )
    fields: dict[str, Any] = {
        "address": f"10.0.0.{ord(dst) - 96}",
        "firewall": "",
        "master_taken": "",
        "mtu": 1500,
        "passes": 0,
        "latency_s": 0.0001,
        "jitter_s": 0.00001,
        "bytes_per_s": 1.25e9,
    }
    return PairFacts(src=src, dst=dst, ports=ports, **{**fields, **changes})


def all_ways(names: str, changed: dict[str, dict[str, Any]] | None = None) -> tuple[PairFacts, ...]:
    """Every way between hosts a, b, ...; changed: `ab` -> fields of the way from a to b."""
    ways = [(src, dst) for src in names for dst in names if src != dst]
    return tuple(pair(src, dst, **(changed or {}).get(src + dst, {})) for src, dst in ways)


def found(names: str, changed: dict[str, dict[str, Any]], **options: Any) -> list[Finding]:
    """Errors and warnings of the network checks."""
    spec = cluster(*names, pipeline=len(names))
    report = diagnose(spec, machines(*names, **options), codes=NET, pairs=all_ways(names, changed))
    return [f for f in report.findings if f.severity in ("error", "warning")]


@pytest.mark.parametrize("num", [2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_no_host_is_in_two_measurements(num: int) -> None:
    names = [f"h{i}" for i in range(num)]
    made = rounds(names)
    assert len(made) == num - 1 + num % 2
    assert all(len({name for duel in duels for name in duel}) == 2 * len(duels) for duels in made)
    assert sorted(tuple(sorted(duel)) for duels in made for duel in duels) == sorted(
        tuple(sorted(duel)) for duel in combinations(names, 2)
    )


def test_streams_are_shorter_where_there_are_many_rounds() -> None:
    assert stream_seconds(6.0, 1) == 0.4
    assert 0.08 < stream_seconds(6.0, 15) < 0.2
    assert stream_seconds(-1.0, 3) == 0.08


def test_of_entries_with_one_address_the_first_is_measured() -> None:
    endpoints = {n: Endpoint(address=a, interface="eth0", reason="") for n, a in (("a", "1"), ("b", "1"), ("c", "2"))}
    assert distinct(endpoints, ["a", "b", "c"]) == {"a": "1", "c": "2"}


def test_the_subnet_of_an_address() -> None:
    fact = host("a", 1, interfaces=(interface("eth0", "10.0.0.1", "fd00::1", prefixes=(20, 64)),))
    assert network_of(fact, "10.0.0.1") == "10.0.0.0/20"
    assert network_of(fact, "fd00::1") == "fd00::/64"
    assert network_of(fact, "10.9.9.9") == ""


def test_healthy_ways_are_in_order() -> None:
    assert found("abc", {}) == []


def test_one_finding_for_a_host_that_nobody_reaches() -> None:
    closed = {"high": "dropped", "detail": "no answer within 1.5 s", "firewall": "firewalld"}
    (finding,) = found("abc", {"ab": closed, "cb": closed})
    assert (finding.severity, finding.code, finding.host) == ("error", "NET-PORTS", "b")
    assert finding.title == "connections from a, c to the ports that ranks choose (its master port is open) are dropped"
    assert finding.evidence == "a, c -> b (10.0.0.2), ports 40000, 40001: dropped, no answer within 1.5 s"
    assert finding.fix == (
        "on b: sudo firewall-cmd --permanent --zone=trusted --add-source=10.0.0.0/24 && sudo firewall-cmd --reload"
    )


def test_the_master_port_counts_at_the_head_alone() -> None:
    (finding,) = found("abc", {"ba": {"master": "refused"}, "cb": {"master": "refused"}})
    assert (finding.host, finding.title) == ("a", f"connections from b to the master port {MASTER} are refused")


def test_a_black_hole_is_told_in_the_direction_of_the_packets() -> None:
    stalls = {"high": "stalled", "passes": 1400, "bytes_per_s": None, "latency_s": None}
    findings = found("ab", {"ab": {**stalls, "detail": "sending"}, "ba": {**stalls, "detail": "receiving"}})
    (finding,) = [f for f in findings if f.severity == "error"]
    assert (finding.code, finding.host, finding.title) == ("NET-MTU", "a", "large messages to b stall")
    assert finding.fix == "; ".join(
        f"on {name}, until its next reboot: sudo ip link set dev eth0 mtu 1400" for name in "ab"
    )


def test_a_way_far_slower_than_the_others() -> None:
    findings = found("abc", {"ab": {"bytes_per_s": 1e8}, "ca": {"latency_s": 0.05}, "ac": {"latency_s": 0.05}})
    assert [(f.code, f.host, f.title.split(":")[0]) for f in findings if "slow" in f.title] == [
        ("NET-SPEED", "a", "the way to b is slow"),
        ("NET-SPEED", "a", "round trips to c are slow"),
    ]


def test_what_a_token_of_70_billion_parameters_costs() -> None:
    model = model_facts(model_folder(LLAMA_70B))
    flows = traffic_of(cluster("a", "b", pipeline=2), model)
    assert list(flows) == [("a", "b")]
    assert flows["a", "b"].num_bytes == 2 * 8192 * 2
    assert token_seconds(flows["a", "b"], pair("a", "b", latency_s=0.001, bytes_per_s=32768e3)) == pytest.approx(0.0015)
    flows = traffic_of(cluster("a", "b", tensor=2), model)
    assert set(flows) == {("a", "b"), ("b", "a")}
    assert flows["a", "b"].num_messages == 320
    slow = {"ab": {"bytes_per_s": 12.5e6}, "ba": {"bytes_per_s": 12.5e6}}
    (finding,) = found("ab", slow, model=model_folder(LLAMA_70B))
    assert (finding.code, finding.host, finding.title) == ("NET-SPEED", "a", "the way to b costs 2.67 ms a token")
    assert "1000 tokens of a prompt 2.6 s" in finding.evidence


def test_families_and_link_local_addresses() -> None:
    spec = cluster({"name": "a", "address": "fe80::1%eth0"}, "b", pipeline=2)
    facts = machines("a", "b")
    facts["a"] = replace(facts["a"], interfaces=(interface("eth0", "fe80::1%eth0", "10.0.0.1"),))
    report = diagnose(spec, facts, codes=NET)
    assert [(f.severity, f.host) for f in report.findings if f.code == "NET-FAMILY"] == [
        ("error", "a"),
        ("warning", ""),
    ]


def test_what_is_worth_knowing_of_addresses() -> None:
    spec = cluster({"name": "a", "address": "10.9.0.1"}, "b", pipeline=2)
    facts = machines("a", "b")
    eth, ib = interface("eth0", "10.0.0.1"), interface("ib0", "10.9.0.1")
    facts["a"] = replace(facts["a"], interfaces=(eth, ib), environment={"GLOO_SOCKET_IFNAME": "^lo,docker0"})
    titles = {f.code: f.title for f in diagnose(spec, facts, codes=NET).findings if f.severity == "info"}
    assert titles == {
        "NET-SUBNET": "the hosts are in different subnets",
        "NET-SSH-ADDRESS": "SSH reaches 10.0.0.1, ranks use 10.9.0.1 on ib0",
        "NET-IFNAME": "GLOO_SOCKET_IFNAME=^lo,docker0 is set there; its ranks get ib0 all the same",
    }


@pytest.mark.parametrize(
    ("firewall", "command"),
    [
        ("ufw", "sudo ufw allow proto tcp from 10.0.0.0/24"),
        ("iptables", "sudo iptables -I INPUT -p tcp -s 10.0.0.0/24 -j ACCEPT"),
        (
            "nft inet filter input",
            "sudo nft 'insert rule inet filter input ip saddr { 10.0.0.0/24 } meta l4proto tcp accept'",
        ),
    ],
)
def test_the_remedy_is_in_the_firewalls_own_words(firewall: str, command: str) -> None:
    assert admit(firewall, ["10.0.0.0/24"], "sudo ") == command
    assert admit(firewall, ["10.0.0.0/24"], "") == command.replace("sudo ", "")
    assert "ip6" in admit("", ["fd00::/64"], "")


@pytest.mark.parametrize(("num", "heading"), [(3, "ms / Gbit/s"), (7, "round trip in ms"), (17, "worst of 272")])
def test_the_matrix_and_the_list(num: int, heading: str) -> None:
    page = Page(100)
    add_pairs(page, all_ways("abcdefghijklmnopqrst"[:num], {"ab": {"high": "refused"}}))
    assert heading in page.text()
    assert page.text().count("refused") == (2 if num == 7 else 1)  # one matrix for each figure
    assert "10" in page.text()
