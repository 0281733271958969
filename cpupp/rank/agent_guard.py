"""The guard of a host: which failure of its vLLM nodes was seen first, and what follows when no launcher is there.

Detached, the first failure takes this host down; the other hosts see its vLLM nodes fall silent (see beat), or hear it
from the ranks, for which `failure.json` is left. Attached, the failure is noted only: the launcher decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from typing import Any, Callable  # noqa: UP035  # Python 3.8 cannot subscript collections.abc.Callable

from . import agent_logs, agent_records

FAILURE = "failure.json"  # in the site, for the ranks
STOPPED_S = 3.0  # how long a process may be stopped (SIGSTOP) before its node counts as failed
PEER_LOST = "PEER-LOST"


class Guard:
    """Judges the events of all vLLM nodes of one attempt on this host; `failure` is the first one.

    on_failure(sentence) is called once, when a failure was seen; what follows depends on `armed`. on_stopped(node, pid)
    is called for a process that is stopped.
    """

    def __init__(self, on_failure: Callable[[str], None], on_stopped: Callable[[int, int], None]) -> None:
        self.on_failure = on_failure
        self.on_stopped = on_stopped
        self.site = ""
        self.armed = False
        self.stopping = False
        self.failure: dict[str, Any] | None = None
        self.ranks: dict[int, dict[int, int]] = {}  # node -> rank -> pid
        self.logs: dict[int, str] = {}
        self._stopped: dict[int, float] = {}
        self._lock = threading.Lock()

    def take(self, event: dict[str, Any]) -> None:
        """Judge one event of a node."""
        kind, node = event["event"], event["node"]
        if kind == "report":
            self._report(node, event["line"])
        elif kind == "exited" and not event["stopped"]:
            code = "RANK-SIGNAL" if event["code"] < 0 else "RANK-EXIT"
            self.fail(code, exit_text(event["code"], event.get("why", "")), node)
        elif kind == "process_exited" and event["pid"] in self.ranks.get(node, {}).values():
            how = "is gone" if event["code"] is None else exit_text(event["code"], event.get("why", ""))
            self.fail("RANK-DIED", f"worker process {event['pid']} {how}", node)
        elif kind == "keeper_lost":
            self.fail("KEEPER-LOST", event["message"], node)
        elif kind == "line":
            self.fail("RANK-EXCEPTION", "a worker raised an exception", node)

    def _report(self, node: int, line: str) -> None:
        try:
            report = json.loads(line)
            kind = report["report"]
            if kind == "group":
                self.ranks.setdefault(node, {})[int(report["rank"])] = int(report["pid"])
            elif kind == "error":
                self.fail("RANK-ERROR", f"{report['where']}: {report['message']}", node)
            elif kind == "peer" and self.armed:
                self.fail(PEER_LOST, report["message"], max(0, int(report["node_rank"])), seen_by=node)
        except (ValueError, KeyError, TypeError):
            return  # the launcher says so, where there is one

    def look(self, node: int, processes: list[dict[str, Any]]) -> None:
        """Find processes that are stopped: they hold up all ranks, and nobody else would notice."""
        now = time.monotonic()
        stopped = {process["pid"] for process in processes if process["state"] == "T"}
        for process in processes:
            pid = process["pid"]
            since = self._stopped.get(pid)
            if pid not in stopped:
                self._stopped.pop(pid, None)
            elif since is None:
                self._stopped[pid] = now
            elif 0.0 <= since < now - STOPPED_S:
                self._stopped[pid] = -1.0  # told
                self.on_stopped(node, pid)
                if self.armed:
                    self.fail("RANK-HALTED", f"process {pid} ({process['name']}) is stopped (SIGSTOP)", node)

    def fail(self, code: str, message: str, node: int, seen_by: int | None = None) -> None:
        """Note a failure of vLLM node `node`, unless there was one before, or the nodes are being stopped."""
        with self._lock:
            if self.failure is not None or self.stopping:
                return
            log = self.logs.get(node if seen_by is None else seen_by)
            self.failure = {
                "code": code,
                "message": message,
                "node": node,
                "time": time.time(),
                "last_lines": agent_logs.last_lines(log) if log else [],
            }
        # A lost peer is seen by all; what happened here the ranks of this host tell the others.
        if self.armed and code != PEER_LOST:
            with contextlib.suppress(OSError):
                agent_records.write_json(os.path.join(self.site, FAILURE), self.failure)
        self.on_failure(f"{code}: {message}")

    @property
    def is_own(self) -> bool:
        """Whether the failure is one of this host, which the others may not know yet."""
        return self.failure is not None and self.failure["code"] != PEER_LOST


def exit_text(code: int, why: str) -> str:
    """Return what an exit code means, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (f": {why}" if why else "")
