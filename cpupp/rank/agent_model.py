"""What the model folder of this host holds: config.json and the headers of its weights. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from typing import Any

LONGEST_HEADER = 100_000_000  # bytes; the safetensors format's own limit
NUMBERED = re.compile(r"^(.*?)\.(\d+)\.(.*)$")  # model.layers . 3 . mlp.experts.7.up_proj.weight
ANY_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

# By name and dtype: how many, and bytes of all.
Tensors = dict[tuple[str, str], tuple[int, int]]
Layers = dict[tuple[str, int], Tensors]

INDEX = "model.safetensors.index.json"
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
    facts: dict[str, Any] = {"path": folder, "config": {}, "digest": "", "layer_kinds": [], "other_tensors": []}
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
    config = _parsed(raw, "config.json")
    if not isinstance(config, dict) or not config:
        raise ValueError("config.json is not a JSON object with something in it")
    facts["config"] = config
    layers: Layers = {}
    others: Tensors = {}
    names = _weight_files(folder)
    for name in names:
        path = os.path.join(folder, name)
        facts["files_bytes"] += os.path.getsize(path)
        if name.endswith(".safetensors"):
            header = read_header(path)
            digest.update(header)
            end = _add_tensors(_parsed(header, f"the header of {name}"), layers, others)
            if 8 + len(header) + end > os.path.getsize(path):
                raise ValueError(f"{name} is cut off: its tensors end at byte {8 + len(header) + end}")
    if not names:
        raise ValueError("the folder holds no weights (*.safetensors or *.bin)")
    facts["layer_kinds"], facts["other_tensors"] = _kinds(layers), _listed(others)
    facts["digest"] = digest.hexdigest()


def _parsed(raw: bytes, name: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: {error}") from None


def _weight_files(folder: str) -> list[str]:
    """Name the weight files: those of the index when there is one, because folders often hold two formats."""
    try:
        with open(os.path.join(folder, INDEX), "rb") as file:
            indexed = set(_parsed(file.read(), INDEX)["weight_map"].values())
    except FileNotFoundError:
        pass
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{INDEX} has no weight_map") from None
    else:
        if not all(isinstance(name, str) for name in indexed):
            raise ValueError(f"the weight_map of {INDEX} names something that is no file")
        return sorted(indexed)
    names = sorted(os.listdir(folder))
    for suffix in (".safetensors", ".bin"):
        found = [name for name in names if name.endswith(suffix) and not name.startswith("training_args")]
        if found:
            return found
    return []


def read_header(path: str) -> bytes:
    """Return the header of a safetensors file. Raises ValueError when it is none."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= min(LONGEST_HEADER, os.path.getsize(path) - 8):
            raise ValueError(f"{os.path.basename(path)} is not a safetensors file or is cut off")
        return file.read(length)


def _add_tensors(header: dict[str, Any], layers: Layers, others: Tensors) -> int:
    """Count every tensor; return where the last one ends, from the end of the header."""
    if not isinstance(header, dict):
        raise ValueError("a safetensors header is not a JSON object")
    last = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = tensor["data_offsets"]
            size, last = int(end) - int(begin), max(last, int(end))
            dtype = str(tensor["dtype"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"tensor {name} has no dtype and data_offsets") from None
        match = NUMBERED.match(name)
        if match:
            tensors = layers.setdefault((match[1], int(match[2])), {})
            key = (ANY_NUMBER.sub("*", match[3]), dtype)
        else:
            tensors, key = others, (name, dtype)
        num, sum_so_far = tensors.get(key, (0, 0))
        tensors[key] = (num + 1, sum_so_far + size)
    return last


def _listed(tensors: Tensors) -> list[dict[str, Any]]:
    found = sorted(tensors.items())
    return [{"name": name, "dtype": dtype, "num": num, "size": size} for (name, dtype), (num, size) in found]


def _kinds(layers: Layers) -> list[dict[str, Any]]:
    """Put layers of one stack that hold the same tensors together (see LayerKindFacts)."""
    kinds: dict[tuple[str, Any], list[int]] = {}
    for (stack, number), tensors in sorted(layers.items()):
        kinds.setdefault((stack, tuple(sorted(tensors.items()))), []).append(number)
    return [
        {"stack": stack, "layers": numbers, "tensors": _listed(dict(tensors))}
        for (stack, tensors), numbers in kinds.items()
    ]
