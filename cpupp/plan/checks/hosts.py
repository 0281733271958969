"""Checks of the machines: reach, cores, instructions, memory, limits. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.plan.checks.wording import gib, table
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Case, Finding, check, error, ok, warning

MIN_OPEN_FILES = 4096


@check(
    "HOST-REACH",
    "the host answers over SSH, and its python3 runs the agent",
    severities="error",
    why="everything on a host is started over this one connection",
    fix="`ssh HOST true` must work without a question; docs/ssh.md says what of your SSH configuration is honoured",
)
def host_reach(case: Case) -> Iterator[Finding]:
    """Hosts that could not be asked; all other checks are silent about them."""
    for host, (message, hint) in case.failures.items():
        cause = "cpupp starts everything on a host through this connection"
        yield error(host, "cannot be reached", evidence=message, cause=cause, fix=hint)
    for name, fact in case.facts.items():
        who = f"{fact.user}@{fact.hostname}, {fact.arch}, Linux {fact.kernel}, python3 {fact.python3}"
        yield ok(name, "reached", who)


@check(
    "CPU",
    "cores, NUMA nodes and the share that the cgroup grants",
    severities="warning",
    why="more threads than the quota grants are put to sleep in the middle of a step",
    fix="raise the CPU quota of the cgroup, or let the plan use fewer cores",
)
def cpu(case: Case) -> Iterator[Finding]:
    """What each host may run on, and a cgroup quota below it."""
    for name, fact in case.facts.items():
        cores = len({(c.socket, c.core) for c in fact.cpus})
        nodes = len({c.numa for c in fact.cpus})
        evidence = f"{len(fact.cpus)} CPUs, {cores} cores, {nodes} NUMA node{'s' if nodes > 1 else ''}"
        if fact.cpu_quota is not None and fact.cpu_quota < cores:
            cause = "more threads than the quota grants are put to sleep in the middle of a step"
            fix = f"the plan uses {max(1, int(fact.cpu_quota))}; raise the cgroup's CPU quota for more"
            evidence += f", cgroup quota {fact.cpu_quota:g} cores"
            yield warning(name, "CPU quota below its cores", evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, f"{cores} cores", evidence)


@check(
    "CPU-ISA",
    "vector instructions of each host, and whether they are equal",
    severities="error warning",
    why="vLLM's x86 builds need AVX2 and die of SIGILL without; on unequal CPUs the weakest sets the pace",
    fix="leave the host out, or give it fewer layers",
)
def cpu_isa(case: Case) -> Iterator[Finding]:
    """vllm #18660: SIGILL; a mixed cluster chooses kernels host by host."""
    best = {name: _isa(fact) for name, fact in case.facts.items()}
    for name, level in best.items():
        if case.facts[name].arch == "x86_64" and not level:
            cause = "vLLM's x86 builds need AVX2: the ranks would die of SIGILL"
            yield error(name, "no AVX2", evidence="flags of /proc/cpuinfo", cause=cause, fix="leave this host out")
        else:
            yield ok(name, level or case.facts[name].arch, " ".join(case.facts[name].isa))
    if len(set(best.values())) > 1:
        cause = "the slowest stage sets the pace, and results may differ in the last bits"
        yield warning("", "CPUs differ", evidence=table(best), cause=cause, fix="give the weaker host fewer layers")


def _isa(fact: HostFacts) -> str:
    flags = set(fact.isa)
    for name, needs in (("AMX", {"amx_tile"}), ("AVX-512", {"avx512f"}), ("AVX2", {"avx2"}), ("SVE", {"sve"})):
        if needs <= flags:
            return name
    return "NEON" if "asimd" in flags else ""


@check(
    "MEMORY",
    "memory of the machine, its NUMA nodes and the cgroup",
    severities="warning",
    why="the kernel kills what goes beyond the limit, with signal 9 and without a word",
    fix="raise the limit of the cgroup; the plan counts with it",
)
def memory(case: Case) -> Iterator[Finding]:
    """Totals; whether the plan fits is the check PLAN."""
    for name, fact in case.facts.items():
        evidence = f"{gib(fact.memory_total)} in all, {gib(fact.memory_available)} available"
        for node in fact.numa:
            evidence += f", NUMA node {node.node} {gib(node.memory_total)}"
        if fact.memory_limit is not None and fact.memory_limit < fact.memory_total:
            cause = "the kernel kills what goes beyond the cgroup's limit, with signal 9 and without a word"
            evidence += f", cgroup limit {gib(fact.memory_limit)}"
            fix = "the plan counts with the limit; raise it for more"
            yield warning(name, "memory limited by the cgroup", evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, f"{gib(fact.memory_total)} of memory", evidence)


@check(
    "LIMITS",
    "open files that a process of this user may have",
    severities="warning",
    why="requests in flight are refused with `Too many open files`",
    fix="raise `ulimit -n`, for sshd's sessions",
)
def limits(case: Case) -> Iterator[Finding]:
    """The API server holds a socket for each request in flight."""
    for name, fact in case.facts.items():
        nofile = fact.ulimits.get("nofile", -1)
        if 0 <= nofile < MIN_OPEN_FILES:
            fix = f"ulimit -n {MIN_OPEN_FILES * 16}, or LimitNOFILE= of the service that runs sshd"
            cause = "requests in flight are refused with `Too many open files`"
            yield warning(name, "few open files allowed", evidence=f"ulimit -n: {nofile}", cause=cause, fix=fix)
