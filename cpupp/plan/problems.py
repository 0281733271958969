"""What is wrong with a cluster file, in words: pydantic's complaints with valid values and suggestions.

A `Problem` names the key path; `launch/config.py` adds file and line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cpupp.plan.cluster import keys_at, read_spec
from cpupp.plan.secret import looks_secret

Path = tuple[str | int, ...]

_HOMES = {
    "path": "model", "served_name": "model", "num_layers": "model",
    "pipeline": "parallel", "tensor": "parallel", "layers": "parallel",
    "ssh": "hosts[]", "local": "hosts[]", "address": "hosts[]", "slots": "hosts[]", "cores": "hosts[]",
    "python": "engine", "args": "engine", "env": "engine", "executor": "engine", "communicator": "engine",
    "secrets": "engine", "keep_env": "engine", "micro_batches": "engine", "packed_weights": "engine",
    "tiled_weights": "engine",
    "api_key_env": "serve",
    "interface": "network", "master_addr": "network", "master_port": "network", "backend": "network",
    "host": "serve", "port": "serve",
    "connect": "deadlines", "spawn": "deadlines", "import": "deadlines", "join": "deadlines", "load": "deadlines",
    "warm_up": "deadlines", "answer": "deadlines",
    "policy": "restart", "max": "restart", "backoff": "restart",
}  # fmt: skip
"""Where a key of the file lives, for one that stands in the wrong place."""

_ALIASES = {
    "pipeline_parallel_size": "parallel.pipeline", "pipeline_parallel": "parallel.pipeline", "pp": "parallel.pipeline",
    "tensor_parallel_size": "parallel.tensor", "tensor_parallel": "parallel.tensor", "tp": "parallel.tensor",
    "nodes": "hosts", "machines": "hosts", "workers": "hosts", "nnodes": "hosts",
    "user": "hosts[].ssh (me@host:port)", "ip": "hosts[].address", "addr": "hosts[].address",
    "gpus": "hosts[].slots", "ranks": "hosts[].slots", "nproc": "hosts[].slots",
    "api_key": "serve.api_key_env", "hf_token": "engine.secrets", "secret": "engine.secrets",
    "timeouts": "deadlines", "warmup": "deadlines.warm_up", "max_restarts": "restart.max", "retries": "restart.max",
    "restart_policy": "restart.policy",
    "ifname": "network.interface", "iface": "network.interface", "nic": "network.interface",
}  # fmt: skip
"""Words of other tools for the same thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong: key path, stable code, message, hint; `also` is another place that it clashes with."""

    path: Path
    code: str
    message: str
    hint: str
    also: Path | None = None


def key_text(path: Path) -> str:
    """Write a key path as people do: `hosts[1].slots`; a key with odd characters is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w-]+", part):
            text += f".{part}" if text else part
        else:
            text += f"[{part!r}]"
    return text


def shape_problems(data: Any) -> list[Problem]:
    """Everything about single keys that pydantic refuses: unknown, missing, of the wrong kind, or out of range."""
    found = [_problem(record) for record in read_spec(data)[1]]
    return [problem for problem in found if not _is_misspelt(problem, found)]


def _is_misspelt(missing: Problem, found: list[Problem]) -> bool:
    """A missing key that stands there under another spelling is one mistake, not two."""
    if missing.code != "CONFIG-MISSING":
        return False
    meant = f"did you mean `{missing.path[-1]}`?"
    return any(p.code == "CONFIG-KEY" and p.path[:-1] == missing.path[:-1] and p.hint.startswith(meant) for p in found)


def _problem(record: Mapping[str, Any]) -> Problem:
    kind, path = str(record["type"]), tuple(record["loc"])
    while path and path[-1] == "[key]":  # a mapping's key, not its value
        path = path[:-1]
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        example = _EXAMPLES.get(str(path[-1]), "")
        return Problem(path=path, code="CONFIG-MISSING", message="is missing", hint=f"add it{example}")
    message, hint = _wrong_value(kind, path, record)
    return Problem(path=path, code="CONFIG-VALUE", message=message, hint=hint)


_EXAMPLES = {
    "name": ", for example `name: pair`",
    "model": ": `model: {path: FOLDER-OR-HUB-ID}`",
    "path": ": a folder that every host has, or a hub id",
    "hosts": ": a list, one entry a machine, each with name and `ssh: user@host` (or `local: true`)",
}


def _unknown_key(path: Path) -> Problem:
    name, parent = str(path[-1]), path[:-1]
    valid = keys_at(parent) or []
    plain = name.lower().replace("-", "_")
    close = get_close_matches(plain, valid, n=1, cutoff=0.6)
    home = _ALIASES.get(plain) or (f"{_HOMES[plain]}.{plain}" if plain in _HOMES else None)
    listed = f"valid here: {', '.join(valid)}"
    if plain in valid:
        hint = f"write `{plain}`"
    elif home is not None and (not close or plain in _ALIASES or plain in _HOMES):
        hint = f"did you mean `{home}`? {listed}"
    elif close:
        hint = f"did you mean `{close[0]}`? {listed}"
    elif parent == ("engine",):
        hint = f"{listed}; arguments of `vllm serve` go under engine.args"
    else:
        far = get_close_matches(plain, list(_HOMES), n=1, cutoff=0.75)
        hint = f"did you mean `{_HOMES[far[0]]}.{far[0]}`? {listed}" if far else listed
    return Problem(path=path, code="CONFIG-KEY", message="unknown key", hint=hint)


def _wrong_value(kind: str, path: Path, record: Mapping[str, Any]) -> tuple[str, str]:
    value, ctx = record.get("input"), record.get("ctx") or {}
    if kind == "value_error":
        error = ctx["error"]
        return str(error), getattr(error, "hint", "")
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {ctx['ge']}" if "ge" in ctx else f"at most {ctx['le']}"
        return f"must be {bound}, not {value}", f"write a whole number that is {bound}"
    if kind == "string_too_short":
        return "must not be empty", "write a value, or leave the key out"
    if kind == "too_short":
        return "must not be empty", f"list at least {ctx.get('min_length', 1)}"
    if kind == "string_pattern_mismatch":
        return (
            f"{value!r} is no name",
            "use letters, digits, dot, dash and underscore, at most 63, a letter or digit first",
        )
    wanted = _KINDS.get(kind, "another kind of value")
    if "secrets" in path or (path and looks_secret(str(path[-1]))):  # not a word of what may be the secret itself
        return f"must be {wanted}", "docs/yaml.md lists every key with its kind"
    return f"must be {wanted}, not {describe(value)}", _kind_hint(kind, path, value)


_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}


def _kind_hint(kind: str, path: Path, value: Any) -> str:
    key = path[-1] if path and isinstance(path[-1], str) else "-"
    if value is None:
        return "write a value, or remove the line"
    if kind == "string_type" and isinstance(value, bool | int | float):
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        return f'quote it: `{key}: "{shown}"`'
    if kind == "int_type" and isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        return f"leave the quotes out: `{key}: {value}`"
    if kind == "bool_type":
        return f"write `{key}: true` or `{key}: false`, without quotes"
    valid = keys_at(path)
    if valid and "model" in kind:
        return f"valid keys: {', '.join(valid)}"
    return "docs/yaml.md lists every key with its kind"


def describe(value: Any) -> str:
    """Say what a YAML value is: `the number 1`, `a list`, `nothing`."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    return "a list" if isinstance(value, list) else "a mapping"
