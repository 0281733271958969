"""Checks of names, addresses, routes and ports. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.errors import CpuppError
from cpupp.plan.checks.wording import from_error
from cpupp.plan.findings import Case, Finding, check, error, ok, warning
from cpupp.plan.network import address_errors, data_plane, is_container_bridge, is_loopback


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
            fix = f"stop that process, or choose another {key}"
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
    fix="map the host's name to its address in /etc/hosts",
)
def net_loopback_name(case: Case) -> Iterator[Finding]:
    """pytorch #15592, gloo #223: `127.0.1.1 name` in /etc/hosts, as Debian's installer writes it."""
    if len({fact.boot_id for fact in case.facts.values()}) < 2:  # one machine calls itself in any case
        return
    for name, fact in case.facts.items():
        if any(is_loopback(address) for address in fact.name_resolves_to):
            evidence = f"{fact.hostname} -> {', '.join(fact.name_resolves_to)}"
            cause = "programs that ask for their own address tell it to peers, who then call themselves"
            fix = f"cpupp gives every rank its address, so it runs; to cure it, map {fact.hostname} in /etc/hosts"
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
