"""Checks of the libraries that ranks preload. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from cpupp.plan.asking import PRELOAD_ENV, openmp_libraries, preloads, written
from cpupp.plan.checks.wording import sudo, there
from cpupp.plan.findings import Case, Finding, check, error, ok, warning


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
            fix = there(name, f"{sudo(fact)}apt-get install libtcmalloc-minimal4")
            cause = "the allocator of glibc is slower under many threads; vLLM 0.18 refuses to start"
            yield warning(name, "libtcmalloc not found", evidence="ldconfig, library folders", cause=cause, fix=fix)
        if not fact.engine.iomp and fact.arch == "x86_64" and not fact.engine.error:  # else ENGINE tells
            fix = there(name, f"{shlex.quote(fact.engine.python)} -m pip install intel-openmp")
            cause = "threads run on gomp: slower; vLLM 0.18 refuses to start"
            yield warning(name, "libiomp5 not found", evidence="the engine's lib, ldconfig", cause=cause, fix=fix)
        if fact.engine.tcmalloc and (fact.engine.iomp or fact.arch != "x86_64"):
            yield ok(name, "preload libraries found", f"{fact.engine.tcmalloc} {fact.engine.iomp}".strip())


@check(
    "PRELOAD-LOAD",
    "the host's loader takes every library that is to be preloaded",
    severities="error",
    why="the loader says so on stderr and goes on without it: vLLM is slow, or refuses to start",
    fix="install the library on that host, built for its CPU and glibc; correct LD_PRELOAD under `engine.env`",
    needs=("health",),
)
def preload_load(case: Case) -> Iterator[Finding]:
    """gpustack #5660: tried on the host itself, with a program that does nothing."""
    for name, health in case.health.items():
        for found in health.preloads:
            if found.error:
                own = case.spec is not None and PRELOAD_ENV in written(case.spec, name)
                cause = "the loader goes on without it: slow, or refused by vLLM 0.18"
                fix = f"install it there, or correct engine.env.{PRELOAD_ENV}" if own else "install the package anew"
                evidence = f"LD_PRELOAD={found.path}: {found.error}"
                title = f"{found.path.rpartition('/')[2]} cannot be preloaded"
                yield error(name, title, evidence=evidence, cause=cause, fix=fix)
        if health.preloads and not any(found.error for found in health.preloads):
            yield ok(name, "the loader takes them", " ".join(found.path for found in health.preloads))


@check(
    "PRELOAD-CONFLICT",
    "one OpenMP library and cpupp's own list are preloaded",
    severities="error warning",
    why="two OpenMP libraries in one process each start a thread for every core: slow, or `OMP: Error #15`",
    fix="leave LD_PRELOAD out of `engine.env`: cpupp finds tcmalloc and libiomp5 on each host",
)
def preload_conflict(case: Case) -> Iterator[Finding]:
    """Two OpenMP libraries, or a list of the file that goes without the usual ones."""
    for name, fact in case.facts.items():
        paths = preloads(case.spec, name, fact)
        several = openmp_libraries(paths)
        own = case.spec is not None and PRELOAD_ENV in written(case.spec, name)
        fix = f"leave {PRELOAD_ENV} out of engine.env: cpupp finds the libraries on each host"
        if len(several) > 1:
            cause = "each starts a thread for every core, and they spin against each other"
            evidence = f"{PRELOAD_ENV}={':'.join(paths)}"
            yield error(name, "two OpenMP libraries are preloaded", evidence=evidence, cause=cause, fix=fix)
        elif own and set(filter(None, (fact.engine.tcmalloc, fact.engine.iomp))) - set(paths):
            missing = set(filter(None, (fact.engine.tcmalloc, fact.engine.iomp))) - set(paths)
            cause = "the file's list replaces cpupp's"
            title = f"{PRELOAD_ENV} of the file goes without {', '.join(sorted(p.rpartition('/')[2] for p in missing))}"
            yield warning(name, title, evidence=f"engine.env: {':'.join(paths)}", cause=cause, fix=fix)
        elif paths:
            yield ok(name, "one OpenMP library at most is preloaded")
