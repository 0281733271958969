"""The agent: what cpupp runs on each host, for as long as a launcher holds the other end of its stdin.

It probes the host and runs vLLM nodes. Requests arrive as JSON lines on stdin; replies and events leave on stdout (see
agent_outbox). Standard library only, any python3 >= 3.8, delivered over the connection itself (see agent_boot).

The leash: when stdin ends, when no line came for `leash_s` (the launcher sends heartbeats), or on SIGTERM, SIGHUP and
SIGINT, every process that was started here is ended, its segments and files are removed, and the agent exits. Should
the agent itself be killed, the keepers do all that (see agent_keeper).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from typing import Any, Callable  # noqa: UP035  # Python 3.8 cannot subscript collections.abc.Callable

from . import agent_env, agent_net, agent_probe, agent_proc, agent_site
from .agent_children import Children
from .agent_node import Node, NodeError
from .agent_outbox import Outbox

PROTOCOL = 1
LEASH_S = 20.0
GRACE_S = 5.0
LEASH_GRACE_S = 3.0  # when the launcher is gone nobody waits for last words, and ten seconds are promised for all
KILL_S = 2.0  # what a keeper gets beyond the grace before the agent takes over
DRAIN_S = 2.0  # how long a stop waits for the launcher to read the last output
LONGEST_BODY = 16 << 20


class RequestError(Exception):
    """A request that cannot be done: a stable code and the host's own words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Agent:
    """Serves one launcher; see the module's text."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources
        self.outbox = Outbox(1)
        self.inbox: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
        self.children = Children()
        self.nonces = agent_probe.Nonces()
        self.nodes: dict[int, Node] = {}
        self.site = ""
        self.run_id = ""
        self.held = -1
        self.lock = threading.Lock()  # nodes and site
        self.stopping = threading.Lock()  # one stop at a time
        self.leash_s = LEASH_S
        self.grace_s = GRACE_S
        self.operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "ping": lambda request: {},
            "configure": self.configure,
            "probe": lambda request: agent_probe.host_facts(request, self.nonces, self.children),
            "shm_read": lambda request: agent_probe.read_nonces(request["names"], request["values"]),
            "shm_clear": lambda request: self.nonces.clear(),
            "routes": lambda request: agent_net.routes(request["targets"]),
            "bind_check": lambda request: agent_net.check_ports(request["ports"], request.get("address", "")),
            "prepare": self.prepare,
            "start": self.start,
            "stop": lambda request: self.stop(float(request.get("grace", self.grace_s)), DRAIN_S),
            "http": http,
            "tail": self.tail,
        }

    def serve(self) -> str:
        """Answer requests until the leash is pulled. Returns the reason."""
        self.outbox.put({"event": "hello", "protocol": PROTOCOL, "python": sys.version.split()[0], "pid": os.getpid()})
        threading.Thread(target=self._read, name="stdin", daemon=True).start()
        threading.Thread(target=_sweep, name="sweep", daemon=True).start()
        heard = ticked = time.monotonic()
        while True:
            item: bytes | str | None = None
            with contextlib.suppress(queue.Empty):
                item = self.inbox.get(timeout=0.5)
            now = time.monotonic()
            if isinstance(item, str):
                return item
            if item:
                heard = now
                self._dispatch(item)
            if now - heard > self.leash_s:
                return f"no line from the launcher for {self.leash_s:g} s"
            if now - ticked >= 1.0:
                ticked = now
                for node in list(self.nodes.values()):
                    node.tick(self.leash_s)

    def take_down(self) -> None:
        """End everything without waiting for the launcher, which is gone or deaf."""
        self.children.end_asked()
        for node in list(self.nodes.values()):
            node.hurry.set()
        # Bounded, whatever hangs: when this process ends, the keepers go on by themselves.
        grace_s = min(self.grace_s, LEASH_GRACE_S)
        stop = threading.Thread(target=self.stop, args=(grace_s, 0.0), daemon=True)
        stop.start()
        stop.join(grace_s + 2 * KILL_S)
        self.nonces.clear()
        self.outbox.flush(0.5)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in sys.stdin.buffer:
                self.inbox.put(line)
        self.inbox.put("the launcher closed the connection")

    def _dispatch(self, line: bytes) -> None:
        try:
            request = json.loads(line)
            operation = self.operations.get(request["op"])
            number = request["id"]
        except (ValueError, KeyError, TypeError):
            self.outbox.put({"event": "ignored", "line": line[:200].decode("ascii", "replace")})
            return
        if operation is None:
            known = ", ".join(self.operations)
            message = f"unknown operation {request['op']!r}; known: {known}"
            self.outbox.put({"id": number, "ok": False, "error": {"code": "AGENT-REQUEST", "message": message}})
        elif request["op"] in ("ping", "configure"):
            self._answer(number, operation, request)
        else:
            # A thread each, so that nothing slow keeps a heartbeat or a stop order waiting.
            threading.Thread(target=self._answer, args=(number, operation, request), daemon=True).start()

    def _answer(self, number: int, operation: Callable[[dict[str, Any]], Any], request: dict[str, Any]) -> None:
        try:
            reply = {"id": number, "ok": True, "data": operation(request)}
        except RequestError as error:
            reply = {"id": number, "ok": False, "error": {"code": error.code, "message": str(error)}}
        except (KeyError, TypeError, ValueError) as error:
            message = f"{request['op']}: {type(error).__name__}: {error}"
            reply = {"id": number, "ok": False, "error": {"code": "AGENT-REQUEST", "message": message}}
        except Exception as error:
            trace = traceback.format_exc(limit=-3)
            message = f"{request['op']}: {type(error).__name__}: {error}\n{trace}"
            reply = {"id": number, "ok": False, "error": {"code": "AGENT-FAILED", "message": message}}
        self.outbox.put(reply)

    def configure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Set the leash: seconds without a line from the launcher, and the default grace between TERM and KILL."""
        self.leash_s = float(request.get("leash_s", self.leash_s))
        self.grace_s = float(request.get("grace_s", self.grace_s))
        return {"leash_s": self.leash_s, "grace_s": self.grace_s}

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the site folder with its files for one attempt of a run; the former one must be at its end."""
        with self.lock:
            if any(not node.gone.is_set() for node in self.nodes.values()):
                raise RequestError("AGENT-BUSY", f"vLLM nodes of run {self.run_id} still run here")
            self._refuse_while_stopping()
            self._drop_site()
            try:
                self.site, self.held = agent_site.make_site(
                    request["run"], request["attempt"], request["host"], request.get("files", {})
                )
            except (agent_site.SiteError, OSError) as error:
                raise RequestError("SITE-NO-PLACE", str(error)) from None
            self.run_id = request["run"]
            return {"site": self.site}

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start one vLLM node under a keeper and return its pid; its events follow."""
        number = int(request["node"])
        with self.lock:
            if not self.site:
                raise RequestError("AGENT-REQUEST", "start before prepare")
            if number in self.nodes:
                raise RequestError("AGENT-REQUEST", f"vLLM node {number} was started already")
            self._refuse_while_stopping()
            reports = str(request.get("reports") or f"{{site}}/reports-{number}.ndjson").replace("{site}", self.site)
            node = Node(number, self._order(number, request), reports, self.outbox, self.children, self.sources)
            node.launch()
            self.nodes[number] = node
        # Not under the lock: a program on a dead network disk may take for ever, and a stop must still get through.
        try:
            return {"pid": node.wait_started()}
        except NodeError as error:
            with self.lock:
                self.nodes.pop(number, None)
            raise RequestError("START-FAILED", str(error)) from None

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
            "cwd": os.path.expanduser(request.get("cwd") or os.getcwd()),
            "cores": list(request.get("cores") or ()),
            "log": os.path.join(self.site, "logs", f"node{number}.log"),
            "site": self.site,
            "shm_prefix": f"cpupp-{self.run_id}-",
            "agent_pid": os.getpid(),
            "leash_s": self.leash_s,
            "grace_s": min(self.grace_s, LEASH_GRACE_S),
        }

    def stop(self, grace_s: float, drain_s: float) -> dict[str, Any]:
        """End all nodes (TERM, `grace_s`, KILL), let the launcher read their last output, remove the site.

        Returns which nodes had to be given up (`stuck`: a process in uninterruptible sleep) and whether the site is
        gone. Calling it again, also at the same time, is harmless; the shorter grace wins.
        """
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
            _wait(nodes, drain_s, lambda node: node.drained)
            for node in nodes.values():
                node.hurry.set()
            stuck = sorted(number for number, node in nodes.items() if not node.gone.is_set())
            with self.lock:
                removed = self._drop_site()
            return {"stuck": stuck, "site_removed": removed}

    def _drop_site(self) -> bool:
        """Remove the site folder and the run's segments, unless a keeper still needs them. Holds `lock`."""
        if not self.site:
            return True
        agent_proc.remove_segments((), f"cpupp-{self.run_id}-")
        if self.held >= 0:
            os.close(self.held)
            self.held = -1
        removed = agent_site.remove_site(self.site)
        if removed:
            self.site = ""
            self.nodes.clear()
        return removed

    def tail(self, request: dict[str, Any]) -> str:
        """Return the last `size` bytes of a node's output as text."""
        path = os.path.join(self.site, "logs", f"node{int(request['node'])}.log")
        size = min(int(request.get("size", 65536)), 1 << 20)
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - size))
                return file.read(size).decode("utf-8", "surrogateescape")
        except OSError as error:
            raise RequestError("AGENT-REQUEST", f"{path}: {error.strerror}") from None


