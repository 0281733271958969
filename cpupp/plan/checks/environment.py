"""Checks of the environment that the hosts bring. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cpupp.plan.asking import planned_env, written
from cpupp.plan.checks.wording import table
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.findings import Case, Finding, check, ok, warning
from cpupp.plan.host_env import DROPPED_ENV, KEPT_ENV, passes
from cpupp.plan.secret import looks_secret

KEPT = "kept"


@check(
    "ENVIRONMENT",
    "variables of the host that would change vLLM behind the user's back",
    severities="warning",
    why="what a login shell sets on one host would change vLLM there alone",
    fix="put what is meant into `engine.env`, a secret into `engine.secrets`; take the rest out of that host's profile",
)
def environment(case: Case) -> Iterator[Finding]:
    """vllm #7074: what a login shell sets on one host and not on another."""
    keep = (*KEPT_ENV, *(case.spec.engine.keep_env if case.spec else ()))
    planned = planned_env(case.spec, case.facts) if case.spec else {}
    for name, fact in case.facts.items():
        does = {key: _what(key, keep, planned.get(name, {})) for key in fact.environment}
        said = _said(case.spec, name) if case.spec else set()
        wanted = [
            key
            for key, what in does.items()
            if what != KEPT and key not in said and (key.startswith(DROPPED_ENV) or looks_secret(key))
        ]
        if wanted:
            cause = "the ranks do not inherit them: the plan's environment is the same on every host"
            fix = "put what is meant into engine.env, a secret into engine.secrets; take the rest out of the host's "
            fix += "~/.bashrc, ~/.profile, ~/.ssh/environment, /etc/environment or sshd_config (SetEnv)"
            evidence = ", ".join(f"{key}={fact.environment[key]} ({does[key]})" for key in wanted)
            yield warning(name, "variables that are not passed on", evidence=evidence, cause=cause, fix=fix)
        own = [key for key in does if key in said and key not in wanted]
        if own:
            yield ok(name, "the file says these itself", ", ".join(own))
        others = [key for key, what in does.items() if what != KEPT and key not in (*wanted, *own)]
        if others:
            yield ok(name, "not passed on, unless engine.keep_env names them", ", ".join(others))
        kept = {key: fact.environment[key] for key, what in does.items() if what == KEPT}
        if kept:
            yield ok(name, "variables that are passed on", table(kept))
        if not fact.environment:
            yield ok(name, "no variable that matters is set")


def _said(spec: ClusterSpec, name: str) -> set[str]:
    """What the file itself gives to a host, whatever the host has."""
    own = next(host.engine.secrets for host in spec.hosts if host.name == name)
    return {*written(spec, name), *spec.engine.secrets, *own}


def _what(key: str, keep: tuple[str, ...], planned: Mapping[str, str]) -> str:
    """What the plan does about a variable of the host."""
    if key in planned:
        shown = "a value of its own" if looks_secret(key) or "{" in planned[key] else planned[key]
        return f"the plan sets {shown}"
    return KEPT if passes(key, keep) else "dropped"
