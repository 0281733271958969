"""A vLLM node's start without what a CPU node waits for and does not need.

The processes of a node are forked, where on CPU vLLM spawns them and each would import vLLM anew: a head does that
three times in a row (API server, engine core, worker), 8 to 13 s each on one core. vLLM 0.18 to 0.32 set
VLLM_WORKER_MULTIPROC_METHOD to `spawn` (`cli_env_setup`, and `check_and_update_config` in platforms/cpu.py); the
executor is made for `fork` as well. What spawning is good for on CPU is that a new process reads KMP_AFFINITY and
OMP_NUM_THREADS, which the executor sets for each worker (utils/ompmultiprocessing.py). Intel's OpenMP runtime starts
afresh in a forked child, and reads them there; GNU's hangs there once its threads were used.

Importing vLLM makes half a million objects that stay, and Python's collector goes through them 1,600 times meanwhile: a
quarter of the import's time (measured with 0.32.0: 13.3 and 14.7 s, 10.6 and 9.8 s without).
"""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any

METHOD_ENV = "VLLM_WORKER_MULTIPROC_METHOD"
IOMP = "libiomp5"
RELAXED = (200_000, 50, 1000)
"""Thresholds of the collector during the import: some collections, should nobody restore them."""

_thresholds: tuple[int, int, int] | None = None


def relax_collector() -> None:
    """Let the garbage collector run a few times only, until `restore_collector`."""
    global _thresholds
    _thresholds = gc.get_threshold()
    gc.set_threshold(*RELAXED)


def restore_collector() -> None:
    """Let it run as before; what was imported meanwhile stays out of its way, and shared with forked children."""
    global _thresholds
    if _thresholds is None:
        return
    gc.freeze()
    gc.set_threshold(*_thresholds)
    _thresholds = None


def shorten_start() -> None:
    """Cure what makes a start long, once in a process, as far as this vLLM has the places for it."""
    restore_collector()
    inspect_models_here()
    if os.environ.get(METHOD_ENV) == "fork":
        fork_children()


def fork_children() -> bool:
    """Make vLLM fork its processes, as the environment says. Returns False where it would not be safe.

    That is without Intel's OpenMP runtime, and where the executor does not set its variables for each worker.
    """
    if IOMP not in os.environ.get("LD_PRELOAD", ""):
        return False
    try:
        from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found, unused-ignore]  # on the hosts only
        from vllm.utils.ompmultiprocessing import OMPProcessManager  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return False
    if not hasattr(OMPProcessManager, "configure_omp_envs"):
        return False
    original = CpuPlatform.check_and_update_config.__func__

    @wraps(original)
    def cured(cls: Any, *args: Any, **kwargs: Any) -> None:
        original(cls, *args, **kwargs)
        os.environ[METHOD_ENV] = "fork"

    CpuPlatform.check_and_update_config = classmethod(cured)
    multiprocessing.util.register_after_fork(begin_child, lambda begin: begin())
    return True


def begin_child() -> None:
    """Called first in every forked process: its signals and its threads are its own."""
    signal.set_wakeup_fd(-1)  # the parent's event loop must not hear of them
    if "KMP_AFFINITY" in os.environ:
        import torch

        # Starts OpenMP, which binds this thread: where it runs decides where vLLM puts its memory. And a number of
        # threads that the parent had set would count for every thread but this.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def inspect_models_here() -> None:
    """Let vLLM look at the model's class in this process, not in a new one that imports vLLM for it.

    The detour keeps CUDA from being initialised before a fork (model_executor/models/registry.py, 0.18 to 0.32). What
    was found is stored in a file, so a user waits for it once for each model class and version (measured: 14 s).
    """
    try:
        from vllm.model_executor.models import registry  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return

    def run_here(function: Callable[[], Any]) -> Any:
        return function()

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = run_here
