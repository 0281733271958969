"""Stop what runs on the hosts, all at once and in bounded time, and say what may be left."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

from cpupp.errors import CpuppError
from cpupp.launch.contract import Session

STOP_SLACK = 8.0
"""Seconds beyond the grace within which an agent has answered a stop order, whatever hangs on its host: KILL by the
keepers, KILL by the agent, and the last output to the launcher take 2 s each at most."""


def stop_hosts(
    sessions: Mapping[str, Session], *, grace: float, lost: Collection[str], clean: Collection[str] = ()
) -> list[str]:
    """Order every host that is not lost to stop, and wait. Returns what was left or may be left, in words.

    clean: hosts that have told that nothing of theirs runs any more, whatever became of them then.
    """
    words: dict[str, str] = {}
    threads = {
        host: threading.Thread(target=_stop, args=(host, session, grace, words), daemon=True, name=f"stop-{host}")
        for host, session in sessions.items()
        if host not in lost
    }
    for thread in threads.values():
        thread.start()
    limit = time.monotonic() + grace + STOP_SLACK
    for thread in threads.values():
        thread.join(max(0.0, limit - time.monotonic()))
    slow = {
        host: f"perhaps, host {host}: no answer to the stop order yet: its agent goes on by itself"
        for host, thread in threads.items()
        if thread.is_alive()
    }
    away = {host: _unreachable(host) for host in sorted(lost)}
    return [text for host, text in {**slow, **words, **away}.items() if host not in clean]


def _unreachable(host: str) -> str:
    return f"host {host} cannot be reached: its agent takes its ranks down by itself"


def _stop(host: str, session: Session, grace: float, words: dict[str, str]) -> None:
    try:
        reply = session.request("stop", timeout=grace + STOP_SLACK, grace=grace)
    except CpuppError as error:
        if error.code == "HOST-LOST":
            words[host] = _unreachable(host)
        else:
            words[host] = f"perhaps, host {host}: {error.message}: its agent goes on by itself"
        return
    if stuck := reply.get("stuck"):
        listed = ", ".join(map(str, stuck))
        words[host] = f"host {host}: vLLM node {listed}: a process that no signal ends (uninterruptible sleep)"
    elif not reply.get("site_removed", True):
        words[host] = f"host {host}: the site folder is still in use; the next agent there removes it"
