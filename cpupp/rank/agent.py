"""The agent: what cpupp runs on each host, for as long as a launcher holds the other end of its stdin.

It probes the host and runs vLLM nodes. Requests arrive as JSON lines on stdin; replies and events leave on stdout (see
agent_request and agent_outbox). Standard library only, any python3 >= 3.8, delivered over the connection itself (see
agent_boot).

The leash: when stdin ends, when no line came for `leash_s` (the launcher sends heartbeats), or on SIGTERM, SIGHUP and
SIGINT, every process that was started here is ended, its segments and files are removed, and the agent exits. Should
the agent itself be killed, the keepers do all that (see agent_keeper).

Detached, it needs no launcher: the end of stdin, silence and SIGHUP mean nothing any more. SIGTERM, SIGINT, `stop.json`
in the site and the first failure (see agent_guard) end everything.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from . import agent_net, agent_probe, agent_proc, agent_runs, agent_site
from .agent_attempt import COPY_S, GRACE_S, KILL_S, Attempt
from .agent_children import Children
from .agent_http import http
from .agent_outbox import Outbox
from .agent_request import RequestError, Requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .agent_rare import Rare

PROTOCOL = 1
RARE = (  # operations that no launch needs, of agent_rare
    *("find", "clock", "health", "ask_vllm", "clean"),
    *("doors_open", "doors_close", "pairs_reach", "pairs_measure", "load_find", "load_run"),
)
LEASH_S = 20.0
DRAIN_S = 2.0  # how long a stop waits for the launcher to read the last output
WORD_S = 1.0  # how long the ranks get to tell the other hosts of a failure here


class End(NamedTuple):
    """A reason to end; with the launcher's connection (`attached` only) or whatever is (not)."""

    reason: str
    attached: bool = False


class Agent:
    """Serves one launcher; see the module's text."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.outbox = Outbox(1)
        self.inbox: queue.SimpleQueue[bytes | End] = queue.SimpleQueue()
        self.children = Children()
        self.sources = sources
        self.nonces = agent_probe.Nonces()
        self.rare: Rare | None = None
        self.rare_lock = threading.Lock()
        self.attempt = Attempt(self.outbox, self.children, sources, lambda reason: self.inbox.put(End(reason)))
        self.leash_s = self.attempt.leash_s = LEASH_S
        self.grace_s = GRACE_S
        attempt = self.attempt
        self.requests = Requests(
            self.outbox,
            {
                "ping": lambda request: {},
                "configure": self.configure,
                "probe": lambda request: agent_probe.host_facts(request, self.nonces, self.children),
                "shm_read": lambda request: agent_probe.read_nonces(request["names"], request["values"]),
                "shm_clear": lambda request: self.nonces.clear(),
                "routes": lambda request: agent_net.routes(request["targets"]),
                "bind_check": lambda request: agent_net.check_ports(request["ports"], request.get("address", "")),
                "prepare": attempt.prepare,
                "start": attempt.start,
                "stop": lambda request: attempt.stop(float(request.get("grace", self.grace_s)), DRAIN_S),
                "detach": attempt.detach,
                "http": self.ask,
                "tail": attempt.tail,
                "runs": lambda request: agent_runs.runs(attempt.site),
                "run_stop": self.run_stop,
                "run_log": agent_runs.run_log,
                "run_forget": agent_runs.run_forget,
                **dict.fromkeys(RARE, self.rarely),
            },
        )

    def serve(self) -> str:
        """Answer requests until the leash is pulled. Returns the reason."""
        self.outbox.put({"event": "hello", "protocol": PROTOCOL, "python": sys.version.split()[0], "pid": os.getpid()})
        threading.Thread(target=self._read, name="stdin", daemon=True).start()
        threading.Thread(target=_sweep, name="sweep", daemon=True).start()
        heard = ticked = time.monotonic()
        while True:
            item: bytes | End | None = None
            with contextlib.suppress(queue.Empty):
                item = self.inbox.get(timeout=0.5)
            now = time.monotonic()
            detached = self.attempt.detached
            if isinstance(item, End) and not (item.attached and detached):
                return item.reason
            if isinstance(item, bytes):
                heard = now
                self.requests.dispatch(item)
            if now - heard > self.leash_s and not detached:
                return f"no line from the launcher for {self.leash_s:g} s"
            if now - ticked >= 1.0:
                ticked = now
                for node in list(self.attempt.nodes.values()):
                    node.tick(self.leash_s)

    def take_down(self) -> None:
        """End everything without waiting for the launcher, which is gone or deaf."""
        self.children.end_asked()
        attempt = self.attempt
        for node in list(attempt.nodes.values()):
            node.hurry.set()
        if attempt.guard.armed and attempt.guard.is_own:
            time.sleep(WORD_S)
        # Bounded, whatever hangs: when this process ends, the keepers go on by themselves.
        grace_s = attempt.end_grace()
        stop = threading.Thread(target=attempt.stop, args=(grace_s, 0.0), daemon=True)
        stop.start()
        stop.join(grace_s + 2 * KILL_S + (COPY_S if attempt.detached else 0.0))
        self.nonces.clear()
        self.outbox.flush(0.5)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in sys.stdin.buffer:
                self.inbox.put(line)
        self.inbox.put(End("the launcher closed the connection", attached=True))

    def configure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Set the leash: seconds without a line from the launcher, and the default grace between TERM and KILL."""
        self.leash_s = self.attempt.leash_s = float(request.get("leash_s", self.leash_s))
        self.grace_s = self.attempt.grace_s = float(request.get("grace_s", self.grace_s))
        return {"leash_s": self.leash_s, "grace_s": self.grace_s}

    def rarely(self, request: dict[str, Any]) -> Any:
        """Do an operation that no launch needs; their modules are compiled at the first one."""
        with self.rare_lock:
            if self.rare is None:
                from .agent_rare import Rare

                self.rare = Rare(self.children, self.sources)
        return self.rare.operations[request["op"]](request)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make one HTTP request. own_port: only when what listens there was started by this agent, and nothing else."""
        port = request.get("own_port")
        if port:
            holder = agent_net.stranger(port, _own_processes())
            if holder:
                raise RequestError("API-STRANGER", f"port {port} is held by {holder}, which is not of this run")
        return http(request)

    def run_stop(self, request: dict[str, Any]) -> dict[str, Any]:
        """End a run on this host, this agent's own or another's."""
        return agent_runs.run_stop(request, self.attempt.site, lambda grace_s: self.attempt.stop(grace_s, DRAIN_S))


def _own_processes() -> Iterator[int]:
    # A generator: /proc is walked only when somebody listens, not at every question of a start.
    yield from agent_proc.descendants([os.getpid()], agent_proc.process_table())


def _sweep() -> None:
    agent_site.sweep_sites()
    agent_probe.sweep_nonces()


def main(sources: dict[str, str]) -> int:
    """Serve the launcher at stdin and stdout; does not return."""
    agent_proc.become_subreaper()
    agent = Agent(sources)

    def ended_by(signum: int, _: object) -> None:
        agent.inbox.put(End(f"signal {signum}", attached=signum == signal.SIGHUP))

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, ended_by)
    reason = agent.serve()
    agent.take_down()
    with contextlib.suppress(OSError):
        os.write(2, f"cpupp agent: {reason}\n".encode())
    # Threads may wait for a launcher that never reads; nothing of theirs is needed any more.
    os._exit(0)
