"""Models that tests run: the real small one, and random ones of any shape.

torch and transformers are imported inside the functions, so that collecting tests needs neither.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.make_model import DEFAULT_FOLDER, is_complete

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / DEFAULT_FOLDER
RANDOM_MODELS = ROOT / ".cache" / "models"

# All that vLLM needs to turn text into token ids; the vocabulary decides vocab_size below.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Shape of a random Llama. The default can be split by tensor 2, 4 and 8, which SmolLM2 (9 heads) cannot.

    Its logits lie close together. A tensor split adds in another order, so to compare token for token take float32.
    """

    layers: int = 8
    hidden: int = 512
    intermediate: int = 1024
    heads: int = 8
    kv_heads: int = 8
    vocabulary: int = 49152
    seed: int = 0
    dtype: str = "bfloat16"


def smollm2() -> Path:
    """Folder of the real model, which `make model` makes."""
    if not is_complete(SMOLLM2):
        raise FileNotFoundError(f"{SMOLLM2} is missing or incomplete: run `make model`")
    return SMOLLM2


def random_llama(shape: LlamaShape = LlamaShape()) -> Path:
    """Folder of a random Llama of this `shape` with SmolLM2's tokenizer. Made once, then taken from the cache."""
    text = json.dumps(asdict(shape), sort_keys=True)
    folder = RANDOM_MODELS / f"llama-{shape.layers}x{shape.hidden}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    tokenizer = smollm2()
    RANDOM_MODELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=RANDOM_MODELS) as name:
        made = Path(name) / "model"
        _save(shape, made)
        for file in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / file, made / file)
        try:
            made.rename(folder)
        except OSError:  # another test process was faster; its model is the same
            if not folder.is_dir():
                raise
    return folder


def _save(shape: LlamaShape, target: Path) -> None:
    """Save the weights and the config of a random Llama in the folder `target`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    # A generator of our own would not reach transformers' initialisation; fork the global one instead.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, shape.dtype)).save_pretrained(target)
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, and a test host may log in as another user
