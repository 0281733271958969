"""Checks of names, addresses, routes and ports. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.errors import CpuppError
from cpupp.plan.checks.wording import from_error, table
from cpupp.plan.findings import Case, Finding, check, error, info, ok, warning
from cpupp.plan.network import Endpoint, address_errors, data_plane, how_to_free, is_container_bridge, is_loopback
from cpupp.plan.pairs import network_of


@check(
    "PORT",
    "the ports that the head needs are free",
    severities="error",
    why="vLLM would fail after it has loaded the model",
    fix="stop the process that has the port, or choose another; `auto` finds a free master port",
)
def port(case: Case) -> Iterator[Finding]:
    """vllm #39015; `auto` picks a free one by itself."""
    if case.spec is None:
        return
    head = case.facts.get(case.spec.hosts[0].name)
    for found in head.ports if head else ():
        key = "serve.port" if found.port == case.spec.serve.port else "network.master_port"
        if found.free:
            yield ok(head.name if head else "", f"{key} {found.port} is free")
        else:
            fix = f"{how_to_free(case.spec.hosts[0].name, found)}, or choose another {key}"
            evidence = found.holder or "in use"
            cause = "vLLM would fail after it has loaded the model"
            yield error(
                case.spec.hosts[0].name, f"{key} {found.port} is taken", evidence=evidence, cause=cause, fix=fix
            )


@check(
    "NET-LOOPBACK-NAME",
    "the host's own name does not resolve to loopback",
    severities="warning",
    why="programs that ask for their own address tell loopback to peers, who then call themselves",
    fix="map the host's name to its address in /etc/hosts, and take it out of the line of 127.0.1.1",
)
def net_loopback_name(case: Case) -> Iterator[Finding]:
    """pytorch #15592, gloo #223: `127.0.1.1 name` in /etc/hosts, as Debian's installer writes it."""
    if len({fact.boot_id for fact in case.facts.values()}) < 2:  # one machine calls itself in any case
        return
    for name, fact in case.facts.items():
        if any(is_loopback(address) for address in fact.name_resolves_to):
            evidence = f"{fact.hostname} -> {', '.join(fact.name_resolves_to)}"
            cause = "programs that ask for their own address tell it to peers, who then call themselves"
            fix = f"cpupp gives every rank its address, so it runs; to cure it, in /etc/hosts of {name}: "
            fix += f"`{fact.ssh_address or 'ADDRESS'} {fact.hostname}`, and no other line with that name"
            yield warning(name, "its name resolves to loopback", evidence=evidence, cause=cause, fix=fix)


@check(
    "NET-ADDRESS",
    "every host has an address and an interface that its peers reach",
    severities="error warning",
    why="peers connect to this address; a wrong one shows as a hang",
    fix="give `hosts[].address` or `network.interface`",
)
def net_address(case: Case) -> Iterator[Finding]:
    """The endpoint that the plan will use, and why."""
    if case.spec is None or case.failures:
        return
    try:
        endpoints = data_plane(case.spec, case.facts)
        problems = address_errors(case.spec, endpoints, case.facts)
    except CpuppError as problem:
        yield from_error(problem)
        return
    yield from map(from_error, problems)
    for name, endpoint in endpoints.items():
        if is_container_bridge(endpoint.interface):
            cause = "such addresses repeat on every host and lead nowhere (DeepSpeed #2920)"
            fix = f"give hosts[].address of {name}"
            evidence = f"{endpoint.address} on {endpoint.interface}"
            yield warning(name, "its address is a container bridge's", evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, f"{endpoint.address} on {endpoint.interface or '?'}", endpoint.reason)


@check(
    "NET-ROUTE",
    "every host has a route to every other",
    severities="error",
    why="ranks of a group connect to each other directly",
    fix="give `hosts[].address` an address that the peers reach",
)
def net_route(case: Case) -> Iterator[Finding]:
    """The kernel's answer for each peer's address."""
    for name, fact in case.facts.items():
        bad = [route for route in fact.routes if route.error]
        for route in bad:
            cause = "ranks of a group connect to each other directly"
            fix = f"give hosts[].address of {route.peer}: an address that {name} reaches"
            evidence = f"{route.target}: {route.error}"
            yield error(name, f"no route to {route.peer}", evidence=evidence, cause=cause, fix=fix)
        if fact.routes and not bad:
            yield ok(name, "routes to " + ", ".join(f"{r.peer} by {r.interface}" for r in fact.routes))


