"""Every pair of hosts, both ways: which ports are open, how long a message takes, how much flows."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cpupp.errors import CpuppError
from cpupp.launch.session import AgentSession, run_all
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.network import data_plane
from cpupp.plan.pairs import MEASURE_BUDGET_S, PairFacts, PortReach, distinct, rounds, stream_seconds
from cpupp.plan.plan import master_port

NUM_HIGH_PORTS = 2
NUM_MESSAGES = 50
OPEN_S = 40.0  # the doors close by themselves then, whatever became of us

Doors = Mapping[str, Mapping[str, Any]]


def measure_pairs(
    spec: ClusterSpec,
    sessions: Mapping[str, AgentSession],
    facts: Mapping[str, HostFacts],
    tell: Callable[[str], None] = lambda words: None,
) -> tuple[tuple[PairFacts, ...], list[CpuppError]]:
    """Return every ordered pair of hosts that have facts and addresses of their own, and the errors of hosts lost.

    Empty when addresses cannot be chosen (the checks say why). tell: gets a line of progress now and then.
    """
    try:
        addresses = distinct(data_plane(spec, facts), [host.name for host in spec.hosts if host.name in facts])
    except CpuppError:
        return (), []
    if len(addresses) < 2:
        return (), []
    key = secrets.token_hex(32)
    master = master_port(spec, facts.get(spec.hosts[0].name))
    opener = {
        name: partial(
            sessions[name].request,
            "doors_open",
            name=name,
            key=key,
            address=address,
            ports=[master],
            num_high=NUM_HIGH_PORTS,
            seconds=OPEN_S,
        )
        for name, address in addresses.items()
    }
    tell(f"network: {len(addresses)} hosts knock at each other's ports")
    doors, errors = run_all(opener)
    try:
        found, later = _reach(sessions, addresses, doors, key, master)
        measured = _measure_all(sessions, found, key, tell)
    finally:
        run_all({name: partial(sessions[name].request, "doors_close") for name in doors})
    return tuple(measured.values()), [*errors, *later]


Pairs = dict[tuple[str, str], PairFacts]


def _reach(
    sessions: Mapping[str, AgentSession], addresses: Mapping[str, str], doors: Doors, key: str, master: int
) -> tuple[Pairs, list[CpuppError]]:
    targets = {
        name: {
            "peer": name,
            "address": addresses[name],
            "ports": [*([] if str(master) in door["taken"] else [master]), *door["high"]],
            "block": door["high"][0],
        }
        for name, door in doors.items()
    }
    rows, errors = run_all(
        {
            name: partial(
                sessions[name].request,
                "pairs_reach",
                key=key,
                targets=[target for peer, target in targets.items() if peer != name],
            )
            for name in doors
        }
    )
    found: Pairs = {}
    for src, answers in rows.items():
        for dst in doors:
            if dst != src:
                own = [row for row in answers if row["peer"] == dst]
                taken = str(doors[dst]["taken"].get(str(master), ""))
                found[src, dst] = _pair(src, dst, addresses[dst], own, master, (doors[dst]["firewall"], taken))
    return found, errors


def _pair(
    src: str, dst: str, address: str, rows: list[dict[str, Any]], master: int, of_dst: tuple[str, str]
) -> PairFacts:
    ports = tuple(
        PortReach(
            port=row["port"],
            kind="master" if row["port"] == master else "high",
            state=row["state"],
            detail=row["detail"],
        )
        for row in rows
    )
    return PairFacts(
        src=src,
        dst=dst,
        address=address,
        ports=ports,
        firewall=of_dst[0],
        master_taken=of_dst[1],
        mtu=max((row["mtu"] for row in rows), default=0),
        passes=max((row["passes"] for row in rows), default=0),
        latency_s=None,
        jitter_s=None,
        bytes_per_s=None,
    )


def _measure_all(sessions: Mapping[str, AgentSession], pairs: Pairs, key: str, tell: Callable[[str], None]) -> Pairs:
    """Measure latency and both streams of every pair, no host in two measurements at a moment."""
    names = list(dict.fromkeys(src for src, _ in pairs))
    schedule = rounds(names)
    end = time.monotonic() + MEASURE_BUDGET_S
    found = dict(pairs)
    for index, duels in enumerate(schedule):
        seconds = stream_seconds(end - time.monotonic(), len(schedule) - index)
        if index % 4 == 0:
            tell(f"network: latency and bandwidth of each pair, round {index + 1} of {len(schedule)}")
        tasks = {}
        for one, two in duels:
            way = _way(pairs, one, two)
            if way is not None:
                src, dst, port = way
                request = partial(sessions[src].request, "pairs_measure", key=key, messages=NUM_MESSAGES)
                address = pairs[src, dst].address
                tasks[f"{src}\0{dst}"] = partial(request, peer=dst, address=address, port=port, seconds=seconds)
        for way_name, row in run_all(tasks)[0].items():
            src, _, dst = way_name.partition("\0")
            times = {"latency_s": row["latency"], "jitter_s": row["jitter"]}
            found[src, dst] = replace(found[src, dst], **times, bytes_per_s=row["up"])
            if (dst, src) in found:
                found[dst, src] = replace(found[dst, src], **times, bytes_per_s=row["down"])
    return found


def _way(pairs: Pairs, one: str, two: str) -> tuple[str, str, int] | None:
    """Who asks whom at which port; None when neither way is open or large messages stall on one."""
    ways = [(src, dst) for src, dst in ((one, two), (two, one)) if (src, dst) in pairs]
    if any(port.state == "stalled" for way in ways for port in pairs[way].ports):
        return None
    return next(((src, dst, port) for src, dst in ways if (port := pairs[src, dst].open_port) is not None), None)
