"""The heartbeat between vLLM nodes: who falls silent is reported, so that a run without a launcher ends as a whole.

One worker of each vLLM node (that of the lowest local rank) has two threads. One writes a counter to torch's store and
reads those of the other nodes; a store call may block for ever when the network drops packets. So the other thread
judges: by its own clock, and only over time in which it ran itself, because a worker that was stopped for a minute must
not take all others for dead. It also looks at its own host: when the agent is gone or stopped, or left word of a
failure, the node tells the others so in the place of its counter.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cpupp.plan.handoff import PeerReport, RankHandoff
from cpupp.rank.announce import append_report

PERIOD_S = 0.5
SILENT_S = 4.5
"""With the grace of those that are left, a gang is down in less than 10 s. TCP sends again after 0.2, 0.6, 1.4 and
3.0 s, so a link may be away for 3 s. Workers that compile, or run a step of a minute, on a busy machine are silent for
1 s."""
AGENT_STOPPED_S = 2.0
STORE = -1  # as node_rank of a report
LAST_WORD = "lost: "  # how a value begins that is no counter


class Store(Protocol):
    """A place that all vLLM nodes can write to and read from. Calls may block, or raise anything."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


@dataclass(slots=True, kw_only=True)
class Heard:
    """What the writing thread knows. rounds: how often it went through; values: node rank -> what that node wrote last;
    error: why the store cannot be used any more; word: what to write in the place of the counter.
    """

    rounds: int = 0
    values: dict[int, bytes] = field(default_factory=dict)
    error: str = ""
    word: str = ""


class Watch:
    """The policy: who is lost. No clock of its own, no IO."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self.silent_s = silent_s
        self._silent: dict[int, float] = {}
        self._values: dict[int, bytes] = {}
        self._told: dict[int, float] = {}
        self._rounds = -1
        self._last: float | None = None

    def judge(self, now: float, rounds: int, values: Mapping[int, bytes], error: str) -> list[tuple[int, float, str]]:
        """Return (node rank or STORE, silent seconds, sentence) of each loss, again every `silent_s` while it lasts.

        now: seconds of a monotonic clock. A gap between two calls counts for twice the period at most. A node that was
        never heard of is not judged: it is still starting.
        """
        passed = min(now - self._last, 2 * PERIOD_S) if self._last is not None else 0.0
        self._last = now
        went_on = rounds != self._rounds
        self._rounds = rounds
        self._count(STORE, went_on, passed)
        found: list[tuple[int, float, str]] = []
        if error:
            found.append((STORE, 0.0, f"the store of the run, in the worker of rank 0, failed: {error}"))
        elif self._silent[STORE] >= self.silent_s:
            text = f"the store of the run, in the worker of rank 0, has not answered for {self._silent[STORE]:.1f} s"
            found.append((STORE, self._silent[STORE], text))
        for node, value in values.items():
            # While the store does not answer nothing is known about the others.
            self._count(node, value != self._values.get(node), passed if went_on else 0.0)
            self._values[node] = value
            if value.startswith(LAST_WORD.encode()):
                word = value.decode("utf-8", "replace")[len(LAST_WORD) :]
                found.append((node, 0.0, f"vLLM node {node} fails: {word}"))
            elif self._silent[node] >= self.silent_s:
                silent = self._silent[node]
                found.append((node, silent, f"vLLM node {node} has not been heard of for {silent:.1f} s"))
        return [loss for loss in found if self._is_news(loss[0], now)]

    def _count(self, node: int, moved: bool, passed: float) -> None:
        self._silent[node] = 0.0 if moved else self._silent.get(node, 0.0) + passed
        if moved:
            self._told.pop(node, None)

    def _is_news(self, node: int, now: float) -> bool:
        if now - self._told.get(node, now - self.silent_s) < self.silent_s:
            return False
        self._told[node] = now
        return True


class Beat:
    """Runs the two threads of one vLLM node."""

    def __init__(
        self, handoff: RankHandoff, open_store: Callable[[], Store], report: Callable[[PeerReport], None]
    ) -> None:
        self.handoff = handoff
        self.open_store = open_store
        self.report = report
        self.heard = Heard()
        self._ended = threading.Event()
        self._agent = AgentSign(Path(handoff.reports).parent)

    def start(self) -> None:
        """Start beating, until the process ends."""
        for target in (self._write, self._judge):
            threading.Thread(target=target, name=f"cpupp-beat{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Stop beating; the others then lose this node."""
        self._ended.set()

    def _key(self, node: int) -> str:
        return f"cpupp/beat/{self.handoff.run}/{self.handoff.attempt}/{node}"

    def _write(self) -> None:
        store: Store | None = None
        broken = False
        while not self._ended.wait(PERIOD_S if self.heard.rounds else 0.0):
            try:
                store = store or self.open_store()
                self._round(store)
                broken = False
            except Exception as error:
                # Once more over a new connection: only the old one may have broken.
                if broken or store is None:
                    self.heard.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    return
                store, broken = None, True

    def _round(self, store: Store) -> None:
        heard, mine = self.heard, self.handoff.node_rank
        store.set(self._key(mine), heard.word or str(heard.rounds))
        for node in range(self.handoff.num_nodes):
            if node != mine and (node in heard.values or store.check([self._key(node)])):
                heard.values[node] = store.get(self._key(node))
        heard.rounds += 1

    def _judge(self) -> None:
        watch = Watch()
        while not self._ended.wait(PERIOD_S):
            heard = self.heard
            word = self._agent.trouble(time.monotonic())
            heard.word = LAST_WORD + word if word else ""
            for node, silent_s, text in watch.judge(time.monotonic(), heard.rounds, dict(heard.values), heard.error):
                with contextlib.suppress(OSError):
                    self.report(PeerReport(pid=os.getpid(), node_rank=node, silent_s=silent_s, message=text))


