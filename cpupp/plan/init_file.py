"""The cluster file that `cpupp init` writes: names, slots and sizes from what the hosts said, with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpupp.errors import CpuppError
from cpupp.plan.amounts import count
from cpupp.plan.auto import settle_parallel
from cpupp.plan.cluster import NAME_PATTERN, ClusterSpec, parse_ssh
from cpupp.plan.facts import HostFacts
from cpupp.plan.network import Endpoint, data_plane, everything_is_here
from cpupp.plan.plan import make_plan

HERE = ("local", "localhost")
NO_MODEL = "/path/to/the/model"
GIB = 1 << 30
_PLAIN = re.compile(r"[A-Za-z/~][A-Za-z0-9_./@-]*(:\d+)?|\d+\.\d+\.\d+\.\d+")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found on one host. engines: (Python with vLLM, its version); models: folders with a config.json."""

    hostname: str
    home: str
    engines: tuple[tuple[str, str], ...]
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A cluster file in the making. refused: why `cpupp plan` would refuse it, empty when it would not."""

    spec: ClusterSpec
    facts: Mapping[str, HostFacts]
    found: Mapping[str, Found]
    reason: str
    refused: tuple[CpuppError, ...]


def entry_names(targets: Sequence[str], found: Sequence[Found]) -> list[str]:
    """A name for each host: its own, where that is a name and no other's; else as it was asked for; else h1, h2, ..."""
    own = [each.hostname.partition(".")[0] for each in found]
    asked = [(parse_ssh(target) or ("", target, None))[1] for target in targets]
    for names in (own, asked):
        if len(set(names)) == len(names) and all(re.match(NAME_PATTERN, name) and name not in HERE for name in names):
            return names
    return [f"h{number}" for number in range(1, len(targets) + 1)]


def choose_pythons(found: Mapping[str, Found]) -> dict[str, str]:
    """Host -> the Python to use: of the newest vLLM that all hosts have, at one path where there is one."""
    common = set.intersection(*({version for _, version in each.engines} for each in found.values()))
    newest = max(common, key=_version, default="")
    paths = {
        name: [_short(path, each.home) for path, version in each.engines if version == newest or not newest]
        for name, each in found.items()
    }
    shared = [path for path in next(iter(paths.values())) if all(path in others for others in paths.values())]
    if shared:
        return dict.fromkeys(paths, shared[0])
    return {name: own[0] if own else "python3" for name, own in paths.items()}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _short(path: str, home: str) -> str:
    return f"~{path[len(home) :]}" if home != "/" and path.startswith(f"{home}/") else path


def first_spec(name: str, targets: Sequence[str], names: Sequence[str], model: str, pythons: Mapping[str, str]) -> Any:
    """The mapping of a file with one rank a host: enough to ask the hosts by."""
    general = next(iter(pythons.values())) if len(set(pythons.values())) == 1 else None
    hosts: list[dict[str, Any]] = []
    for target, host in zip(targets, names, strict=True):
        entry: dict[str, Any] = {"name": host, **({"local": True} if target in HERE else {"ssh": target})}
        if general is None and host in pythons:
            entry["engine"] = {"python": pythons[host]}
        hosts.append(entry)
    engine = {"python": general} if general else {}
    return {"name": name, "model": {"path": model}, "parallel": "auto", "hosts": hosts, "engine": engine}


def draft(data: Any, facts: Mapping[str, HostFacts], found: Mapping[str, Found]) -> Draft:
    """Choose slots and sizes: a rank for each NUMA node where that can be launched, else a rank for each host."""
    by_numa = {name: len({cpu.numa for cpu in fact.cpus}) for name, fact in facts.items()}
    refused: list[CpuppError] = []
    drafts = []
    for slots in (by_numa, dict.fromkeys(by_numa, 1)):
        spec = ClusterSpec.model_validate(
            {**data, "hosts": [{**host, "slots": slots[host["name"]]} for host in data["hosts"]]}
        )
        try:
            plan = make_plan(spec, facts)
        except CpuppError as error:
            refused = list(getattr(error, "errors", [error]))
            settled, reason = settle_parallel(spec, None, facts)
        else:
            settled, reason = settle_parallel(spec, plan.model_facts, facts)
            refused = []
        drafts.append(Draft(spec=settled, facts=facts, found=found, reason=reason, refused=tuple(refused)))
        if not refused:
            return drafts[-1]
    return drafts[-1]


