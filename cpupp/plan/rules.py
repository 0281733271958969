"""The rules of a cluster file that span several keys, checked on the bare mapping.

They look at what was written, not at the validated spec, so that a wrong key elsewhere does not hide them: all problems
are shown at once. A rule whose input is itself broken stays silent; `problems.shape_problems` reports that input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cpupp.plan.cluster import parse_ssh
from cpupp.plan.command import OWNED_ENV, owner
from cpupp.plan.grid import equation
from cpupp.plan.memory import KV_ENV
from cpupp.plan.network import is_loopback
from cpupp.plan.problems import Path, Problem, describe
from cpupp.plan.secret_rules import keep_problems, key_problems, secret_problems

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


def rule_problems(data: Any) -> list[Problem]:
    """Check every rule as far as the data allows."""
    if not isinstance(data, Mapping):
        return []
    hosts = _hosts(data)
    return [
        *_slots(data, hosts),
        *_layers(data),
        *_duplicate_names(hosts),
        *_ways_in(hosts),
        *_cores(hosts),
        *_loopback(data, hosts),
        *_network(data),
        *_args(data),
        *_env(data, hosts),
        *_secrets(data, hosts),
        *keep_problems(_section(data, "engine")),
    ]


def _section(data: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _hosts(data: Mapping[Any, Any]) -> list[tuple[int, Mapping[Any, Any]]]:
    hosts = data.get("hosts")
    if not isinstance(hosts, list):
        return []
    return [(index, host) for index, host in enumerate(hosts) if isinstance(host, Mapping)]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _slots(data: Mapping[Any, Any], hosts: list[tuple[int, Mapping[Any, Any]]]) -> Iterator[Problem]:
    parallel = data.get("parallel", {})
    if not isinstance(parallel, Mapping) or not hosts or len(hosts) != len(data["hosts"]):
        return
    if parallel.get("auto") is True:
        for key in ("pipeline", "tensor", "layers"):
            if key in parallel:
                path: Path = ("parallel", key)
                hint = "keep `parallel: auto`, or write the sizes without it"
                yield Problem(path=path, code="CONFIG-VALUE", message="auto chooses this itself", hint=hint)
        return
    pipeline, tensor = parallel.get("pipeline", 1), parallel.get("tensor", 1)
    slots = [host.get("slots", 1) for _, host in hosts]
    if not all(map(_is_count, (pipeline, tensor, *slots))):
        return
    wrong = equation(pipeline, tensor, slots)
    if wrong is not None:
        total, world = sum(slots), pipeline * tensor
        fix = f"set pipeline to {total // tensor}, or " if total % tensor == 0 else ""
        hint = f"{fix}make the slots of all hosts sum to {world}"
        path = ("parallel",) if "parallel" in data else ("hosts",)
        yield Problem(path=path, code="PLAN-SLOTS", message=wrong, hint=hint)


def _layers(data: Mapping[Any, Any]) -> Iterator[Problem]:
    parallel = _section(data, "parallel")
    layers, pipeline = parallel.get("layers"), parallel.get("pipeline", 1)
    if not isinstance(layers, list) or not _is_count(pipeline):
        return
    path: Path = ("parallel", "layers")
    if len(layers) != pipeline:
        message = f"has {len(layers)} numbers, pipeline is {pipeline}"
        hint = "give one number of layers for each stage, or leave parallel.layers out"
        yield Problem(path=path, code="PLAN-LAYERS", message=message, hint=hint)
        return
    known = _section(data, "model").get("num_layers")
    if _is_count(known) and all(map(_is_count, layers)) and sum(layers) != known:
        message = f"layers({' + '.join(map(str, layers))} = {sum(layers)}) != model.num_layers({known})"
        yield Problem(path=path, code="PLAN-LAYERS", message=message, hint=f"make parallel.layers sum to {known}")


def _duplicate_names(hosts: list[tuple[int, Mapping[Any, Any]]]) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, host in hosts:
        name = host.get("name")
        if not isinstance(name, str):
            continue
        if name in first:
            yield Problem(
                path=("hosts", index, "name"),
                code="CONFIG-DUPLICATE",
                message=f"host name {name!r} is used twice",
                hint="give every entry its own name; two entries may be one machine",
                also=("hosts", first[name], "name"),
            )
        first.setdefault(name, index)


def _ways_in(hosts: list[tuple[int, Mapping[Any, Any]]]) -> Iterator[Problem]:
    for index, host in hosts:
        local, ssh = host.get("local", False), host.get("ssh")
        if not isinstance(local, bool) or local == (ssh is None):
            continue
        what = "has both `ssh` and `local: true`" if local else "has neither `ssh` nor `local: true`"
        hint = "keep the one that is meant" if local else "add `ssh: user@host:port`, or `local: true` for this machine"
        yield Problem(path=("hosts", index), code="CONFIG-HOST", message=what, hint=hint)


def _cores(hosts: list[tuple[int, Mapping[Any, Any]]]) -> Iterator[Problem]:
    for index, host in hosts:
        cores = host.get("cores")
        if not isinstance(cores, list):
            continue
        path: Path = ("hosts", index, "cores")
        twice = sorted({c for c in cores if type(c) is int and cores.count(c) > 1})
        if not cores:
            hint = "list the CPU numbers, or leave cores out to use all"
            yield Problem(path=path, code="CONFIG-VALUE", message="must not be empty", hint=hint)
        elif twice:
            message = f"CPU {', '.join(map(str, twice))} is listed twice"
            yield Problem(path=path, code="CONFIG-DUPLICATE", message=message, hint="list every CPU once")


def _is_here(host: Mapping[Any, Any]) -> bool:
    if host.get("local") is True:
        return True
    target = parse_ssh(host["ssh"]) if isinstance(host.get("ssh"), str) else None
    return target is not None and is_loopback(target[1])


def _loopback(data: Mapping[Any, Any], hosts: list[tuple[int, Mapping[Any, Any]]]) -> Iterator[Problem]:
    """pytorch #150532: every rank would look for rank 0 on its own machine."""
    if len(hosts) < 2 or all(_is_here(host) for _, host in hosts):
        return
    master = _section(data, "network").get("master_addr")
    if isinstance(master, str) and is_loopback(master):
        message = f"{master} is loopback, but there are {len(hosts)} hosts: each would look for rank 0 on itself"
        hint = "leave master_addr out: cpupp finds the head's address"
        yield Problem(path=("network", "master_addr"), code="NET-MASTER-LOOPBACK", message=message, hint=hint)
    for index, host in hosts:
        address = host.get("address")
        if isinstance(address, str) and is_loopback(address):
            message = f"{address} is loopback, but there are {len(hosts)} hosts: no peer can reach it"
            hint = "give the address that the other hosts reach, or leave it out"
            path: Path = ("hosts", index, "address")
            yield Problem(path=path, code="NET-ADDRESS-LOOPBACK", message=message, hint=hint)


