"""Models that tests run: the real small one, and random ones of any shape.

torch and transformers are imported inside the functions, so that collecting tests needs neither.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    name = f"llama-{shape.layers}x{shape.hidden}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return _made(RANDOM_MODELS / name, lambda target: _save(shape, target))


def random_model(kind: str) -> Path:
    """Folder of a small random model of another kind (see KINDS), in bfloat16. Made once, then taken from the cache."""
    config = KINDS[kind]
    text = json.dumps(config, sort_keys=True)
    folder = RANDOM_MODELS / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return _made(folder, lambda target: _save_kind(config, target))


_COMMON = {
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "max_position_embeddings": 4096,
}
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {
        **_COMMON,
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "mlp_only_layers": [0, 1],
        "tie_word_embeddings": False,
    },
    "mla": {
        **_COMMON,
        "model_type": "deepseek_v3",
        "hidden_size": 256,
        "intermediate_size": 2048,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "topk_method": "noaux_tc",
        "tie_word_embeddings": False,
    },
}
"""Grouped query attention with a tied head; experts behind two dense layers; latent attention with both."""


def _made(folder: Path, save: Callable[[Path], None]) -> Path:
    """The folder, made with SmolLM2's tokenizer if it is not there."""
    if folder.is_dir():
        return folder
    tokenizer = smollm2()
    RANDOM_MODELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=RANDOM_MODELS) as name:
        made = Path(name) / "model"
        save(made)
        for file in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / file, made / file)
        try:
            made.rename(folder)
        except OSError:  # another test process was faster; its model is the same
            if not folder.is_dir():
                raise
    return folder


def _save_kind(config: dict[str, Any], target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.to(torch.bfloat16).save_pretrained(target)
    for path in target.iterdir():
        path.chmod(0o644)


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