def _endpoints(case: Case) -> dict[str, Endpoint]:
    """The data plane of several hosts that have facts; empty when there is none (NET-ADDRESS says why)."""
    if case.spec is None or len(case.facts) < 2:
        return {}
    try:
        endpoints = data_plane(case.spec, case.facts)
    except CpuppError:
        return {}
    return {name: endpoint for name, endpoint in endpoints.items() if name in case.facts}


@check(
    "NET-FAMILY",
    "all hosts have addresses of one family, and none is link-local",
    severities="error warning",
    why="a link-local address means nothing to peers; IPv4 and IPv6 meet only where all hosts have both",
    fix="give every host a `hosts[].address` of one family",
)
def net_family(case: Case) -> Iterator[Finding]:
    """vllm #18986 and what the `%interface` of fe80:: addresses does to a peer."""
    endpoints = _endpoints(case)
    families = {name: "IPv6" if ":" in endpoint.address else "IPv4" for name, endpoint in endpoints.items()}
    local = [name for name, endpoint in endpoints.items() if endpoint.address.lower().startswith(("fe8", "169.254."))]
    for name in local:
        cause = "such an address is unique on one link only, and peers would have to know by which interface"
        evidence = f"{endpoints[name].address} on {endpoints[name].interface}"
        fix = f"give hosts[].address of {name}: a global or private one (fd00::/8, 10.0.0.0/8, ...)"
        yield error(name, "its address is link-local", evidence=evidence, cause=cause, fix=fix)
    if len(set(families.values())) > 1:
        cause = "an IPv4 host reaches an IPv6 address only if it has one too"
        fix = "give every host a hosts[].address of one family"
        addresses = {name: endpoint.address for name, endpoint in endpoints.items()}
        yield warning("", "IPv4 and IPv6 are mixed", evidence=table(addresses), cause=cause, fix=fix)
    elif families and not local:
        yield ok("", f"{next(iter(families.values()))} everywhere")


@check(
    "NET-SUBNET",
    "the hosts are in one subnet",
    severities="info",
    why="between subnets a router carries every token, and its firewall may have a say",
    fix="nothing, when NET-PORTS and NET-SPEED are in order",
)
def net_subnet(case: Case) -> Iterator[Finding]:
    """The network of each address on the data plane."""
    subnets = {name: network_of(case.facts[name], e.address) for name, e in _endpoints(case).items()}
    if len(set(subnets.values()) - {""}) > 1:
        yield info("", "the hosts are in different subnets", table(subnets))
    elif len(subnets) > 1:
        yield ok("", f"all hosts are in {next(iter(subnets.values())) or 'one subnet'}")


@check(
    "NET-SSH-ADDRESS",
    "ranks use the address that SSH reaches",
    severities="info",
    why="two networks: the one that carries SSH may be fine while the other is not",
    fix="nothing, when it is meant; else `hosts[].address`",
)
def net_ssh_address(case: Case) -> Iterator[Finding]:
    """sparkrun #157: control network and data network are often two."""
    for name, endpoint in _endpoints(case).items():
        reached = case.facts[name].ssh_address
        if reached and reached != endpoint.address:
            title = f"SSH reaches {reached}, ranks use {endpoint.address} on {endpoint.interface}"
            yield info(name, title, endpoint.reason)


@check(
    "NET-IFNAME",
    "no GLOO_SOCKET_IFNAME of a host's own stands against the plan's",
    severities="info",
    why="with stock vLLM it decides by which interface this host alone speaks (vllm #7074); lists and `^lo` crash gloo",
    fix="nothing: cpupp gives each rank the interface of its host; unset it to be sure of what else reads it",
)
def net_ifname(case: Case) -> Iterator[Finding]:
    """aws-do-eks #50, sglang #3226. The plan replaces it, so this only explains why it has no effect."""
    for name, endpoint in _endpoints(case).items():
        value = case.facts[name].environment.get("GLOO_SOCKET_IFNAME")
        if value is None or value == endpoint.interface:
            continue
        exists = any(interface.name == value for interface in case.facts[name].interfaces)
        there = "another interface of this host" if exists else "no interface of this host"
        title = f"GLOO_SOCKET_IFNAME={value} is set there; its ranks get {endpoint.interface} all the same"
        yield info(name, title, f"{value}: {there}")
