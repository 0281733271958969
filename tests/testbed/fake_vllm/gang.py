"""The ranks' connections: every rank joins rank 0 over TCP on the master port, and each step goes through all of them.

Rank 0 also keeps a small store (set, get, check) on that port, in the place of torch's TCPStore.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

CONNECT_EVERY_S = 0.05
Say = Callable[[str, str], None]
Count = Callable[[], contextlib.AbstractContextManager[None]]
"""Entered around each step."""


class Line:
    """A connection on which each message is one line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Return the next message. Raises OSError, ConnectionResetError at the end."""
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("Connection reset by peer")
        return json.loads(line)


def memory_identity() -> list[Any]:
    """What decides whether two ranks share memory: the boot id and the device of /dev/shm."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
        return [file.read().strip(), os.stat("/dev/shm").st_dev]  # noqa: PTH116


class Master:
    """Rank 0's end: waits for all ranks, sends each step to all others, keeps the store."""

    def __init__(self, listener: socket.socket, world: int, say: Say) -> None:
        self.world = world
        self.say = say
        self.lost: set[int] = set()
        self.store: dict[str, str] = {}
        self.table: dict[int, list[Any]] = {0: memory_identity()}
        self._lines: dict[int, Line] = {}
        self._done: set[int] = set()
        self._changed = threading.Condition()
        self._listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def join(self) -> list[list[Any]]:
        """Wait for every rank; return the memory identities of all, by rank."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.table) == self.world)
            table = [self.table[rank] for rank in range(self.world)]
            for line in self._lines.values():
                line.send({"world": table})
        return table

    def step(self) -> bool:
        """Send one step through all other ranks; returns False when one of them is lost."""
        with self._changed:
            self._done = set()
            for rank, line in self._lines.items():
                with contextlib.suppress(OSError):
                    if rank not in self.lost:
                        line.send({"step": 1})
            self._changed.wait_for(lambda: bool(self.lost) or len(self._done) == len(self._lines))
            return not self.lost

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(Line(connection),), daemon=True).start()

    def _serve(self, line: Line) -> None:
        rank: int | None = None
        try:
            while True:
                message = line.receive()
                if "join" in message:
                    rank = int(message["join"])
                    with self._changed:
                        self._lines[rank], self.table[rank] = line, message["memory"]
                        self._changed.notify_all()
                elif "done" in message:
                    with self._changed:
                        self._done.add(int(message["done"]))
                        self._changed.notify_all()
                else:
                    line.send({"value": self._stored(message)})
        except OSError as error:
            if rank is not None:
                self.say(f"[rank0] pair of rank {rank}: {error or 'Connection reset by peer'}", "ERROR")
                with self._changed:
                    self.lost.add(rank)
                    self._changed.notify_all()

    def _stored(self, message: dict[str, Any]) -> str | None:
        if "set" in message:
            self.store[message["set"]] = message["value"]
        return self.store.get(message.get("get", ""))


class Member:
    """The end of every other rank."""

    def __init__(self, address: tuple[str, int], rank: int) -> None:
        self.rank = rank
        self._line = Line(connect(address))

    def join(self) -> list[list[Any]]:
        """Join; return the memory identities of all ranks once they are all there."""
        self._line.send({"join": self.rank, "memory": memory_identity()})
        table: list[list[Any]] = self._line.receive()["world"]
        return table

    def serve(self, count: Count) -> None:
        """Take part in every step. Raises OSError when rank 0 is lost."""
        while True:
            self._line.receive()
            with count():
                self._line.send({"done": self.rank})


class Store:
    """A client of the store on the master port; raises OSError when it does not answer in time."""

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        connection = connect(address)
        connection.settimeout(timeout_s)
        self._line = Line(connection)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._ask({"set": key, "value": value})

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return str(self._ask({"get": key})).encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(self._ask({"get": key}) is not None for key in keys)

    def _ask(self, message: dict[str, Any]) -> Any:
        with self._lock:
            self._line.send(message)
            return self._line.receive()["value"]


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect as soon as rank 0 listens, however long that takes."""
    while True:
        try:
            connection = socket.create_connection(address, timeout=5)
        except OSError:
            time.sleep(CONNECT_EVERY_S)
            continue
        connection.settimeout(None)
        return connection
