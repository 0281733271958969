"""What vLLM's /metrics says of the load: queue, KV cache, tokens per second. A small reader of Prometheus text.

The names are those of vLLM 0.18 to 0.32; the KV cache's gauge is read under its former name, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PROMPT = "vllm:prompt_tokens_total"
GENERATED = "vllm:generation_tokens_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One look at a served model, None where /metrics does not say.

    at: seconds of a clock that all samples share; running, waiting: requests; kv_usage: share of the KV cache in use,
    0 to 1; prompt_tokens, generated_tokens: counted since vLLM started.
    """

    at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second between two samples, None where they do not tell."""

    prompt: float | None = None
    generated: float | None = None


def read_load(text: str, at: float) -> Load:
    """Read the text of /metrics. Lines that are not understood, and values that are no number, are passed over."""
    values: dict[str, list[float]] = {}
    for name, value in samples(text):
        values.setdefault(name, []).append(value)

    def total(name: str) -> int | None:
        return round(sum(values[name])) if name in values else None

    usage = next((max(values[name]) for name in KV_USAGE if name in values), None)
    return Load(
        at=at,
        running=total(RUNNING),
        waiting=total(WAITING),
        kv_usage=usage,
        prompt_tokens=total(PROMPT),
        generated_tokens=total(GENERATED),
    )


def samples(text: str) -> Iterator[tuple[str, float]]:
    """Each sample's name and value, whatever its labels and time stamp: `name{labels} value [time]`."""
    for line in text.split("\n"):
        if line.startswith("#"):
            continue
        name, brace, rest = line.partition("{")
        if brace:
            # A label's value may hold anything, a brace too; neither value nor time stamp can.
            _, closed, rest = rest.rpartition("}")
            if not closed:
                continue
        else:
            name, _, rest = line.partition(" ")
        words = rest.split()
        if not words:
            continue
        try:
            value = float(words[0])
        except ValueError:
            continue
        if math.isfinite(value):
            yield name.strip(), value


def speed(before: Load | None, after: Load | None) -> Speed:
    """Tokens per second from `before` to `after`; none where vLLM was started anew between them."""
    if before is None or after is None or after.at <= before.at:
        return Speed()
    seconds = after.at - before.at

    def rate(first: int | None, last: int | None) -> float | None:
        return (last - first) / seconds if first is not None and last is not None and last >= first else None

    return Speed(
        prompt=rate(before.prompt_tokens, after.prompt_tokens),
        generated=rate(before.generated_tokens, after.generated_tokens),
    )
