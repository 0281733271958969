"""The rules of a cluster file about secrets and about what passes of a host's environment. No value is ever quoted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cpupp.plan.command import OWNED_ENV, PLUGINS_ENV
from cpupp.plan.host_env import DROPPED_ENV
from cpupp.plan.memory import KV_ENV
from cpupp.plan.problems import Path, Problem
from cpupp.plan.secret import API_KEY_ENV, api_key_args
from cpupp.plan.secret_source import is_variable

_NO_SECRETS = {*OWNED_ENV, KV_ENV, PLUGINS_ENV, "LD_PRELOAD", "TMPDIR", "VLLM_RPC_BASE_PATH"}


def secret_problems(engine: Mapping[Any, Any], path: Path) -> Iterator[Problem]:
    """Check `secrets` beside `env`, of the cluster or of one host."""
    secrets, env = engine.get("secrets"), engine.get("env")
    if not isinstance(secrets, Mapping):
        return
    for name in map(str, secrets):
        here: Path = (*path, "secrets", name)
        if not is_variable(name):
            hint = "use letters, digits and underscores, no digit first"
            yield Problem(path=here, code="CONFIG-KEY", message="is no name of a variable", hint=hint)
        elif name in _NO_SECRETS:
            message = "is no secret: cpupp sets this variable, or reads it"
            yield Problem(
                path=here, code="CONFIG-OWNED", message=message, hint="write it under engine.env, or not at all"
            )
        elif isinstance(env, Mapping) and name in env:
            yield Problem(
                path=here,
                code="CONFIG-DUPLICATE",
                message="is also written under env",
                hint="keep it here, and remove the value from the file",
                also=(*path, "env", name),
            )


def key_problems(serve: Mapping[Any, Any], engine: Mapping[Any, Any], head: Mapping[Any, Any]) -> Iterator[Problem]:
    """Check that the API's key has one source."""
    if serve.get("api_key_env") is None:
        return
    others: list[str] = []
    args = engine.get("args")
    if isinstance(args, Mapping) and api_key_args({str(name): value for name, value in args.items()}):
        others.append("engine.args.api_key")
    for place, section in (("engine", engine), ("hosts[0].engine", head)):
        for key in ("env", "secrets"):
            values = section.get(key)
            if isinstance(values, Mapping) and API_KEY_ENV in values:
                others.append(f"{place}.{key}.{API_KEY_ENV}")
    for other in others:
        message = f"{other} gives the API's key too"
        hint = f"keep serve.api_key_env, remove {other}"
        yield Problem(path=("serve", "api_key_env"), code="CONFIG-DUPLICATE", message=message, hint=hint)


def keep_problems(engine: Mapping[Any, Any]) -> Iterator[Problem]:
    """Check `engine.keep_env`: names, or beginnings with `*`, and none that would change what a rank does."""
    keep = engine.get("keep_env")
    for index, entry in enumerate(keep if isinstance(keep, list) else ()):
        path: Path = ("engine", "keep_env", index)
        if not isinstance(entry, str):
            continue
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", entry):
            hint = "write a name, or its beginning and a `*`: KRB5CCNAME, MALLOC_*"
            yield Problem(path=path, code="CONFIG-VALUE", message=f"{entry!r} is no name of a variable", hint=hint)
        elif entry.startswith(DROPPED_ENV):
            message = f"{entry} changes what ranks do, and would differ by host unseen"
            yield Problem(path=path, code="CONFIG-OWNED", message=message, hint="write its value under engine.env")
