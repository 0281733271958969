"""Counts the steps of vLLM's CPU worker (step_clock). Called by the adapter alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from cpupp.rank.step_clock import CLOCK


def count_steps(reports: str, rank: int) -> None:
    """Count the steps of this process's worker into a file beside `reports`. Harmless when called again.

    The engine calls `execute_model` with its order for a step and then, since 0.11, `sample_tokens`; a worker class of
    the user's own (`--worker-cls`) is one of CPUWorker's.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker  # type: ignore[import-not-found, unused-ignore]  # on the hosts only

    if hasattr(CPUWorker.execute_model, "cpupp"):
        return
    with suppress(OSError):  # a disk without room: then nobody can look, and that is all
        CLOCK.open(str(Path(reports).parent), rank)

    def begin_step(order: Any) -> None:
        CLOCK.step(order.total_num_scheduled_tokens, len(order.num_scheduled_tokens))

    CPUWorker.execute_model = _counted(CPUWorker.execute_model, begin_step)
    if hasattr(CPUWorker, "sample_tokens"):
        CPUWorker.sample_tokens = _counted(CPUWorker.sample_tokens, lambda order: CLOCK.resume())


def _counted(original: Callable[..., Any], begin: Callable[[Any], None]) -> Callable[..., Any]:
    @wraps(original)
    def counted(self: Any, order: Any, *args: Any, **kwargs: Any) -> Any:
        begin(order)
        try:
            return original(self, order, *args, **kwargs)
        finally:
            CLOCK.pause()

    counted.cpupp = True  # type: ignore[attr-defined]  # marks the method as patched
    return counted
