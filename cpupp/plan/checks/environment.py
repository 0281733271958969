"""Checks of the environment that the hosts bring. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.plan.checks.wording import table
from cpupp.plan.findings import Case, Finding, check, ok, warning
from cpupp.plan.host_env import DROPPED_ENV, KEPT_ENV, passes
from cpupp.plan.secret import looks_secret


@check(
    "ENVIRONMENT",
    "variables of the host that would change vLLM behind the user's back",
    severities="warning",
    why="what a login shell sets on one host would change vLLM there alone",
    fix="put what is meant into `engine.env`, a secret into `engine.secrets`",
)
def environment(case: Case) -> Iterator[Finding]:
    """vllm #7074: what a login shell sets on one host and not on another."""
    keep = (*KEPT_ENV, *(case.spec.engine.keep_env if case.spec else ()))
    for name, fact in case.facts.items():
        kept = {k: v for k, v in fact.environment.items() if passes(k, keep)}
        left = {k: v for k, v in fact.environment.items() if k not in kept}
        wanted = {k: v for k, v in left.items() if k.startswith(DROPPED_ENV) or looks_secret(k)}
        if wanted:
            cause = "the ranks do not inherit them: the plan's environment is the same on every host"
            fix = "put what is meant into engine.env, a secret into engine.secrets"
            yield warning(name, "variables that are not passed on", evidence=table(wanted), cause=cause, fix=fix)
        if left.keys() - wanted.keys():
            others = ", ".join(sorted(left.keys() - wanted.keys()))
            yield ok(name, "not passed on, unless engine.keep_env names them", others)
        if kept:
            yield ok(name, "variables that are passed on", table(kept))
