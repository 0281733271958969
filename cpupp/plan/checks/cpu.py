"""Checks of the CPUs: cores, instructions, quota, the threads of the plan. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.plan.amounts import count
from cpupp.plan.asking import written
from cpupp.plan.checks.wording import sudo, table, there
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Case, Finding, check, error, info, ok, warning
from cpupp.plan.grid import make_grid, slots_equation
from cpupp.plan.threads import plan_cores

SLOW_GOVERNORS = {"powersave", "conservative"}
BIND_ENV, THREADS_ENV = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"


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
        evidence = ", ".join((count(len(fact.cpus), "CPU"), count(cores, "core"), count(nodes, "NUMA node")))
        if fact.cpu_quota is not None and fact.cpu_quota < cores:
            cause = "more threads than the quota grants are put to sleep in the middle of a step"
            fix = f"the plan uses {max(1, int(fact.cpu_quota))}; raise the cgroup's CPU quota for more"
            evidence += f", cgroup quota {fact.cpu_quota:g} cores"
            yield warning(name, "CPU quota below its cores", evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, count(cores, "core"), evidence)


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
    "CPU-SET",
    "the session may use all CPUs of the machine",
    severities="info",
    why="a cpuset, taskset or container holds it to some of them; the plan counts with those alone",
    fix="nothing, if that is meant; else look at `taskset -p` and at the cpuset of the service that runs sshd",
    needs=("health",),
)
def cpu_set(case: Case) -> Iterator[Finding]:
    """CPUs that are online against those of the affinity mask; threads of one core are one core to the plan."""
    for name, health in case.health.items():
        allowed = len(case.facts[name].cpus)
        smt = ", two hardware threads a core: ranks use one of them" if health.threads_per_core > 1 else ""
        if allowed < health.online:
            evidence = f"sched_getaffinity: {_ranges(c.cpu for c in case.facts[name].cpus)}{smt}"
            cause = "a cpuset, taskset or container holds the session to some of the CPUs"
            yield info(name, f"may use {allowed} of {health.online} CPUs", evidence, cause=cause)
        else:
            yield ok(name, f"may use all {allowed} CPUs{smt}")


def _ranges(cpus: Iterator[int]) -> str:
    found: list[list[int]] = []
    for cpu in sorted(cpus):
        if found and found[-1][1] == cpu - 1:
            found[-1][1] = cpu
        else:
            found.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


@check(
    "CPU-THREADS",
    "every rank has cores of its own, as many as its host grants, and one is left for the engine on the head",
    severities="error warning",
    why="threads beyond the quota or on a core of another rank wait in the middle of each step, and all wait for them",
    fix="fewer slots on that host, or `hosts[].cores`; leave VLLM_CPU_OMP_THREADS_BIND to cpupp",
)
def cpu_threads(case: Case) -> Iterator[Finding]:
    """vllm #25818, #35789: the plan's cores against cpuset and quota, and what the file itself says of threads."""
    if case.spec is None or slots_equation(case.spec) is not None:
        return
    grid = make_grid(case.spec)
    planned = plan_cores(case.spec, grid, case.facts)
    for text in planned.warnings:
        where, _, what = text.partition(": ")
        cause = "ranks and the engine wait for each other's cores in the middle of a step"
        if "engine" in what:
            fix = "put a host with more cores first (it becomes the head), or grant this one more CPUs"
        else:
            fix = "give fewer slots to these entries, or hosts[].cores that do not overlap"
        title, evidence = (what, where) if what else (text, "the plan's cores")
        yield warning("", title, evidence=evidence, cause=cause, fix=fix)
    for host in case.spec.hosts:
        fact = case.facts.get(host.name)
        if fact is None:
            continue
        ranks = [seat.rank for seat in grid.seats if seat.host == host.name]
        env = written(case.spec, host.name)
        cores = {cpu for rank in ranks for cpu in planned.cores[rank]}
        if BIND_ENV in env:
            yield from _own_binding(host.name, fact, env[BIND_ENV])
        elif env.get(THREADS_ENV, "").isdigit() and int(env[THREADS_ENV]) * len(ranks) > len(cores):
            share = f"{count(len(ranks), 'rank')} on {count(len(cores), 'core')}"
            evidence = f"engine.env: {THREADS_ENV}={env[THREADS_ENV]}, {share}"
            cause = "more threads than cores wait for each other in the middle of a step"
            yield warning(host.name, "more threads than cores", evidence=evidence, cause=cause, fix="leave it out")
        else:
            spare = (
                f", core {_ranges(iter(planned.reserved))} for the engine" if 0 in ranks and planned.reserved else ""
            )
            each = "; ".join(f"rank {rank}: {_ranges(iter(planned.cores[rank])) or '?'}" for rank in ranks)
            yield ok(host.name, f"{count(len(cores), 'thread')}{spare}", each)


def _own_binding(name: str, fact: HostFacts, text: str) -> Iterator[Finding]:
    allowed = {cpu.cpu for cpu in fact.cpus}
    wanted: set[int] = set()
    for part in text.replace("|", ",").split(","):
        low, _, high = part.strip().partition("-")
        if low.isdigit():
            wanted |= set(range(int(low), int(high if high.isdigit() else low) + 1))
    evidence = f"{BIND_ENV}={text}, the host grants {_ranges(iter(allowed))}"
    if wanted - allowed:
        cause = "binding to a CPU that the cpuset does not grant fails at the start"
        fix = f"leave {BIND_ENV} out: cpupp sets it"
        yield error(name, "threads bound to CPUs that are not there", evidence=evidence, cause=cause, fix=fix)
    else:
        yield ok(name, "threads as the file binds them", evidence)


@check(
    "CPU-GOVERNOR",
    "the frequency governor does not hold the cores back",
    severities="info",
    why="between the short steps of decoding a core falls back to a low frequency",
    fix="sudo cpupower frequency-set -g performance",
    needs=("health",),
)
def cpu_governor(case: Case) -> Iterator[Finding]:
    """/sys/.../cpufreq/scaling_governor; virtual machines have none."""
    for name, health in case.health.items():
        slow = sorted(SLOW_GOVERNORS.intersection(health.governors))
        if slow:
            cause = "between the short steps of decoding a core may fall back to a low frequency; measure both"
            fix = there(name, f"{sudo(case.facts[name])}cpupower frequency-set -g performance", for_good=False)
            yield info(name, f"CPU governor {', '.join(slow)}", "scaling_governor", cause=cause, fix=fix)
        elif health.governors:
            yield ok(name, f"CPU governor {', '.join(health.governors)}")


@check(
    "CPU-LOAD",
    "nothing else uses the cores",
    severities="warning",
    why="each step takes as long as the slowest rank, so one busy core slows all hosts",
    fix="end or move what runs there, or leave cores to it with `hosts[].cores`",
    needs=("health",),
)
def cpu_load(case: Case) -> Iterator[Finding]:
    """The load average of the last minute against the cores."""
    for name, health in case.health.items():
        cores = len({(c.socket, c.core) for c in case.facts[name].cpus})
        evidence = f"load average {health.load:.1f}, {count(cores, 'core')}"
        if health.load > max(1.5, 0.75 * max(cores, health.online)):
            cause = "each step takes as long as the slowest rank, so a busy core slows all hosts"
            yield warning(name, "busy with other work", evidence=evidence, cause=cause, fix="see it with `top`")
        else:
            yield ok(name, "idle", evidence)