def _wait(nodes: dict[int, Node], timeout_s: float, event: Callable[[Node], threading.Event]) -> None:
    end = time.monotonic() + timeout_s
    for node in nodes.values():
        event(node).wait(max(0.0, end - time.monotonic()))


def http(request: dict[str, Any]) -> dict[str, Any]:
    """Make one HTTP request from this host, never through a proxy; any status is an answer."""
    data = (request.get("body") or "").encode("utf-8", "surrogateescape") or None
    query = urllib.request.Request(
        request["url"], data=data, headers=request.get("headers") or {}, method=request.get("method", "GET")
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        try:
            answer = opener.open(query, timeout=float(request.get("http_timeout", 10)))
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read(LONGEST_BODY).decode("utf-8", "surrogateescape")
            return {"status": answer.getcode(), "headers": dict(answer.headers.items()), "body": text}
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise RequestError("HTTP-FAILED", f"{request['url']}: {reason}") from None
    except Exception as error:  # http.client has errors of its own, such as RemoteDisconnected's parents
        raise RequestError("HTTP-FAILED", f"{request['url']}: {type(error).__name__}: {error}") from None


def _sweep() -> None:
    agent_site.sweep_sites()
    agent_probe.sweep_nonces()


def main(sources: dict[str, str]) -> int:
    """Serve the launcher at stdin and stdout; does not return."""
    agent_proc.become_subreaper()
    agent = Agent(sources)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda signum, _: agent.inbox.put(f"signal {signum}"))
    reason = agent.serve()
    agent.take_down()
    with contextlib.suppress(OSError):
        os.write(2, f"cpupp agent: {reason}\n".encode())
    # Threads may wait for a launcher that never reads; nothing of theirs is needed any more.
    os._exit(0)
