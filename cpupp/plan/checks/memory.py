"""Checks of memory and of the limits of processes. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.plan.checks.wording import gib, sudo, there
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Case, Finding, check, info, ok, warning
from cpupp.plan.partition import GIB

MIN_OPEN_FILES = 4096
MIN_PROCESSES = 2048
UNEVEN = 1.25
THP = "/sys/kernel/mm/transparent_hugepage/enabled"


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
    "MEMORY-NUMA",
    "every NUMA node with CPUs has memory of its own, equal amounts",
    severities="warning info",
    why="weights of a rank lie on its own NUMA node; from another node they are read at half the speed or less",
    fix="populate the memory channels of every socket equally, or give that host `hosts[].cores` of the full nodes",
)
def memory_numa(case: Case) -> Iterator[Finding]:
    """vllm #15800: what a rank may need must fit its NUMA node; whether it does is the check PLAN."""
    for name, fact in case.facts.items():
        sizes = {node.node: node.memory_total for node in fact.numa}
        evidence = ", ".join(f"node {node}: {gib(size)}" for node, size in sizes.items())
        bare = sorted({cpu.numa for cpu in fact.cpus} - set(sizes))
        if sizes and bare:
            cause = "ranks on its cores read all weights over the link between sockets"
            fix = "give hosts[].cores of the other nodes alone, or fill its memory slots"
            title = f"NUMA node {bare[0]} has CPUs but no memory"
            yield warning(name, title, evidence=evidence, cause=cause, fix=fix)
        elif len(sizes) > 1 and max(sizes.values()) > UNEVEN * min(sizes.values()):
            yield info(name, "NUMA nodes with unequal memory", evidence, cause="the smallest one limits its ranks")
        elif sizes:
            yield ok(name, f"{len(sizes)} NUMA node{'s' if len(sizes) > 1 else ''} with memory", evidence)


@check(
    "MEMORY-SWAP",
    "the machine does not swap",
    severities="warning",
    why="weights that were swapped out come back from disk at each token",
    fix="find what takes the memory with `top -o RES`; `sudo swapoff -a` once it fits",
    needs=("health",),
)
def memory_swap(case: Case) -> Iterator[Finding]:
    """Swap in use, not swap that is there."""
    for name, health in case.health.items():
        used = health.swap_total - health.swap_free
        evidence = f"/proc/meminfo: {gib(used)} of {gib(health.swap_total)} used"
        if used > GIB // 2:
            cause = "weights that were swapped out come back from disk at each token"
            yield warning(name, "it swaps", evidence=evidence, cause=cause, fix="free memory there: top -o RES")
        else:
            yield ok(name, "no swap in use", evidence)


@check(
    "MEMORY-PAGES",
    "transparent huge pages are allowed",
    severities="info",
    why="with pages of 4 KiB alone, reading weights misses the TLB more often: some percent of speed",
    fix=f"echo madvise | sudo tee {THP}",
    needs=("health",),
)
def memory_pages(case: Case) -> Iterator[Finding]:
    """/sys/kernel/mm/transparent_hugepage/enabled."""
    for name, health in case.health.items():
        if health.huge_pages == "never":
            cause = "reading weights misses the TLB more often"
            fix = there(name, f"echo madvise | {sudo(case.facts[name])}tee {THP}", for_good=False)
            yield info(name, "no transparent huge pages", "never", cause=cause, fix=fix)
        elif health.huge_pages:
            yield ok(name, f"transparent huge pages: {health.huge_pages}")


@check(
    "MEMORY-OVERCOMMIT",
    "memory may be reserved beyond what is used",
    severities="warning",
    why="torch and the API server reserve far more than they use, and fork; strict accounting refuses that",
    fix="sudo sysctl vm.overcommit_memory=0",
    needs=("health",),
)
def memory_overcommit(case: Case) -> Iterator[Finding]:
    """vm.overcommit_memory 2 counts what is reserved, not what is used."""
    for name, health in case.health.items():
        if health.overcommit == 2:
            evidence = f"vm.overcommit_memory=2, {gib(max(0, health.commit_left))} may still be reserved"
            cause = "torch reserves more than it uses, and fork counts twice: `Cannot allocate memory`"
            fix = there(name, f"{sudo(case.facts[name])}sysctl vm.overcommit_memory=0", for_good=False)
            yield warning(name, "strict accounting of memory", evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, f"vm.overcommit_memory={health.overcommit}")


@check(
    "LIMITS",
    "limits of this user's processes: open files, processes, address space",
    severities="warning",
    why="requests in flight are refused with `Too many open files`, threads cannot start, memory cannot be reserved",
    fix="raise `ulimit -n`, `-u`, `-v` for sshd's sessions: /etc/security/limits.conf, or Limit...= of its service",
)
def limits(case: Case) -> Iterator[Finding]:
    """The API server holds a socket for each request in flight; OpenMP starts a thread for each core."""
    for name, fact in case.facts.items():
        bad = list(_low_limits(name, fact))
        yield from bad
        if not bad:
            shown = {key: fact.ulimits[key] for key in ("nofile", "nproc", "memlock", "as") if key in fact.ulimits}
            yield ok(name, "limits suffice", ", ".join(f"{k} {_limit(v)}" for k, v in shown.items()))


def _low_limits(name: str, fact: HostFacts) -> Iterator[Finding]:
    nofile, nproc, space = (fact.ulimits.get(key, -1) for key in ("nofile", "nproc", "as"))
    if 0 <= nofile < MIN_OPEN_FILES:
        fix = _raised(name, fact, "nofile", str(MIN_OPEN_FILES * 16), "LimitNOFILE=")
        cause = "requests in flight are refused with `Too many open files`"
        yield warning(name, "few open files allowed", evidence=f"ulimit -n: {nofile}", cause=cause, fix=fix)
    if 0 <= nproc < MIN_PROCESSES:
        fix = _raised(name, fact, "nproc", str(MIN_PROCESSES * 8), "TasksMax=")
        cause = "OpenMP, torch and the API server start hundreds of threads, which count"
        yield warning(name, "few processes allowed", evidence=f"ulimit -u: {nproc}", cause=cause, fix=fix)
    if space >= 0:
        fix = _raised(name, fact, "as", "unlimited", "LimitAS=")
        cause = "torch reserves far more address space than memory: `std::bad_alloc`"
        yield warning(name, "address space limited", evidence=f"ulimit -v: {gib(space)}", cause=cause, fix=fix)


def _raised(name: str, fact: HostFacts, limit: str, value: str, setting: str) -> str:
    """A limit that new sessions have; `ulimit` changes the shell alone that it is typed in."""
    tee = f"{sudo(fact)}tee -a /etc/security/limits.conf"
    line = there(name, f"echo '{fact.user} - {limit} {value}' | {tee}")
    return f"{line}; new sessions have it (or {setting} of the service that runs sshd)"


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)
