"""What each vLLM version can and cannot do on CPU over several hosts, with upstream's numbers.

The only place of such facts for the plan; what the ranks need sits in rank/vllm_adapter.py and rank/vllm_plugin.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OLDEST = (0, 18, 0)
NEWEST_TESTED = (0, 32, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault of stock vLLM: [first, last] versions that have it, what happens, upstream's number, what cures it."""

    code: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    what: str
    source: str
    cured_by: tuple[str, ...]


KNOWN_FAULTS = (
    KnownFault(
        code="VLLM-TENSOR-DICT",
        first=(0, 18, 0),
        last=(0, 19, 9),
        what="a pipeline over hosts dies at the first request: torch.distributed has no attribute recv_tensor_dict",
        source="vllm #37933, fixed by #40150 in 0.20.0",
        cured_by=("links", "fallback"),
    ),
    KnownFault(
        code="VLLM-EAGER",
        first=(0, 27, 1),
        last=(0, 32, 0),
        what="a pipeline in eager mode dies at the first request: assert self.intermediate_tensors is not None",
        source="measured with 0.27.1 and 0.32.0; warming_up_model returns early in eager mode",
        cured_by=("links", "fallback"),
    ),
    KnownFault(
        code="VLLM-EQUAL-PORT",
        first=(0, 18, 0),
        last=(0, 27, 1),
        what="one VLLM_PORT on all hosts makes SHM names agree over hosts, and the start dies in SHMManager",
        source="measured with 0.27.1; vllm #33628, #34169, #46716",
        cured_by=("links", "fallback"),
    ),
    KnownFault(
        code="VLLM-LOCAL-GLOO",
        first=(0, 29, 0),
        last=(0, 32, 0),
        what="two vLLM nodes of one host talk by gloo although they share memory (random SHM group names)",
        source="measured with 0.32.0",
        cured_by=("links",),
    ),
)

PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("importing vLLM", re.compile(r"vllm serve|vLLM API server version|non-default args")),
    ("starting the engine", re.compile(r"Initializing a V1 LLM engine|Waiting for \d+ local|EngineCore")),
    ("starting the worker", re.compile(r"world_size=\d+ rank=\d+|init_distributed|distributed_init_method")),
    ("loading weights", re.compile(r"Starting to load model|Loading safetensors|Loading model weights")),
    ("weights loaded", re.compile(r"Loading weights took|Model loading took")),
    ("compiling", re.compile(r"Compiling|Dynamo bytecode|torch\.compile|Cache the graph")),
    ("warming up", re.compile(r"Warming up model|warmup")),
    ("allocating the KV cache", re.compile(r"KV cache size|GiB\) for KV cache|GPU KV cache|CPU KV cache")),
    ("starting the API", re.compile(r"Starting vLLM API server|Started server process|Waiting for application")),
    ("serving", re.compile(r"Application startup complete")),
)
"""What a rank's log line says it is doing now: vLLM 0.18 to 0.32, the first match counts."""


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Read `0.32.0`, `0.32.0+cpu`, `0.32.0rc1` into three numbers; None when it is no version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def known_faults(version: str) -> tuple[KnownFault, ...]:
    """Faults of stock vLLM at this version."""
    parsed = parse_version(version)
    if parsed is None:
        return ()
    return tuple(fault for fault in KNOWN_FAULTS if fault.first <= parsed <= fault.last)


def version_warning(version: str) -> str | None:
    """Say when a version is newer than what cpupp was tested with (the announcements still guard the run)."""
    parsed = parse_version(version)
    if parsed is None or parsed <= NEWEST_TESTED:
        return None
    return f"vLLM {version} is newer than {_text(NEWEST_TESTED)}, the newest that cpupp was tested with"


def too_old(version: str) -> str | None:
    """Say when a version cannot be used at all."""
    parsed = parse_version(version)
    if parsed is None or parsed >= OLDEST:
        return None
    return f"vLLM {version} is older than {_text(OLDEST)}, the oldest that cpupp supports"


def phase_of(line: str) -> str | None:
    """What the rank that wrote this log line is doing now, or None when the line does not say."""
    return next((name for name, pattern in PHASES if pattern.search(line)), None)


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
