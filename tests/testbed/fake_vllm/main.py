"""`vllm serve`, scripted: on the head an API server with an engine core and its workers below, else workers alone.

Children are forked, not executed anew: a whole node starts in a fraction of a second. They outlive a parent that is
killed, as vLLM's do.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from . import api
from .script import Script, forever
from .worker import Place
from .worker import run as run_worker

if TYPE_CHECKING:
    from cpupp.plan.handoff import RankHandoff

POLL_S = 0.05
END_S = 5.0  # what children get between TERM and KILL, in vLLM too


def main(argv: list[str]) -> int:
    """Run as `python -m vllm.entrypoints.cli.main serve MODEL ...`."""
    script = Script(os.environ.get("FAKE_VLLM", ""))
    if script.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    arguments = parse(argv)
    script.reach("import")
    plugins = [entry.load() for entry in metadata.entry_points(group="vllm.general_plugins") if allowed(entry.name)]
    for register in plugins:
        register()
    if script.print_env:
        for name, value in os.environ.items():
            script.say(f"env {name}={value!r}")
    script.reach("configure")
    script.say(f"non-default args: {arguments}")
    node = FakeNode(script, arguments, plugins, handoff_of(os.environ.get("CPUPP_HANDOFF")))
    return node.run_follower() if "headless" in arguments else node.run_head()


def handoff_of(text: str | None) -> RankHandoff | None:
    """What cpupp has handed over; None where vLLM was started by hand, and cpupp is not on the path."""
    if not text:
        return None
    from cpupp.plan.handoff import RankHandoff

    return RankHandoff.decode(text)


def allowed(plugin: str) -> bool:
    """VLLM_PLUGINS, when set, is an allow-list."""
    listed = os.environ.get("VLLM_PLUGINS")
    return listed is None or plugin in listed.split(",")


def parse(argv: list[str]) -> dict[str, Any]:
    """Read `serve MODEL --name value --flag` into name (with underscores) -> text, True for a flag."""
    if argv[:1] != ["serve"]:
        raise SystemExit(f"usage: vllm serve MODEL, not {argv[:1]}")
    found: dict[str, Any] = {"model": argv[1]}
    name = ""
    for word in argv[2:]:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value or True
        else:
            found[name] = word
    return found


class FakeNode:
    """One vLLM node: the process that is asked to run, and what it forks."""

    def __init__(
        self, script: Script, arguments: dict[str, Any], plugins: list[Callable[[], None]], handoff: RankHandoff | None
    ) -> None:
        self.script = script
        self.arguments = arguments
        self.plugins = plugins
        self.handoff = handoff
        self.children: dict[int, str] = {}  # pid -> name

    def run_follower(self) -> int:
        """Start this node's workers and watch them: a headless node ends when one of them does."""
        signal_children(self)
        self.start_workers(None)
        return self.watch()

    def run_head(self) -> int:
        """Start the engine core, serve the API once it is ready, end when it does."""
        mine, its = socket.socketpair()
        self.fork("EngineCore", lambda: self.run_core(its, mine))
        its.close()
        signal_children(self)
        api.start(self.script, self.arguments, mine)
        return self.watch()

    def run_core(self, asked: socket.socket, other: socket.socket) -> int:
        """The engine core: starts the workers, passes the API server's steps on to rank 0, watches the workers."""
        other.close()
        self.children.clear()
        self.script.who = "EngineCore"
        mine, its = socket.socketpair()
        self.start_workers(its)
        its.close()
        api.pass_on(self.script, asked, mine)
        return self.watch()

    def start_workers(self, steps: socket.socket | None) -> None:
        """Fork the worker of each local rank."""
        self.script.reach("start")
        self.script.say("Initializing a V1 LLM engine (v0.32.0) with config: scripted")
        count = Place(self.arguments, 0).num_local
        for local_rank in range(count):
            place = Place(self.arguments, local_rank)

            def work(place: Place = place) -> int:
                run_worker(self.script, place, self.handoff, steps if place.rank == 0 else None)
                return 0

            self.fork(f"Worker-{local_rank}", work)

    def fork(self, name: str, work: Callable[[], int]) -> int:
        """Run `work` in a child called `VLLM::name`."""
        pid = os.fork()
        if pid:
            self.children[pid] = name
            return pid
        code = 1
        try:
            if not self.script.ignore_term:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with open("/proc/self/comm", "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(f"VLLM::{name}")
            for register in self.plugins:
                register()
            code = work()
        except BaseException as error:
            self.script.trace("WorkerProc failed to start.", f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)

    def watch(self) -> int:
        """Wait until a child ends, which is the end of this process too."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self.children:
                break
            time.sleep(POLL_S)
        name = self.children.pop(pid)
        if self.script.notice_s < 0:
            forever()
        time.sleep(float(self.script.notice_s))
        code = os.waitstatus_to_exitcode(status)
        proc = "Engine core proc EngineCore" if name == "EngineCore" else f"Worker proc Vllm{name}"
        self.script.say(f"{proc} died unexpectedly (exit code: {code}), shutting down.", "ERROR")
        self.end_children()
        return 1

    def end_children(self) -> None:
        """TERM and after a while KILL the children."""
        deadline = time.monotonic() + END_S
        for pid in self.children:
            os.kill(pid, signal.SIGTERM)
        while self.children:
            if time.monotonic() > deadline:
                for pid in self.children:
                    os.kill(pid, signal.SIGKILL)
            for pid in list(self.children):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self.children[pid]
            time.sleep(0.01)


def signal_children(node: FakeNode) -> None:
    """On SIGTERM, end the children and then this process, with exit code 0."""

    def end(*_: object) -> None:
        node.script.say("Shutting down")
        node.end_children()
        os._exit(0)

    if not node.script.ignore_term:
        signal.signal(signal.SIGTERM, end)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
