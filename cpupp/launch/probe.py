"""Facts of all hosts: what each says of itself, whose shared memory it sees, and how it reaches the others."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from cpupp.errors import CpuppError, CpuppErrors, ExitCode
from cpupp.launch.session import AgentSession, run_all
from cpupp.plan.cluster import ClusterSpec, HostSpec
from cpupp.plan.facts import FactsError, HostFacts, decode
from cpupp.plan.network import candidate_address, everything_is_here

NUM_FREE_PORTS = 8
PROBE_TIMEOUT_S = 120.0  # a virtual environment and a model on a cold network disk


def probe_hosts(spec: ClusterSpec, sessions: Mapping[str, AgentSession]) -> dict[str, HostFacts]:
    """Return the facts of every host that has a session. Raises CpuppErrors with one error for each that failed."""
    facts, errors = probe_all(spec, sessions)
    if errors:
        raise CpuppErrors(errors)
    return facts


def probe_all(
    spec: ClusterSpec, sessions: Mapping[str, AgentSession], *, bandwidth: bool = True
) -> tuple[dict[str, HostFacts], list[CpuppError]]:
    """Return the facts of the hosts that answered, and the errors of those that did not.

    bandwidth: whether that of memory is measured, which takes a moment of all cores.

    First every host describes itself and puts a nonce into its /dev/shm; then every host reads the nonces of all; then
    the routes to all peers are asked, once their addresses are known.
    """
    hosts = {host.name: host for host in spec.hosts if host.name in sessions}
    nonces = {name: (f"cpupp-nonce-{secrets.token_hex(16)}", secrets.token_hex(32)) for name in hosts}
    found, errors = run_all(
        {name: partial(_probe, spec, host, sessions[name], nonces[name], bandwidth) for name, host in hosts.items()}
    )
    names = {name: nonces[name][0] for name in found}
    values = {name: nonces[name][1] for name in found}
    seen, seen_errors = run_all(
        {name: partial(sessions[name].request, "shm_read", names=names, values=values) for name in found}
    )
    run_all({name: partial(sessions[name].request, "shm_clear") for name in hosts})
    facts, bad = run_all(
        {name: partial(_decode, name, {**found[name], "shm_seen": seen[name]}) for name in found if name in seen}
    )
    targets = _targets(spec, hosts, facts, sessions)
    routes, route_errors = run_all(
        {name: partial(sessions[name].request, "routes", targets=_others(targets, name)) for name in facts}
    )
    complete, worse = run_all(
        {
            name: partial(_decode, name, {**found[name], "shm_seen": seen[name], "routes": routes[name]})
            for name in facts
            if name in routes
        }
    )
    return complete, [*errors, *seen_errors, *bad, *route_errors, *worse]


def _probe(
    spec: ClusterSpec, host: HostSpec, session: AgentSession, nonce: tuple[str, str], bandwidth: bool
) -> dict[str, Any]:
    ports = [port for port in (spec.serve.port, spec.network.master_port) if isinstance(port, int)]
    answer: dict[str, Any] = session.request(
        "probe",
        timeout=PROBE_TIMEOUT_S,
        name=host.name,
        engine_python=host.engine.python or spec.engine.python,
        model_path=spec.model.path,
        ports=ports,
        num_free_ports=NUM_FREE_PORTS,
        bandwidth=bandwidth,
        nonce={"name": nonce[0], "value": nonce[1]},
    )
    return answer


def _decode(name: str, data: dict[str, Any]) -> HostFacts:
    try:
        return decode(HostFacts, data)
    except FactsError as error:
        raise CpuppError(
            "PROBE-FACTS",
            f"the agent sent facts that cannot be read: {error}",
            where=name,
            exit_code=ExitCode.UNREACHABLE,
        ) from None


def _targets(
    spec: ClusterSpec,
    hosts: Mapping[str, HostSpec],
    facts: Mapping[str, HostFacts],
    sessions: Mapping[str, AgentSession],
) -> dict[str, str]:
    """Return the address by which the peers reach each host, as far as it is known.

    A local host has no SSH address: there it is the source address of its route to the first host that has one.
    """
    targets = {name: candidate_address(hosts[name], fact) for name, fact in facts.items()}
    known = next((address for address in targets.values() if address), "")
    for name, address in targets.items():
        if address:
            continue
        if everything_is_here(spec):
            targets[name] = "127.0.0.1"
        elif known:
            (route,) = sessions[name].request("routes", targets={"peer": known})
            targets[name] = route["source"]
    return {name: address for name, address in targets.items() if address}


def _others(targets: Mapping[str, str], name: str) -> dict[str, str]:
    return {peer: address for peer, address in targets.items() if peer != name}
