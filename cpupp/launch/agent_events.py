"""What agents say, as events of the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cpupp.launch.logs import NodeLog
from cpupp.plan.events import Event, Exited, Halted, HostLost, KeeperLost, Logged, RankDied, Reported, Spawned
from cpupp.plan.handoff import HandoffError, decode_report


class AgentEvents:
    """Translates the agents' events of one attempt; output goes to the vLLM nodes' logs on the way."""

    def __init__(self, logs: dict[int, NodeLog], note: Callable[[str], None]) -> None:
        self._logs = logs
        self._note = note
        self._rank_pids: dict[tuple[int, int], int] = {}

    def translate(self, host: str, data: dict[str, Any], at: float) -> list[Event]:
        """Return the policy's events for one event of a host's agent, none for what the policy need not know."""
        kind, node = data.get("event"), data.get("node")
        if kind == "lost":
            return [HostLost(at=at, host=host, reason=str(data.get("reason", "connection lost")))]
        if not isinstance(node, int) or node not in self._logs:
            return []
        why = str(data.get("why") or "")
        match kind:
            case "output":
                return self._output(node, host, data["data"], at)
            case "report":
                return self._reported(node, data["line"], at)
            case "spawned":
                return [Spawned(at=at, node_rank=node, pid=data["pid"])]
            case "exited":
                stopped = bool(data.get("stopped"))
                return [Exited(at=at, node_rank=node, code=data["code"], stopped=stopped, why=why)]
            case "process_exited":
                rank = self._rank_pids.get((node, data["pid"]))
                if rank is None:
                    return []
                return [RankDied(at=at, node_rank=node, rank=rank, pid=data["pid"], code=data.get("code"), why=why)]
            case "process_stopped":
                pid, rank = int(data["pid"]), self._rank_pids.get((node, data["pid"]))
                return [Halted(at=at, node_rank=node, rank=rank, pid=pid, name=str(data.get("name", "")))]
            case "keeper_lost":
                return [KeeperLost(at=at, node_rank=node, message=str(data.get("message", "")))]
            case _:
                return []

    def _output(self, node: int, host: str, data: str, at: float) -> list[Event]:
        log = self._logs[node]
        was = log.error
        lines = log.feed(data)
        if log.error and not was:
            self._note(f"the log of vLLM node {node} ({host}) cannot be written and has a gap: {log.error}")
        return [Logged(at=at, node_rank=node, line=line) for line in lines]

    def _reported(self, node: int, line: str, at: float) -> list[Event]:
        try:
            report = decode_report(line)
        except HandoffError as error:
            self._note(f"vLLM node {node} sent a report that cannot be read: {error}")
            return []
        rank, pid = getattr(report, "rank", None), getattr(report, "pid", None)
        if rank is not None and pid is not None:
            self._rank_pids[(node, pid)] = rank
        return [Reported(at=at, node_rank=node, report=report)]
