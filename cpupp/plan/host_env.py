"""Which variables of a host's own environment reach its ranks: those of a list, and no other.

A list of what passes, because a list of what does not is never complete: whatever a login shell exports on one host
alone would change vLLM there unseen, and a token that was exported for another program would end up in its logs.
"""

from __future__ import annotations

from collections.abc import Iterable

KEPT_ENV = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "LD_LIBRARY_PATH"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_MODULES_CACHE", "HUGGINGFACE_HUB_CACHE"),
    *("TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "MPLCONFIGDIR"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
    *("CC", "CXX", "CPATH", "LIBRARY_PATH", "CONDA_PREFIX", "VIRTUAL_ENV"),
)
"""Names that pass (a `*` at the end stands for anything): the host's own places, languages, certificates, proxies."""

DROPPED_ENV = (
    "VLLM_",
    "GLOO_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "MASTER_",
    "NCCL_",
    "TORCH",
    "CPUPP_",
    "LD_PRELOAD",
    "PYTHONPATH",
    "PYTHONHOME",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
)
"""Prefixes that `engine.keep_env` cannot let pass: they change what a rank does, so the file itself says them."""


def passes(name: str, keep: Iterable[str]) -> bool:
    """Whether a variable of the host's own environment reaches the ranks; `keep`: names, or beginnings with `*`."""
    if name.startswith(DROPPED_ENV):
        return False
    return any(name == entry or (entry.endswith("*") and name.startswith(entry[:-1])) for entry in keep)
