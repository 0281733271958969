"""Models whose embedding or head vLLM makes on every stage, used there or not (read in the model files of 0.32.0)."""

from __future__ import annotations

_BOTH = """
    Gemma Gemma3 Rnj1 Gemma4 Qwen3Next GraniteMoe GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA HYV3 Jamba
    K2Horizon MiniCPM Mixtral NemotronH NemotronHPuzzle MuseGlimmer OlmoHybrid Olmoe OPT Orion PhiMoE Plamo3
    Qwen2Moe Qwen3Moe StableLm
"""
_EMBEDDING = """
    Cohere Cohere2 Cohere2Moe Gemma2 Lfm2 Lfm2Moe Qwen3_5 Qwen3_5Moe
"""
_HEAD = """
    Bloom Dbrx Falcon FalconMamba GptOss GPTJ Mamba GPT2LMHeadModel
"""


def embedding_is_everywhere(architecture: str) -> bool:
    """Whether each stage holds the embedding."""
    return _short(architecture) in (_BOTH + _EMBEDDING).split()


def head_is_everywhere(architecture: str) -> bool:
    """Whether each stage holds the language head."""
    return _short(architecture) in (_BOTH + _HEAD).split()


def _short(architecture: str) -> str:
    return architecture.removesuffix("ForCausalLM")
