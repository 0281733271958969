"""The environment of a vLLM node: what the request lists, over what it lets pass of this host's own."""

from __future__ import annotations

import os
from typing import Any


def node_environment(request: dict[str, Any], site: str) -> dict[str, str]:
    """Return the variables of a `start` request's process.

    keep_env: names of this host's variables that pass, or their beginnings with `*`; without it, all pass. drop_env:
    beginnings that never pass. env, secrets: set as they are; site_env: set with `{site}` replaced.
    """
    keep, drop = request.get("keep_env"), tuple(request.get("drop_env", ()))
    environment = {}
    for raw_name, raw_value in os.environb.items():
        name = raw_name.decode("utf-8", "surrogateescape")
        if (keep is None or _listed(name, keep)) and not (drop and name.startswith(drop)):
            environment[name] = raw_value.decode("utf-8", "surrogateescape")
    environment.update(request.get("env", {}))
    environment.update(request.get("secrets", {}))
    for name, value in request.get("site_env", {}).items():
        environment[name] = value.replace("{site}", site)
    return environment


def _listed(name: str, keep: list[str]) -> bool:
    return any(name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in keep)
