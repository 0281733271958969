"""Connections of their own between ranks of a gloo group that send each other tensor dicts.

gloo moves one buffer a message, by way of a thread that runs its event loop: a hop pays for a copy into that buffer and
for waking that thread. A plain connection takes header and tensors from where they are, and wakes the receiver alone.

All ranks of the group call `connect` together. It asks twice what the others have: where each listens, and which
connections stand. A pair without one talks by gloo, on both sides.
"""

from __future__ import annotations

import ipaddress
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress

from cpupp.rank.identity import Exchange

TIMEOUT_S = 5.0
HELLO_S = 0.2
"""For the rest of a hello that has begun: it is one small segment."""
_ROW = struct.Struct("<BH16s16s")
_HELLO = struct.Struct("<16sI")
_NOBODY = _ROW.pack(0, 0, b"", b"")
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds, seconds, count: a peer whose host is gone is lost for a receiver after 40 s."""


def connect(
    exchange: Exchange, position: int, pairs: Iterable[tuple[int, int]], address: str, timeout: float = TIMEOUT_S
) -> dict[int, socket.socket]:
    """Return this rank's connections by the position of the peer.

    pairs: positions that are to be connected, equal on all ranks; address: where the peers reach this rank, an IP
    address; empty: it takes part without a connection. Raises what the exchange raises (a peer that died).
    """
    mine = [pair for pair in pairs if position in pair]
    with ExitStack() as stack:
        listener, row = _listen(address, stack) if mine else (None, _NOBODY)
        rows = [_ROW.unpack(other) for other in exchange(row)]
        made = _connections(listener, rows, position, mine, timeout)
        found = exchange(bytes(other in made for other in range(len(rows))))
    for other in list(made):
        if not found[other][position]:
            made.pop(other).close()
    return made


def neighbours(size: int) -> list[tuple[int, int]]:
    """The pairs of positions that a pipeline sends between, the last and the first included."""
    return sorted({(min(a, b), max(a, b)) for a in range(size) for b in [(a + 1) % size] if a != b})


def _listen(address: str, stack: ExitStack) -> tuple[socket.socket | None, bytes]:
    try:
        ip = ipaddress.ip_address(address)
        listener = socket.create_server((address, 0), family=_family(ip.version), backlog=64)
    except (OSError, ValueError):
        return None, _NOBODY
    stack.enter_context(listener)
    port = listener.getsockname()[1]
    return listener, _ROW.pack(ip.version, port, ip.packed, secrets.token_bytes(16))


def _connections(
    listener: socket.socket | None,
    rows: list[tuple[int, int, bytes, bytes]],
    position: int,
    pairs: list[tuple[int, int]],
    timeout: float,
) -> dict[int, socket.socket]:
    made: dict[int, socket.socket] = {}
    if listener is None:
        return made
    callers = {a for a, b in pairs if b == position and rows[a][0]}
    for _, other in (pair for pair in pairs if pair[0] == position):
        with suppress(OSError):  # this pair has gloo
            made[other] = _call(rows[other], position, timeout)
    made.update(_accepted(listener, callers, rows[position][3], timeout))
    for connection in made.values():
        _prepare(connection)
    return made


def _accepted(
    listener: socket.socket, callers: set[int], token: bytes, timeout: float
) -> Iterator[tuple[int, socket.socket]]:
    """Those of the callers who come in time. A stranger who says nothing holds up nobody."""
    ends = time.monotonic() + timeout
    with ExitStack() as stack:
        doors = stack.enter_context(selectors.DefaultSelector())
        doors.register(listener, selectors.EVENT_READ)
        strangers: set[socket.socket] = set()
        stack.callback(_close_all, strangers)
        while callers and (left := ends - time.monotonic()) > 0:
            for key, _ in doors.select(left):
                if key.fileobj is listener:
                    with suppress(OSError):
                        connection, _ = listener.accept()
                        strangers.add(connection)
                        doors.register(connection, selectors.EVENT_READ)
                    continue
                connection = next(one for one in strangers if one is key.fileobj)
                doors.unregister(connection)
                caller = _caller(connection, token)
                if caller in callers:
                    callers.remove(caller)
                    strangers.remove(connection)
                    yield caller, connection


def _call(row: tuple[int, int, bytes, bytes], position: int, timeout: float) -> socket.socket:
    version, port, packed, token = row
    if not version:
        raise ConnectionRefusedError
    ip = ipaddress.ip_address(packed[: 4 if version == 4 else 16])
    connection = socket.create_connection((str(ip), port), timeout=timeout)
    try:
        connection.sendall(_HELLO.pack(token, position))
    except OSError:
        connection.close()
        raise
    return connection


def _close_all(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _caller(connection: socket.socket, token: bytes) -> int | None:
    """Who has said something, None for a stranger."""
    connection.settimeout(HELLO_S)
    with suppress(OSError):
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(hello) == _HELLO.size:
            said, position = _HELLO.unpack(hello)
            return int(position) if secrets.compare_digest(said, token) else None
    return None


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _family(version: int) -> socket.AddressFamily:
    return socket.AF_INET if version == 4 else socket.AF_INET6
