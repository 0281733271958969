"""Checks of the model folder. Pure; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from cpupp.plan.checks.wording import gib, table
from cpupp.plan.findings import Case, Finding, check, error, ok
from cpupp.plan.model import model_facts
from cpupp.plan.refusals import brings_tokenizer


@check(
    "MODEL",
    "the model folder is there and can be read",
    severities="error",
    why="every host reads its own layers from its own copy",
    fix="copy the folder to the same path on every host, or download a hub id there",
)
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
            what = f"{facts.architecture}, {facts.num_layers} layers, {gib(folder.files_bytes)}"
            yield ok(name, what, folder.path)


@check(
    "MODEL-PARITY",
    "all hosts have the same snapshot of the model",
    severities="error",
    why="stages of different snapshots give wrong answers without an error",
    fix="copy one snapshot to every host, for example with `rsync -a`",
)
def model_parity(case: Case) -> Iterator[Finding]:
    """spark-vllm-docker #146: compared by a hash over config.json and the safetensors headers."""
    if case.spec is None:
        return
    values = {name: fact.model.digest[:12] for name, fact in case.facts.items() if not fact.model.error}
    if len(set(values.values())) > 1:
        cause = "stages of different snapshots give wrong answers without an error"
        fix = "copy one snapshot to every host, for example with rsync -a"
        yield error("", "the model differs between hosts", evidence=table(values), cause=cause, fix=fix)
    elif len(values) > 1:
        yield ok("", "same model everywhere", next(iter(values.values())))
