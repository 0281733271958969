"""Checks of the model folder. Pure; sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cpupp.plan.checks.wording import copied, gib, table
from cpupp.plan.findings import Case, Finding, check, error, ok, warning
from cpupp.plan.model import model_facts
from cpupp.plan.refusals import brings_tokenizer

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
MIN_DISK = 1 << 30


@check(
    "MODEL",
    "the model folder is there and can be read",
    severities="error",
    why="every host reads its own layers from its own copy",
    fix="copy the folder to the same path on every host, or download a hub id there",
    needs=("health",),
)
def model(case: Case) -> Iterator[Finding]:
    """config.json and the headers of the weights, as each host sees them."""
    if case.spec is None:
        return
    for name, fact in case.facts.items():
        folder = fact.model
        if folder.error:
            cause = "every host reads its own layers from its own copy"
            fix = _model_fix(case, name)
            title = f"model {case.spec.model.path} cannot be read"
            yield error(name, title, evidence=folder.error, cause=cause, fix=fix)
            continue
        if not folder.tokenizer and not brings_tokenizer(case.spec):
            cause = "vLLM turns text into tokens with it, and does not start without"
            fix = "copy tokenizer.json and tokenizer_config.json there, or set engine.args.tokenizer"
            yield error(name, "the model has no tokenizer", evidence=folder.path, cause=cause, fix=fix)
        try:
            facts = model_facts(folder)
        except ValueError as problem:
            cause = "cpupp runs decoder language models"
            evidence = f"{folder.path}/config.json: {problem}"
            yield error(name, "config.json is no decoder's", evidence=evidence, cause=cause, fix="check the folder")
        else:
            what = f"{facts.architecture}, {facts.num_layers} layers, {gib(folder.files_bytes)}"
            yield ok(name, what, folder.path)


def _model_fix(case: Case, name: str) -> str:
    """What brings the model there: a copy from a host that has it, or from the hub where that can be reached."""
    assert case.spec is not None
    path = case.spec.model.path
    having = next((fact for fact in case.facts.values() if not fact.model.error), None)
    if having is not None:
        return copied(case.spec, having, case.facts[name])
    if HUB_ID.fullmatch(path):
        hub = case.health[name].hub if name in case.health else ""
        if hub not in ("", "reachable"):
            where = f"the hub cannot be reached from {name} ({hub})"
            return f"{where}: download {path} elsewhere, copy the folder, give its path as model.path"
        return f"on {name}: hf download {path}"
    return f"copy the folder to {name}, at the same path"


@check(
    "MODEL-PARITY",
    "all hosts have the same snapshot of the model",
    severities="error",
    why="stages of different snapshots give wrong answers without an error",
    fix="copy one snapshot to every host",
    needs=("health",),
)
def model_parity(case: Case) -> Iterator[Finding]:
    """spark-vllm-docker #146: compared by a hash over config.json and the safetensors headers."""
    if case.spec is None:
        return
    values = {name: fact.model.digest[:12] for name, fact in case.facts.items() if not fact.model.error}
    if len(set(values.values())) > 1:
        cause = "stages of different snapshots give wrong answers without an error"
        fix = _parity_fix(case)
        evidence = _differing(case) or table(values)
        yield error("", "the model differs between hosts", evidence=evidence, cause=cause, fix=fix)
    elif len(values) > 1:
        yield ok("", "same model everywhere", next(iter(values.values())))


def _parity_fix(case: Case) -> str:
    """The command that brings the first host's snapshot to one that has another."""
    seen = {
        name: (fact.model.digest, case.health[name].model_files if name in case.health else {})
        for name, fact in case.facts.items()
        if not fact.model.error
    }
    first = next(iter(seen))
    others = [name for name, what in seen.items() if what != seen[first]]
    source, target = case.facts[first], case.facts[others[0]]
    assert case.spec is not None
    so_too = f"; and so to {', '.join(others[1:])}" if len(others) > 1 else ""
    return f"if {first} has the right one, {copied(case.spec, source, target, instead=True)}{so_too}"


def _differing(case: Case) -> str:
    """Which files differ, with size and digest on each host."""
    texts = []
    for file in _differing_files(case):
        told = {name: health.model_files.get(file, "none") for name, health in case.health.items()}
        texts.append(f"{file} ({table(told)})")
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more files" if len(texts) > 3 else "")


def _differing_files(case: Case) -> list[str]:
    health = {name: h for name, h in case.health.items() if name in case.facts and not case.facts[name].model.error}
    files = sorted({file for h in health.values() for file in h.model_files})
    return [file for file in files if len({h.model_files.get(file) for h in health.values()}) > 1]


@check(
    "MODEL-FILES",
    "tokenizer and settings beside the weights are equal on all hosts, and every file can be read",
    severities="error warning",
    why="the head's tokenizer and settings decide; other ones elsewhere show that the folders are not one snapshot",
    fix="copy one snapshot to every host; `chmod -R a+rX` for files that cannot be read",
    needs=("health",),
)
def model_files(case: Case) -> Iterator[Finding]:
    """Size and digest of the small files, and the rights of all."""
    if case.spec is None:
        return
    for name, health in case.health.items():
        if health.unreadable:
            evidence = ", ".join(health.unreadable[:3])
            user = case.facts[name].user
            fix = f"on {name}: chmod -R a+rX {case.facts[name].model.path}"
            cause = f"vLLM would fail while it loads: {user} may not read them"
            yield error(name, "files of the model cannot be read", evidence=evidence, cause=cause, fix=fix)
    small = [file for file in _differing_files(case) if file != "config.json" and not file.endswith(".safetensors")]
    if small:
        told = {file: table({n: h.model_files.get(file, "none") for n, h in case.health.items()}) for file in small[:3]}
        evidence = "; ".join(f"{file} ({text})" for file, text in told.items())
        cause = "the head's files decide, but the folders are not one snapshot"
        fix = _parity_fix(case)
        yield warning("", "the model's small files differ", evidence=evidence, cause=cause, fix=fix)
    elif len(case.health) > 1:
        yield ok("", "tokenizer and settings are equal everywhere")


@check(
    "DISK",
    "there is room for the caches of vLLM and the files of a run",
    severities="warning",
    why="compiled code, logs and site folders are written there; a full disk ends a run in the middle",
    fix="free some space, or point XDG_CACHE_HOME (`engine.env`, VLLM_CACHE_ROOT) to another disk",
    needs=("health",),
)
def disk(case: Case) -> Iterator[Finding]:
    """Free bytes where vLLM compiles to and cpupp keeps its site folders."""
    for name, health in case.health.items():
        bad = False
        for place in health.disks:
            if place.free >= MIN_DISK and place.writable:
                continue
            bad = True
            evidence = f"{place.what}: {place.path}, {gib(place.free)} free"
            cause = "compiled code, logs and site folders are written there"
            if not place.writable:
                fix = f"on {name}: give {case.facts[name].user} write access there"
                yield warning(name, f"{place.path} cannot be written", evidence=evidence, cause=cause, fix=fix)
            else:
                fix = f"free some space there: du -xh {place.path} | sort -h | tail"
                yield warning(name, f"little room for {place.what}", evidence=evidence, cause=cause, fix=fix)
        if not bad:
            yield ok(name, "room on disk", ", ".join(f"{p.what} {gib(p.free)}" for p in health.disks))