def file_text(made: Draft, schema: str) -> str:
    """The whole file. schema: path or address of the JSON Schema, for editors."""
    spec = made.spec
    lines = [f"# yaml-language-server: $schema={schema}"]
    lines.append("# Written by `cpupp init` from what the hosts said; docs/yaml.md lists every key.")
    lines += [f"name: {_scalar(spec.name)}", "model:"]
    lines += _model_lines(made)
    lines += ["", f"# {made.reason}"] if made.reason else [""]
    lines.append(f"parallel: {{pipeline: {spec.parallel.pipeline}, tensor: {spec.parallel.tensor}}}")
    lines += ["", "hosts:                # in rank order; the first one is the head, which serves the API"]
    endpoints = _endpoints(made)
    for host in spec.hosts:
        lines += _host_lines(made, host.name, endpoints)
    lines += ["", "engine:", *_engine_lines(made)]
    lines += ["", "serve:", "  host: 127.0.0.1     # 0.0.0.0 for other machines, and then a key: docs/security.md"]
    lines.append(f"  port: {spec.serve.port}")
    return "\n".join(lines) + "\n"


def _model_lines(made: Draft) -> list[str]:
    spec = made.spec
    fact = next((fact.model for fact in made.facts.values() if not fact.model.error), None)
    if spec.model.path != NO_MODEL:
        note = f"  # {fact.files_bytes / GIB:.1f} GiB of weights" if fact and fact.files_bytes else ""
        return [f"  path: {_scalar(spec.model.path)}{note}"]
    lines = [f"  path: {NO_MODEL}  # <- change: a folder that every host has, or a hub id in every host's cache"]
    shared = set.intersection(*(set(each.models) for each in made.found.values()))
    return [*(f"  # on every host: {_comment(path)}" for path in sorted(shared)), *lines]


def _endpoints(made: Draft) -> dict[str, Endpoint]:
    if everything_is_here(made.spec) or len(made.spec.hosts) == 1:
        return {}
    try:
        return data_plane(made.spec, made.facts)
    except CpuppError:
        return {}


def _host_lines(made: Draft, name: str, endpoints: Mapping[str, Endpoint]) -> list[str]:
    host = next(host for host in made.spec.hosts if host.name == name)
    fact = made.facts[name]
    nodes = len({cpu.numa for cpu in fact.cpus})
    cores = len({(cpu.socket, cpu.core) for cpu in fact.cpus})
    memory = f"{fact.memory_total / GIB:.0f} GiB"
    lines = [f"  - name: {_scalar(name)}"]
    lines.append(f"    # {_comment(fact.hostname)}: {count(cores, 'core')}, {count(nodes, 'NUMA node')}, {memory}")
    lines.append("    local: true" if host.local else f"    ssh: {_scalar(host.ssh or '')}")
    if name in endpoints:
        place = endpoints[name]
        lines.append(f"    address: {_scalar(place.address)}  # {_comment(place.interface)}: {place.reason}")
    lines.append(f"    slots: {host.slots}")
    if host.engine.python:
        lines.append(f"    engine: {{python: {_scalar(host.engine.python)}}}")
    return lines


def _engine_lines(made: Draft) -> list[str]:
    lines = []
    for name, each in made.found.items():
        for path, version in each.engines:
            lines.append(f"  # found on {name}: vLLM {_comment(version)} in {_comment(_short(path, each.home))}")
        if not each.engines:
            lines.append(f"  # found on {name}: no vLLM in the usual places; name the Python that has it")
    if not any(host.engine.python for host in made.spec.hosts):
        lines.append(f"  python: {_scalar(made.spec.engine.python)}")
    return [*lines, "  args: {}            # of `vllm serve`, without dashes: max_model_len: 4096"]


def _comment(text: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", text)


def _scalar(text: str) -> str:
    """Text as YAML, quoted where it could be anything else."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else json.dumps(text)
