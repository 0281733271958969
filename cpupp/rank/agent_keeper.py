"""The keeper: parent of one vLLM node, and the near end of its leash.

A process of its own, started by the agent, in its own session, and adopter of every orphan below it (subreaper). It
starts the node and ends it - all descendants, however they moved themselves away - when the agent says so, when the
agent is gone or deaf, or when the node's main process has exited. The agent in turn watches the keeper.

Orders arrive as lines on a descriptor of their own: first the node to start, then empty lines as heartbeat,
`{"leash": leash_s, "grace": grace_s}` and `{"stop": grace_s}`. Status lines go to stdout: spawned, error, died (another
process of the node than its main one), exited, shm, gone, and the pids of the node's processes as heartbeat.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from . import agent_mask, agent_proc, agent_shm_watch, agent_site
from .agent_halted import HaltWatch

TICK_S = 1.0
SLOWEST_SCAN_S = 4.0
CHUNK = 100  # entries in a status line, which must stay below PIPE_BUF to be written whole


class Keeper:
    """Holds one vLLM node; see the module's text."""

    def __init__(self, order: dict[str, Any], control: int) -> None:
        self.order = order
        self.control = control
        self.agent_pid: int = order["agent_pid"]
        self.leash_s: float = order["leash_s"]
        self.grace_s: float = order["grace_s"]
        self.main_pid = 0
        self.heard = time.monotonic()
        self.agent_there = True
        self.stop_grace: float | None = None
        self.buffer = b""
        # Segments that were there before the node are never ours, whoever maps them.
        self.strangers = set(agent_proc.shm_files(owned_only=False).values())
        self.segments: set[tuple[int, int]] = set()
        self.living: dict[int, int] = {}  # pid -> start time of the node's processes but the main one
        self.others = agent_proc.Strangers()
        self.halts = HaltWatch()
        self.scan_every = TICK_S
        self.next_scan = 0.0
        self.next_tick = 0.0
        self.wakeup = _signal_pipe()
        self.births = agent_shm_watch.open_watch()

    def run(self) -> int:
        """Start the node and stay until nothing of it is left. Returns the keeper's own exit status."""
        held = agent_site.hold(self.order["site"])
        try:
            self.spawn()
        except (OSError, ValueError) as error:
            self.tell({"error": str(error)})
        else:
            while self.main_pid and self.stop_grace is None:
                self.wait(TICK_S)
                self.reap()
            self.end_all(self.grace_s if self.stop_grace is None else self.stop_grace)
            self.tell({"gone": agent_proc.remove_segments(self.segments, self.order["shm_prefix"])})
        os.close(held)
        if not self.agent_there:
            agent_site.remove_site(self.order["site"])
        return 0

    def spawn(self) -> None:
        """Start the node's main process in a session of its own, all output appended to its log file."""
        order = self.order
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        cores = os.sched_getaffinity(0)
        if order["cores"]:
            os.sched_setaffinity(0, order["cores"])
        try:
            process = subprocess.Popen(
                [_bytes(argument) for argument in order["argv"]],
                env={_bytes(name): _bytes(value) for name, value in order["env"].items()},
                cwd=_bytes(order["cwd"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
            os.sched_setaffinity(0, cores)
        self.main_pid = process.pid
        process.returncode = 0  # reaped below together with the orphans, not by subprocess
        self.tell({"spawned": process.pid})

    def wait(self, timeout_s: float) -> None:
        """Sleep until a signal, an order, or the time-out; then judge the leash and look at shared memory."""
        sources = [self.wakeup, *([self.control] if self.agent_there else [])]
        sources += [self.births] if self.births >= 0 else []
        ready, _, _ = select.select(sources, [], [], timeout_s)
        if self.wakeup in ready:
            signals = os.read(self.wakeup, 4096)
            if any(number != signal.SIGCHLD for number in signals):
                self.stop(self.grace_s)
        if self.control in ready:
            self.read_orders()
        now = time.monotonic()
        if self.agent_there and (now - self.heard > self.leash_s or self.halts.look(self.agent_pid, now)):
            # A stopped agent answers nobody. It is our parent, so its pid is certain.
            if os.getppid() == self.agent_pid:
                agent_proc.send_signal([self.agent_pid], signal.SIGKILL)
            self.agent_there = False
            self.stop(self.grace_s)
        if self.births in ready:
            agent_shm_watch.drain(self.births)
            self.scan_every, self.next_scan = TICK_S, now
        if now >= min(self.next_tick, self.next_scan):
            self.watch(now, self.others.table(now))

    def watch(self, now: float, table: dict[int, agent_proc.Proc]) -> None:
        """Look at the node's processes, and at their shared memory, where it is time."""
        if now >= self.next_tick:
            self.next_tick = now + TICK_S
            self.look(table)
            self.tell_living()
        if now >= self.next_scan:
            self.scan(table)
            self.next_scan = time.monotonic() + self.scan_every

    def read_orders(self) -> None:
        """Take in what the agent wrote; its end means that the agent is gone."""
        data = os.read(self.control, 65536)
        self.heard = time.monotonic()
        if not data:
            self.agent_there = False
            self.stop(self.grace_s)
        self.take_orders(data)

    def take_orders(self, data: bytes) -> None:
        """Act on complete lines, keep the rest."""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in filter(None, lines):
            order = json.loads(line)
            if "stop" in order:
                self.stop(order["stop"])
            else:
                self.leash_s, self.grace_s = order["leash"], order["grace"]

    def stop(self, grace_s: float) -> None:
        """Remember that the node must end; a shorter grace wins."""
        self.stop_grace = grace_s if self.stop_grace is None else min(grace_s, self.stop_grace)

    def reap(self) -> bool:
        """Collect every ended child, adopted ones too. Returns False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self.main_pid:
                self.main_pid = 0
                self.tell({"exited": agent_proc.exit_code(status)})
            elif self.living.pop(pid, None) is not None:
                self.tell_death(pid, agent_proc.exit_code(status))

    def end_all(self, grace_s: float) -> None:
        """TERM everything below this process, and after the grace KILL until nothing is left.

        A subreaper without children has no descendants, so `reap` alone decides that all are gone: no walk through
        /proc can, because a parent may die between two of its reads.
        """
        started = time.monotonic()
        told: set[int] = set()
        killing = False
        while self.reap():
            grace_s = min(grace_s, grace_s if self.stop_grace is None else self.stop_grace)
            table = agent_proc.process_table()
            below = agent_proc.descendants([os.getpid()], table)
            if not told or (not killing and time.monotonic() - started > grace_s):
                self.scan(table)
            if time.monotonic() - started > grace_s:
                killing = True
                agent_proc.send_signal(below, signal.SIGKILL)
            else:
                agent_proc.send_signal(below - told, signal.SIGTERM)
                agent_proc.send_signal(below - told, signal.SIGCONT)  # a stopped process cannot act on TERM
                told |= below
            self.wait(0.02 if killing else 0.1)

    def look(self, table: dict[int, agent_proc.Proc]) -> None:
        """Tell which processes of the node ended since the last look: vLLM does not watch all of its own."""
        for pid, start in list(self.living.items()):
            process = table.get(pid)
            if process is not None and process.start == start and not process.ended:
                continue
            del self.living[pid]
            zombie = process is not None and process.start == start
            self.tell_death(pid, agent_proc.exit_code(process.status) if process and zombie else None)
        for pid in agent_proc.descendants([os.getpid()], table) - {self.main_pid}:
            if not table[pid].ended:
                self.living[pid] = table[pid].start

    def tell_living(self) -> None:
        """Name the node's processes, which is also this keeper's sign of life."""
        pids = [*([self.main_pid] if self.main_pid else []), *sorted(self.living)]
        for start in range(0, max(1, len(pids)), CHUNK):
            self.tell({"pids": pids[start : start + CHUNK], "from": start})

    def tell_death(self, pid: int, code: int | None) -> None:
        """Report the end of a process while the node should run; at the node's own end it is no news."""
        if self.main_pid and self.stop_grace is None:
            self.tell({"died": pid, "code": code})

    def scan(self, table: dict[int, agent_proc.Proc]) -> None:
        """Record which segments the node's processes use, so that they can be removed when it is gone."""
        below = agent_proc.descendants([os.getpid()], table)
        try:
            device = os.stat(agent_proc.SHM).st_dev
        except OSError:
            return
        new = sorted(agent_proc.shm_in_use(below, device) - self.strangers - self.segments)
        self.segments.update(new)
        # Reading the maps of large processes costs milliseconds: look less often when nothing changes.
        self.scan_every = TICK_S if new else min(SLOWEST_SCAN_S, self.scan_every * 1.2)
        for start in range(0, len(new), CHUNK):
            self.tell({"shm": new[start : start + CHUNK]})

    def tell(self, status: dict[str, Any]) -> None:
        """Write one status line; an agent that does not read, or is gone, must not hold the keeper up."""
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(status).encode() + b"\n")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _signal_pipe() -> int:
    """Let every signal that concerns the keeper only write its number to a pipe; return the end to read."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    return read_end


def main(sources: dict[str, str]) -> int:
    """Read the order from the descriptor named in argv and keep that node."""
    control = int(sys.argv[1])
    agent_proc.become_subreaper()
    fcntl.fcntl(control, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    os.set_blocking(1, False)
    data = b""
    while b"\n" not in data:
        piece = os.read(control, 65536)
        if not piece:
            return 1  # the agent ended before it had anything to keep
        data = (data + piece).lstrip(b"\n")  # an empty line is the agent's sign of life, which may come first
    order, _, rest = data.partition(b"\n")
    keeper = Keeper(json.loads(order), control)
    agent_mask.MASK.add(keeper.order.get("mask", ()))
    keeper.take_orders(rest)
    return keeper.run()
