"""What doctor asks hosts about: the libraries that a launch would preload there, and what vLLM must know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from cpupp.errors import CpuppError
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.command import make_commands
from cpupp.plan.facts import HostFacts
from cpupp.plan.plan import make_plan, written_env

PRELOAD_ENV = "LD_PRELOAD"
GANG_FLAGS = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless")
"""What every launch over several hosts says; known since vLLM 0.12 or so (sparkrun #287)."""
OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b")


def preloads(spec: ClusterSpec | None, name: str, fact: HostFacts) -> tuple[str, ...]:
    """Return the libraries that a rank of this host would preload: the file's own LD_PRELOAD goes before cpupp's."""
    own = written(spec, name).get(PRELOAD_ENV) if spec else None
    if own is not None:
        return tuple(part for part in re.split(r"[:\s]+", own) if part)
    return tuple(path for path in (fact.engine.tcmalloc, fact.engine.iomp) if path)


def written(spec: ClusterSpec, name: str) -> dict[str, str]:
    """Return the environment that the file writes for a host."""
    return next(written_env(spec, host) for host in spec.hosts if host.name == name)


def planned_env(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> dict[str, dict[str, str]]:
    """Return the environment that the plan sets, by host; what the file writes where no plan can be made."""
    try:
        commands = make_commands(make_plan(spec, facts))
    except CpuppError:
        return {host.name: written_env(spec, host) for host in spec.hosts}
    return {command.host: {**command.env, **command.site_env} for command in commands}


def openmp_libraries(paths: Iterable[str]) -> dict[str, str]:
    """Return the OpenMP libraries among these: kind (`gomp`, `iomp5`, `omp`) -> path."""
    found = {}
    for path in paths:
        match = OPENMP.search(path.rpartition("/")[2])
        if match:
            found[match[1]] = path
    return found


def asked_flags(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """Return the `vllm serve` flags that a launch would use; those of every launch when no plan can be made."""
    try:
        commands = make_commands(make_plan(spec, facts))
    except CpuppError:
        several = GANG_FLAGS if len(spec.hosts) > 1 else ()
        return (*several, *(f"--{name.lstrip('-').replace('_', '-')}" for name in spec.engine.args))
    used = {part.partition("=")[0]: None for command in commands for part in command.argv if part.startswith("--")}
    return tuple(used)


def architectures(facts: Mapping[str, HostFacts]) -> tuple[str, ...]:
    """Return the names that the models' config.json give, those of all hosts."""
    found: dict[str, None] = {}
    for fact in facts.values():
        names = fact.model.config.get("architectures")
        for name in names if isinstance(names, list) else ():
            found[str(name)] = None
    return tuple(found)


def one_of_each_build(facts: Mapping[str, HostFacts]) -> dict[str, tuple[str, ...]]:
    """Return the hosts to ask for their vLLM, each with all hosts that have the same build of it and of torch."""
    builds: dict[tuple[str, ...], list[str]] = {}
    for name, fact in facts.items():
        if fact.engine.error or not fact.engine.vllm:
            continue
        engine = fact.engine
        # Without a digest nobody can say that two installations are one build.
        build = engine.build or f"? {name}"
        builds.setdefault((engine.vllm, engine.torch, engine.python_version, build), []).append(name)
    return {names[0]: tuple(names) for names in builds.values()}