class AgentSign:
    """Whether the agent of this host, named in the site's record, still does its work."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self._agent = 0
        self._start = b""
        self._stopped: float | None = None
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads((site / "site.json").read_text(encoding="utf-8"))
            self._agent, self._start = int(record["agent"]), str(record["agent_start"]).encode()
        if self._state() is None:
            self._agent = 0  # not to be seen from here, as in a container of its own

    def trouble(self, now: float) -> str:
        """Return what the other hosts must know, empty when all is well. now: seconds of a monotonic clock."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            failure = json.loads((self.site / "failure.json").read_text(encoding="utf-8"))
            return str(failure["message"])
        if not self._agent:
            return ""
        state = self._state()
        if state is None or state in b"ZX":
            return "its agent has ended"
        if state != b"T":
            self._stopped = None
        elif self._stopped is None:
            self._stopped = now
        elif now - self._stopped > AGENT_STOPPED_S:
            return "its agent is stopped (SIGSTOP)"
        return ""

    def _state(self) -> bytes | None:
        """The agent's state letter, None when there is no such process."""
        try:
            data = Path(f"/proc/{self._agent}/stat").read_bytes()
        except OSError:
            return None
        fields = data[data.rfind(b")") + 2 :].split()
        return fields[0] if fields[19] == self._start else None


_beat: Beat | None = None


def start_beat(handoff: RankHandoff, rank: int, world_size: int) -> None:
    """Start the heartbeat of this vLLM node in the worker of its lowest local rank. Harmless when called again.

    rank, world_size: global, of torch's default group, which must be joined. vLLM gives every vLLM node as many ranks.
    """
    global _beat
    if _beat is not None or handoff.num_nodes < 2 or rank % max(1, world_size // handoff.num_nodes):
        return
    _beat = Beat(handoff, default_store(), lambda report: append_report(handoff.reports, report))
    _beat.start()


def default_store() -> Callable[[], Store]:
    """Return what opens a connection of our own to the TCPStore of torch's default group.

    Of our own, because a client serves one call at a time: a rendezvous of the ranks that waits would hold us up.
    """
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    found = _get_default_store()
    while isinstance(found, dist.PrefixStore):
        found = found.underlying_store
    host, port = found.host, found.port

    def connect() -> Store:
        limit = timedelta(seconds=3)
        store: Store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        return store

    return connect
