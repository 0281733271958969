"""Checks of the way between every two hosts, as it was knocked at and measured. Pure; bytes and seconds."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from cpupp.plan.checks.wording import sudo, table, there
from cpupp.plan.facts import InterfaceFacts
from cpupp.plan.findings import Case, Finding, check, error, info, ok, warning
from cpupp.plan.firewall import admit, outlives_reboot
from cpupp.plan.model import readable_model
from cpupp.plan.pairs import PairFacts, PortReach, network_of
from cpupp.plan.traffic import Traffic, token_seconds, traffic_of

FAR_SLOWER = 3.0
LATENCY_NOISE_S = 0.001
TOKEN_LIMIT_S = 0.005
PROMPT_TOKENS = 1000
PROMPT_LIMIT_S = 1.0

_CAUSES = {
    "refused": "an agent listened there, so a firewall rejects connections, or a translated address leads elsewhere",
    "dropped": "a firewall drops the packets: on the host, in the network between, or a security group of the cloud",
    "unreachable": "a firewall rejects the connections, or no route leads there",
    "silent": "something takes the connections and passes nothing on: a proxy, or an overloaded host",
    "stranger": "something else takes the connections: a proxy, or another machine with this address",
    "wrong-host": "two machines have this address, or a translated address leads to the wrong one",
}
_WORDS = {"silent": "not answered", "stranger": "answered by a stranger", "wrong-host": "answered by the wrong host"}


@check(
    "NET-PORTS",
    "every host reaches every other on the master port and on ports that the kernel chooses",
    severities="error info",
    why="gloo and vLLM listen on ports that the kernel chooses; where only the master port is open, the start hangs"
    " (pytorch #44544)",
    fix="admit TCP between the hosts in their firewalls; the finding has the command",
    needs=("pairs",),
)
def net_ports(case: Case) -> Iterator[Finding]:
    """Knocked both ways; findings are about the host that could not be reached, with all that could not reach it."""
    if case.spec is None or not case.pairs:
        return
    head = case.spec.hosts[0].name
    blocked: dict[tuple[str, str, str], list[tuple[PairFacts, PortReach]]] = {}
    for pair in case.pairs:
        bad = _blocked(pair, head)
        if bad is not None:
            what, port = bad
            blocked.setdefault((pair.dst, what, port.state), []).append((pair, port))
    for (dst, what, _), found in blocked.items():
        yield _closed(case, dst, what, found)
    for pair in case.pairs:
        unused = pair.blocked("master")
        if unused is not None and pair.dst != head and _blocked(pair, head) is None:
            title = f"its port {unused.port} is {_word(unused)} for {pair.src}; only the head's is the master port"
            yield info(pair.dst, title, unused.detail)
    if not blocked:
        master = next((port.port for pair in case.pairs for port in pair.ports if port.kind == "master"), None)
        what = f"master port {master} and two ports" if master else "two ports"
        yield ok("", f"{len(case.pairs)} ways between hosts are open", f"{what} that the kernel chose, both directions")


def _blocked(pair: PairFacts, head: str) -> tuple[str, PortReach] | None:
    """What of this way is closed that a run needs, and the port that shows it; None when nothing is."""
    high, master = pair.blocked("high"), pair.blocked("master")
    high = None if high and high.state == "stalled" else high  # NET-MTU tells it
    if high and master:
        return "every port", high
    if high:
        knocked = any(port.kind == "master" for port in pair.ports)
        return "the ports that ranks choose" + (" (its master port is open)" if knocked else ""), high
    if master and pair.dst == head:
        return f"the master port {master.port}", master
    return None


def _closed(case: Case, dst: str, what: str, found: Sequence[tuple[PairFacts, PortReach]]) -> Finding:
    pair, port = found[0]
    names = ", ".join(one.src for one, _ in found)
    tried = [p for p in pair.ports if p.state == port.state]
    ports = ", ".join(str(p.port) for p in tried)
    evidence = f"{names} -> {dst} ({pair.address}), ports {ports}: {port.state}"
    if port.detail:
        evidence += f", {port.detail}"
    fix = _fix(case, pair, port, [one.src for one, _ in found])
    title = f"connections from {names} to {what} are {_word(port)}"
    return error(dst, title, evidence=evidence, cause=_CAUSES.get(port.state, port.state), fix=fix)


def _word(port: PortReach) -> str:
    return _WORDS.get(port.state, port.state)


def _fix(case: Case, pair: PairFacts, port: PortReach, sources: Sequence[str]) -> str:
    if port.state in ("wrong-host", "stranger", "silent"):
        asked = f"ip neigh show {pair.address}"
        return (
            f"give hosts[].address of {pair.dst} an address that is its own; `{asked}` on {pair.src} shows who has it"
        )
    addresses = {other.src: _address(case, other.src) for other in case.pairs if other.src in sources}
    known = [address for address in addresses.values() if address]
    subnet = network_of(case.facts[pair.dst], pair.address)
    if subnet and all(_inside(address, subnet) for address in known):
        known = [subnet]
    if pair.firewall in ("", "nft"):
        seen = f"`{sudo(case.facts[pair.dst])}nft list ruleset` there shows it; else " if pair.firewall else ""
        between = "look between the hosts (a security group, a switch)"
        return f"no firewall of {pair.dst} is seen: {seen}{between}, and at what lets replies back in to {sources[0]}"
    command = admit(pair.firewall, known, sudo(case.facts[pair.dst]))
    return there(pair.dst, command, for_good=outlives_reboot(pair.firewall))


def _address(case: Case, name: str) -> str:
    return next((pair.address.partition("%")[0] for pair in case.pairs if pair.dst == name), "")


def _inside(address: str, subnet: str) -> bool:
    one, network = ipaddress.ip_address(address), ipaddress.ip_network(subnet)
    return one.version == network.version and one in network


@check(
    "NET-MTU",
    "packets of full size arrive, and interfaces of the data plane have one MTU",
    severities="error warning info",
    why="where large packets vanish, the start of a run works and its first large message hangs",
    fix="one MTU on every host and switch; the finding says which size arrives",
    needs=("pairs",),
)
def net_mtu(case: Case) -> Iterator[Finding]:
    """The MTU of each interface, the path MTU that the kernel knows, and whether large messages really pass."""
    if not case.pairs:
        return
    holders = {pair.dst: _interface(case, pair) for pair in case.pairs}
    mtus = {name: interface.mtu for name, interface in holders.items() if interface is not None and interface.mtu}
    stalls = {way: pair for pair in case.pairs for way in _stalled(pair)}
    for (src, dst), pair in stalls.items():
        yield _black_hole(case, src, dst, pair, holders)
    if len(set(mtus.values())) > 1:
        least = min(mtus.values())
        larger = {name: mtu for name, mtu in mtus.items() if mtu > least}
        commands = _set_mtu(case, larger, least, holders)
        cause = "full packets of the larger do not fit the smaller; datagrams and tunnels suffer first"
        evidence = table({name: str(mtu) for name, mtu in mtus.items()})
        yield warning("", "the MTU differs between hosts", evidence=evidence, cause=cause, fix="; ".join(commands))
    for pair in case.pairs:
        own = mtus.get(pair.src, 0)
        if 0 < pair.mtu < min(own, mtus.get(pair.dst, own)):
            yield info(pair.src, f"the way to {pair.dst} takes packets of {pair.mtu} bytes", f"its interface {own}")
    if not stalls and len(set(mtus.values())) == 1:
        yield ok("", f"MTU {next(iter(mtus.values()))} everywhere", "large messages pass between all hosts")


def _stalled(pair: PairFacts) -> list[tuple[str, str]]:
    """The direction in which large packets vanish, from what the visitor was doing."""
    details = [port.detail for port in pair.ports if port.state == "stalled"]
    return [(pair.dst, pair.src) if detail == "receiving" else (pair.src, pair.dst) for detail in details]


def _set_mtu(case: Case, names: Iterable[str], mtu: int, holders: Mapping[str, InterfaceFacts | None]) -> list[str]:
    return [
        there(name, f"{sudo(case.facts[name])}ip link set dev {interface.name} mtu {mtu}", for_good=False)
        for name in names
        if (interface := holders.get(name)) is not None
    ]


def _black_hole(
    case: Case, src: str, dst: str, pair: PairFacts, holders: Mapping[str, InterfaceFacts | None]
) -> Finding:
    evidence = f"{src} -> {dst}: a small message arrived, one of 96 KiB did not"
    fix = "lower the MTU of both hosts, or let ICMP `fragmentation needed` through"
    if pair.passes:
        evidence += f"; packets of up to {pair.passes} bytes arrive"
        fix = "; ".join(_set_mtu(case, (src, dst), pair.passes, holders)) or fix
    cause = "a link on the way takes smaller packets and does not say so (a tunnel, a switch without jumbo frames)"
    return error(src, f"large messages to {dst} stall", evidence=evidence, cause=cause, fix=fix)


def _interface(case: Case, pair: PairFacts) -> InterfaceFacts | None:
    """The interface of `dst` that holds its address."""
    fact = case.facts.get(pair.dst)
    return next((i for i in fact.interfaces if pair.address in i.addresses), None) if fact else None


@check(
    "NET-SPEED",
    "latency and bandwidth of every pair, against the others and against what the model sends",
    severities="warning info",
    why="a token waits for every link that it crosses, so the slowest link sets the pace",
    fix="look at cable, switch port and driver (`ethtool`) of the slow host, or order `hosts` around it",
    needs=("pairs",),
)
def net_speed(case: Case) -> Iterator[Finding]:
    """Round trips of small messages and one TCP stream each way, measured while nobody else was."""
    measured = [pair for pair in case.pairs if pair.bytes_per_s is not None and pair.latency_s is not None]
    if not measured:
        return
    rates = [pair.bytes_per_s or 0.0 for pair in measured]
    times = [pair.latency_s or 0.0 for pair in measured]
    slow = [finding for pair in measured if (finding := _far_slower(pair, median(times), median(rates), len(measured)))]
    yield from slow
    costs = list(_costs(case, measured))
    yield from (_costly(traffic, pair) for traffic, pair, is_much in costs if is_much)
    latency = f"{_ms(min(times))} to {_ms(max(times))}"
    title = f"round trips of {latency}, {_gbit(min(rates))} to {_gbit(max(rates))} a stream"
    if not slow and not any(is_much for _, _, is_much in costs):
        sums = [_cost_words(traffic, pair) for traffic, pair, _ in costs[:3]]
        yield ok("", title, "; ".join(sums))
    else:
        yield info("", title)


def _far_slower(pair: PairFacts, latency_s: float, bytes_per_s: float, num_ways: int) -> Finding | None:
    """A warning when the way is far from what is usual here; with two hosts there is no usual."""
    if num_ways < 4:
        return None
    assert pair.latency_s is not None
    assert pair.bytes_per_s is not None
    cause = "a token waits for the slowest link that it crosses"
    fix = f"look at cable, switch port and driver of {pair.src} and {pair.dst} (`ethtool`), or order hosts[] around it"
    if pair.bytes_per_s * FAR_SLOWER < bytes_per_s:
        title = f"the way to {pair.dst} is slow: {_gbit(pair.bytes_per_s)}"
        evidence = f"{pair.src} -> {pair.dst}; the median of all ways is {_gbit(bytes_per_s)}"
        return warning(pair.src, title, evidence=evidence, cause=cause, fix=fix)
    if pair.latency_s > FAR_SLOWER * latency_s + LATENCY_NOISE_S and pair.src < pair.dst:
        title = f"round trips to {pair.dst} are slow: {_ms(pair.latency_s)}"
        evidence = f"{pair.src} -> {pair.dst}; the median of all ways is {_ms(latency_s)}"
        return warning(pair.src, title, evidence=evidence, cause=cause, fix=fix)
    return None


def _costs(case: Case, measured: Sequence[PairFacts]) -> Iterator[tuple[Traffic, PairFacts, bool]]:
    """What a token costs on each way that the plan uses, the dearest first, and whether that is much."""
    model = readable_model(case.facts)
    if case.spec is None or model is None:
        return
    flows = traffic_of(case.spec, model)
    used = [(flows[pair.src, pair.dst], pair) for pair in measured if (pair.src, pair.dst) in flows]
    for traffic, pair in sorted(used, key=lambda way: token_seconds(*way) or 0.0, reverse=True):
        is_much = (token_seconds(traffic, pair) or 0.0) > TOKEN_LIMIT_S
        yield traffic, pair, is_much or _prompt_seconds(traffic, pair) > PROMPT_LIMIT_S


def _costly(traffic: Traffic, pair: PairFacts) -> Finding:
    title = f"the way to {pair.dst} costs {_ms(token_seconds(traffic, pair) or 0.0)} a token"
    evidence = (
        f"{_cost_words(traffic, pair)}; {PROMPT_TOKENS} tokens of a prompt {_prompt_seconds(traffic, pair):.1f} s"
    )
    cause = f"{traffic.what} sends {traffic.num_bytes / 1024:.0f} KiB a token there in {traffic.num_messages} messages"
    fix = "use a faster network between these hosts (hosts[].address), or fewer hosts"
    if traffic.num_messages > 1:
        fix = "put each tensor group on one host (parallel: tensor inside hosts, pipeline across), or " + fix
    return warning(pair.src, title, evidence=evidence, cause=cause, fix=fix)


def _cost_words(traffic: Traffic, pair: PairFacts) -> str:
    cost = _ms(token_seconds(traffic, pair) or 0.0)
    return f"{pair.src} -> {pair.dst}: {cost} a token at {_ms(pair.latency_s or 0)}, {_gbit(pair.bytes_per_s or 0)}"


def _prompt_seconds(traffic: Traffic, pair: PairFacts) -> float:
    return PROMPT_TOKENS * traffic.num_bytes / pair.bytes_per_s if pair.bytes_per_s else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.2f} Gbit/s"