def _network(data: Mapping[Any, Any]) -> Iterator[Problem]:
    network = _section(data, "network")
    interface = network.get("interface")
    if isinstance(interface, str) and re.search(r"[\s,^=*]", interface):
        message = f"{interface!r} is no interface name"
        hint = "one concrete name, or auto (lists and `^lo` crash gloo); names that differ by host need hosts[].address"
        yield Problem(path=("network", "interface"), code="CONFIG-VALUE", message=message, hint=hint)
    port = network.get("master_port")
    if type(port) is int and port == _section(data, "serve").get("port", 8000):
        message = f"{port} is also serve.port, and both are on the head"
        hint = "write `master_port: auto`, or another port"
        yield Problem(path=("network", "master_port"), code="CONFIG-VALUE", message=message, hint=hint)


def _args(data: Mapping[Any, Any]) -> Iterator[Problem]:
    args = _section(data, "engine").get("args")
    if not isinstance(args, Mapping):
        return
    seen: dict[str, Any] = {}
    for key, value in args.items():
        path: Path = ("engine", "args", str(key))
        plain = str(key).lstrip("-").replace("-", "_")
        home = owner(str(key))
        if home is not None:
            hint = f"{home.partition(': ')[2]}: {_REMOVE}" if home.startswith("nothing") else f"use `{home}`"
            yield Problem(path=path, code="CONFIG-OWNED", message="cpupp sets this argument itself", hint=hint)
        elif not _ARG_NAME.fullmatch(str(key)):
            hint = "write the name of a `vllm serve` argument without dashes in front, like max_model_len"
            yield Problem(path=path, code="CONFIG-KEY", message="is no argument name", hint=hint)
        elif plain in seen:
            message = f"is the same argument as {seen[plain]}"
            yield Problem(path=path, code="CONFIG-DUPLICATE", message=message, hint="keep one of them")
        elif isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
            message = f"holds {describe(next(i for i in value if isinstance(i, list | dict)))} inside a list"
            yield Problem(
                path=path, code="CONFIG-VALUE", message=message, hint="an argument takes plain values or JSON"
            )
        seen.setdefault(plain, key)


_REMOVE = "remove the line"


def _env(data: Mapping[Any, Any], hosts: list[tuple[int, Mapping[Any, Any]]]) -> Iterator[Problem]:
    yield from _env_of(("engine", "env"), _section(data, "engine").get("env"))
    for index, host in hosts:
        yield from _env_of(("hosts", index, "engine", "env"), _section(host, "engine").get("env"))


def _secrets(data: Mapping[Any, Any], hosts: list[tuple[int, Mapping[Any, Any]]]) -> Iterator[Problem]:
    engine = _section(data, "engine")
    yield from secret_problems(engine, ("engine",))
    for index, host in hosts:
        yield from secret_problems(_section(host, "engine"), ("hosts", index, "engine"))
    head = next((_section(host, "engine") for index, host in hosts if index == 0), {})
    yield from key_problems(_section(data, "serve"), engine, head)


def _env_of(path: Path, env: Any) -> Iterator[Problem]:
    if not isinstance(env, Mapping):
        return
    for key, value in env.items():
        here = (*path, str(key))
        if key in OWNED_ENV:
            home = OWNED_ENV[key]
            hint = f"{_REMOVE}: {home.partition(': ')[2]}" if home.startswith("nothing") else f"use `{home}`"
            yield Problem(path=here, code="CONFIG-OWNED", message="cpupp sets this variable itself", hint=hint)
        elif not _ENV_NAME.fullmatch(str(key)):
            hint = "use letters, digits and underscores, no digit first"
            yield Problem(path=here, code="CONFIG-KEY", message="is no name of a variable", hint=hint)
        elif isinstance(value, str) and "\0" in value:
            yield Problem(
                path=here, code="CONFIG-VALUE", message="holds a NUL character", hint="no process can have it"
            )
        elif key == KV_ENV and isinstance(value, str) and not re.fullmatch(r"[1-9][0-9]*", value):
            hint = 'vLLM reads it as an integer: "1", "2", "4", ...'
            yield Problem(path=here, code="PLAN-KV", message=f"{value!r} is not a whole number of GiB", hint=hint)
