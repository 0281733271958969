"""One attempt of one run on this host: its site, its vLLM nodes, and their end. Standard library only."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035  # Python 3.8 cannot subscript collections.abc.Callable

from . import agent_env, agent_logs, agent_mask, agent_proc, agent_records, agent_site, agent_state
from .agent_guard import PEER_LOST, Guard
from .agent_node import Node, NodeError
from .agent_request import RequestError

if TYPE_CHECKING:
    from .agent_children import Children
    from .agent_outbox import Outbox

GRACE_S = 5.0
LEASH_GRACE_S = 3.0  # when the launcher is gone nobody waits for last words, and ten seconds are promised for all
GUARD_GRACE_S = 2.0  # for a failure without a launcher, of which the most part of ten seconds is needed to see it
GUARD_LEASH_S = 6.0  # for a detached agent that is stopped; its keepers judge
KILL_S = 2.0  # what a keeper gets beyond the grace before the agent takes over
COPY_S = 10.0  # how long the end of a detached run waits until the last output is in its log
STATE_S = 1.0


class Attempt:
    """The site and the nodes that an agent holds, one attempt after the other.

    on_end(reason) is called when the attempt must end without the launcher's word.
    """

    def __init__(
        self, outbox: Outbox, children: Children, sources: dict[str, str], on_end: Callable[[str], None]
    ) -> None:
        self.outbox = outbox
        self.children = children
        self.sources = sources
        self.on_end = on_end
        self.nodes: dict[int, Node] = {}
        self.site = ""
        self.run_id = ""
        self.held = -1
        self.detached = False
        self.lock = threading.Lock()  # nodes and site
        self.stopping = threading.Lock()  # one stop at a time
        self.leash_s = 0.0
        self.grace_s = GRACE_S
        self.guard = self._guard()
        self.names = agent_state.Names()
        self._own = agent_proc.read_process(os.getpid())
        self._writing = threading.Lock()  # the state
        self._news = threading.Event()
        self._watched = ""

    def _guard(self) -> Guard:
        def stopped(node: int, pid: int) -> None:
            if not self.detached:
                name = agent_proc.name_of(pid)
                self.outbox.put({"event": "process_stopped", "node": node, "pid": pid, "name": name})

        return Guard(self._failed, stopped)

    def _failed(self, reason: str) -> None:
        self._news.set()
        if self.detached:
            self.on_end(reason)

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the site folder with its files for one attempt of a run; the former one must be at its end."""
        with self.lock:
            if any(not node.gone.is_set() for node in self.nodes.values()):
                raise RequestError("AGENT-BUSY", f"vLLM nodes of run {self.run_id} still run here")
            self._refuse_while_stopping()
            self._drop_site()
            try:
                self.site, self.held = agent_site.make_site(
                    request["run"],
                    request["attempt"],
                    request["host"],
                    request.get("files", {}),
                    request.get("record"),
                )
            except (agent_site.SiteError, OSError) as error:
                raise RequestError("SITE-NO-PLACE", str(error)) from None
            self.run_id = request["run"]
            self.guard = self._guard()
            self.guard.site = self.site
            return {"site": self.site}

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start one vLLM node under a keeper and return its pid; its events follow."""
        number = int(request["node"])
        with self.lock:
            if not self.site:
                raise RequestError("AGENT-REQUEST", "start before prepare")
            if number in self.nodes:
                raise RequestError("AGENT-REQUEST", f"vLLM node {number} was started already")
            if self.detached:
                raise RequestError("AGENT-REQUEST", f"run {self.run_id} is detached")
            self._refuse_while_stopping()
            agent_mask.MASK.add(_secrets(request))
            reports = str(request.get("reports") or f"{{site}}/reports-{number}.ndjson").replace("{site}", self.site)
            order = self._order(number, request)
            node = Node(number, order, reports, self.outbox, self.children, self.sources, self.guard.take)
            self.guard.logs[number] = order["log"]
            node.launch()
            self.nodes[number] = node
        # Not under the lock: a program on a dead network disk may take for ever, and a stop must still get through.
        try:
            pid = node.wait_started()
        except NodeError as error:
            with self.lock:
                self.nodes.pop(number, None)
            raise RequestError("START-FAILED", str(error)) from None
        self._watch()
        return {"pid": pid}

    def _refuse_while_stopping(self) -> None:
        if self.stopping.locked():
            raise RequestError("AGENT-BUSY", "a stop is under way here")

    def _order(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        """Everything that a keeper needs; see agent_keeper."""
        argv = [os.path.expanduser(request["argv"][0]), *request["argv"][1:]]
        return {
            "node": number,
            "argv": argv,
            "env": agent_env.node_environment(request, self.site),
            "mask": _secrets(request),
            "cwd": os.path.expanduser(request.get("cwd") or os.getcwd()),
            "cores": list(request.get("cores") or ()),
            "log": os.path.join(self.site, "logs", f"node{number}.log"),
            "site": self.site,
            "shm_prefix": f"cpupp-{self.run_id}-",
            "agent_pid": os.getpid(),
            "leash_s": self.leash_s,
            "grace_s": min(self.grace_s, LEASH_GRACE_S),
        }

    def detach(self, request: dict[str, Any]) -> dict[str, Any]:
        """From now on the nodes do not need a launcher: their output stays here, and the guard acts.

        patterns: regular expressions; a line of output with one of them is a failure of its node.
        """
        with self.lock:
            ended = sorted(number for number, node in self.nodes.items() if not node.runs)
            if ended or not self.nodes:
                what = f"vLLM node {ended[0]} has ended" if ended else "no vLLM node runs"
                raise RequestError("AGENT-REQUEST", f"cannot detach: {what}")
            if self.guard.failure:
                raise RequestError("AGENT-REQUEST", f"cannot detach: {self.guard.failure['message']}")
            self._refuse_while_stopping()
            if self.detached:
                return {}
            if "record" in request:
                record = agent_records.read_json(self.site, agent_records.RECORD) or {}
                record["record"] = {**record.get("record", {}), **request["record"]}
                agent_records.write_json(os.path.join(self.site, agent_records.RECORD), record)
            agent_records.write_json(os.path.join(self.site, agent_records.DETACHED), {"time": time.time()})
            self.detached = True
            for node in self.nodes.values():
                if not node.detach(GUARD_LEASH_S, GUARD_GRACE_S, list(request.get("patterns", ()))):
                    raise RequestError("AGENT-FAILED", f"the output of vLLM node {node.number} cannot be kept here")
            self.guard.armed = True
            self._news.set()
            return {}

    def end_grace(self) -> float:
        """Return the grace of an end without the launcher's word, in seconds."""
        order = agent_records.read_json(self.site, agent_records.STOP) if self.site else None
        if order is not None:
            with contextlib.suppress(TypeError, ValueError):
                return max(0.0, float(order.get("grace", self.grace_s)))
        if self.guard.armed and self.guard.failure:
            return GUARD_GRACE_S
        return min(self.grace_s, LEASH_GRACE_S)

    def stop(self, grace_s: float, drain_s: float) -> dict[str, Any]:
        """End all nodes (TERM, `grace_s`, KILL), let the launcher read their last output, remove the site.

        Returns which nodes had to be given up (`stuck`: a process in uninterruptible sleep) and whether the site is
        gone. Calling it again, also at the same time, is harmless; the shorter grace wins.
        """
        self.guard.stopping = True
        for node in list(self.nodes.values()):
            node.stop(grace_s)
        with self.stopping:
            with self.lock:  # a start that is under way is part of it, a later one is refused
                nodes = dict(self.nodes)
            for node in nodes.values():
                node.stop(grace_s)
            _wait(nodes, grace_s + KILL_S, lambda node: node.gone)
            for node in nodes.values():
                node.kill_keeper()  # only one that is stopped or stuck is still there
            _wait(nodes, KILL_S, lambda node: node.gone)
            _wait(nodes, COPY_S if self.detached else drain_s, lambda node: node.drained)
            for node in nodes.values():
                node.hurry.set()
            stuck = sorted(number for number, node in nodes.items() if not node.gone.is_set())
            self._write_state()
            with self.lock:
                removed = self._drop_site()
            return {"stuck": stuck, "site_removed": removed}

    def _drop_site(self) -> bool:
        """Remove the site folder and the run's segments, unless a keeper still needs them. Holds `lock`."""
        if not self.site:
            return True
        if self.detached:
            self._write_result()
        agent_proc.remove_segments((), f"cpupp-{self.run_id}-")
        if self.held >= 0:
            os.close(self.held)
            self.held = -1
        with self._writing:
            removed = agent_site.remove_site(self.site)
            if removed:
                self.site = ""
                self.nodes.clear()
                self.detached = False
        return removed

    def _write_result(self) -> None:
        failure = self.guard.failure
        # In an ordered stop of all hosts some fall silent before others hear of it.
        if failure and failure["code"] == PEER_LOST and os.path.exists(os.path.join(self.site, agent_records.STOP)):
            failure = None
        with contextlib.suppress(OSError):
            agent_records.write_json(os.path.join(self.site, agent_records.RESULT), agent_records.result(failure))

    def _watch(self) -> None:
        with self.lock:
            site = self.site
            if not site or self._watched == site:
                return
            self._watched = site
        threading.Thread(target=self._keep_state, args=(site,), name="state", daemon=True).start()

    def _keep_state(self, site: str) -> None:
        """Write the state every second until the site is gone, and look whether somebody wants it to end."""
        ordered = False
        while self.site == site:
            self._write_state()
            if not ordered and os.path.exists(os.path.join(site, agent_records.STOP)):
                ordered = True
                self.on_end("somebody ordered this run to stop")
            self._news.wait(STATE_S)
            self._news.clear()

    def _write_state(self) -> None:
        with self._writing:
            guard = self.guard
            if not self.site or not self.nodes:
                return
            nodes = [
                agent_state.node_state(node, guard.ranks.get(number, {}), self.names)
                for number, node in sorted(self.nodes.items())
            ]
            agent_state.write_state(self.site, nodes, guard.failure, self.detached, self._own)
        for state in nodes:
            guard.look(state["node"], state["processes"])

    def tail(self, request: dict[str, Any]) -> str:
        """Return the last `size` bytes of a node's output as text."""
        log = os.path.join(self.site, "logs", f"node{int(request['node'])}.log")
        size = min(int(request.get("size", 65536)), 1 << 20)
        try:
            text = agent_logs.read_log(log, -size, size).data.decode("utf-8", "surrogateescape")
            return agent_mask.MASK.text(text)
        except OSError as error:
            raise RequestError("AGENT-REQUEST", f"{log}: {error.strerror}") from None


def _wait(nodes: dict[int, Node], timeout_s: float, event: Callable[[Node], threading.Event]) -> None:
    end = time.monotonic() + timeout_s
    for node in nodes.values():
        event(node).wait(max(0.0, end - time.monotonic()))


def _secrets(request: dict[str, Any]) -> list[str]:
    return [*request.get("mask", ()), *request.get("secrets", {}).values()]
