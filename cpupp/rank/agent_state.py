"""What the agent says about its vLLM nodes in `state.json` of the site, every second. Standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from . import agent_proc, agent_records

if TYPE_CHECKING:
    from .agent_node import Node

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Names:
    """The names of processes: the title that a process gave itself, else the program's. Never its arguments."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, str], str] = {}

    def of(self, pid: int, start: int, short: str) -> str:
        """Return the name of a process whose name in /proc, which has 15 bytes, is `short`."""
        key = (pid, start, short)
        if key not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[key] = _title(pid, short)
        return self._known[key]


def _title(pid: int, short: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        title = file.read(256).replace(b"\0", b" ").decode("utf-8", "replace").split(" ", 1)[0]
        if title.startswith(short):
            return title
    return short


def processes(pids: list[int], names: Names) -> list[dict[str, Any]]:
    """Return pid, name, rss (bytes), cpu_s (seconds of CPU so far) and state letter of each process that lives."""
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                data = file.read()
        except OSError:
            continue
        short = data[data.find(b"(") + 1 : data.rfind(b")")].decode("utf-8", "replace")
        fields = data[data.rfind(b")") + 2 :].split()
        found.append(
            {
                "pid": pid,
                "name": names.of(pid, int(fields[19]), short),
                "rss": int(fields[21]) * PAGE,
                "cpu_s": round((int(fields[11]) + int(fields[12])) / TICKS_PER_S, 2),
                "state": fields[0].decode(),
            }
        )
    return found


def node_state(node: Node, ranks: dict[int, int], names: Names) -> dict[str, Any]:
    """Return the state of one vLLM node. ranks: rank -> pid, as reported."""
    found = processes(list(node.pids), names)
    log_bytes, log_time = 0, 0.0
    with contextlib.suppress(OSError):
        log = os.stat(node.output.log.path)
        log_bytes, log_time = log.st_size, log.st_mtime
    return {
        "node": node.number,
        "main_pid": node.main_pid,
        "alive": node.runs,
        "exit_code": node.exit_code,
        "rss": sum(process["rss"] for process in found),
        "cpu_s": round(sum(process["cpu_s"] for process in found), 2),
        "log_bytes": log_bytes,
        "log_begin": node.output.begin,
        "log_time": log_time,
        "processes": found,
        "ranks": {str(rank): pid for rank, pid in ranks.items()},
    }


def write_state(
    site: str, nodes: list[dict[str, Any]], failure: dict[str, Any] | None, detached: bool, own: agent_proc.Proc | None
) -> None:
    """Write state.json; without room on the disk the last one stays."""
    state = {
        "time": time.time(),
        "agent": os.getpid(),
        "agent_start": own.start if own else 0,
        "detached": detached,
        "failure": failure,
        "nodes": nodes,
    }
    with contextlib.suppress(OSError):
        agent_records.write_json(os.path.join(site, agent_records.STATE), state)
