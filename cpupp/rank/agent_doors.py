"""Doors: listeners that stand open for a few seconds, so that the other hosts can knock. Standard library only.

They are on the data-plane address alone. Both sides hold a key that came over SSH and is used once: who cannot prove
it is sent away without an answer, and an answer proves which host gave it. What a visitor may ask for:

    block N    read N bytes, say `got N`, send N bytes back
    echo       send every message of MESSAGE bytes back
    stream S   send as fast as it goes until the visitor leaves, at most S seconds
    sink S     read for S seconds, say how many bytes came in how many seconds, read on until the visitor leaves
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from typing import Any

from .agent_net import port_holder

GREETING = b"cpupp-pair"
LONGEST_LINE = 1000
MESSAGE = 64
CHUNK = 256 << 10
LARGEST_BLOCK = 1 << 20
VISIT_S = 5.0  # without a sign of the visitor
LONGEST_OPEN_S = 60.0


class NoAnswerError(OSError):
    """The other side closed or said what no door says."""


def proof(key: str, *words: str) -> str:
    """What only a holder of the key can say about these words."""
    return hmac.new(key.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()


def greet(connection: socket.socket, key: str) -> str:
    """Prove ourselves to a door and return the name of the host that proves itself in turn; raises OSError."""
    nonce = secrets.token_hex(16)
    connection.sendall(b" ".join([GREETING, nonce.encode(), proof(key, "ask", nonce).encode()]) + b"\n")
    name, _, answer = read_line(connection).rpartition(" ")
    if not hmac.compare_digest(answer.encode(), proof(key, "answer", nonce, name).encode()):
        raise NoAnswerError("something answered that is no agent of this doctor")
    return name


def read_line(connection: socket.socket) -> str:
    """Read up to the line's end, byte by byte so that nothing after it is taken. Raises OSError."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data or len(line) > LONGEST_LINE:
            raise NoAnswerError("the connection was closed without an answer")
        line += data
    return line[:-1].decode("utf-8", "replace")


def read_exactly(connection: socket.socket, size: int) -> int:
    """Read `size` bytes and forget them; returns how many came before the end. Raises OSError, TimeoutError."""
    buffer = bytearray(min(size, CHUNK))
    count = 0
    while count < size:
        got = connection.recv_into(buffer, min(size - count, len(buffer)))
        if not got:
            break
        count += got
    return count


def cut(connection: socket.socket) -> None:
    """Close at once and drop what was not sent yet; no port stays in TIME_WAIT."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


class Doors:
    """The open doors of this host. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._state = threading.Lock()
        self._servers: list[socket.socket] = []
        self._timer: threading.Timer | None = None

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Listen at request["address"] on the ports asked for and on `num_high` ports that the kernel chooses.

        name, key: what answers prove; seconds: when the doors close by themselves. Returns `taken` (port -> who holds
        it) and `high`, the ports chosen, as those of gloo are.
        """
        self.close()
        name, key, address = str(request["name"]), str(request["key"]), str(request["address"])
        taken: dict[str, str] = {}
        for port in request["ports"]:
            try:
                self._listen(name, key, address, int(port))
            except OSError as error:
                taken[str(port)] = port_holder(int(port)) or str(error.strerror or error)
        high = [self._listen(name, key, address, 0) for _ in range(int(request["num_high"]))]
        self._timer = threading.Timer(min(float(request["seconds"]), LONGEST_OPEN_S), self.close)
        self._timer.daemon = True
        self._timer.start()
        return {"taken": taken, "high": high}

    def close(self) -> None:
        """Close all doors; visitors inside end by themselves."""
        with self._state:
            servers, self._servers = self._servers, []
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        for server in servers:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            server.close()

    def _listen(self, name: str, key: str, address: str, port: int) -> int:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family, kind)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place)
            server.listen(128)
        except OSError:
            server.close()
            raise
        with self._state:
            self._servers.append(server)
        threading.Thread(target=_accept, args=(server, name, key), name="door", daemon=True).start()
        return int(server.getsockname()[1])


def _accept(server: socket.socket, name: str, key: str) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_visit, args=(connection, name, key), name="visit", daemon=True).start()


def _visit(connection: socket.socket, name: str, key: str) -> None:
    connection.settimeout(VISIT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        word, nonce, claim = read_line(connection).split(" ")
        if word == GREETING.decode() and hmac.compare_digest(claim.encode(), proof(key, "ask", nonce).encode()):
            connection.sendall(f"{name} {proof(key, 'answer', nonce, name)}\n".encode())
            _serve(connection, read_line(connection).split(" "))
    except (OSError, ValueError):
        pass
    finally:
        cut(connection)


def _serve(connection: socket.socket, order: list[str]) -> None:
    if order[0] == "block":
        size = min(int(order[1]), LARGEST_BLOCK)
        count = read_exactly(connection, size)
        connection.sendall(b"got %d\n" % count)  # a packet of its own: it tells which way stalls
        connection.sendall(bytes(size))
        connection.recv(1)  # the visitor closes first, once it has all
    elif order[0] == "echo":
        while True:
            message = connection.recv(MESSAGE)
            if not message:
                return
            connection.sendall(message)
    elif order[0] == "stream":
        stream(connection, min(float(order[1]), LONGEST_OPEN_S))
    elif order[0] == "sink":
        count, seconds = sink(connection, min(float(order[1]), LONGEST_OPEN_S))
        connection.sendall(b"%d %.6f\n" % (count, seconds))
        read_exactly(connection, 1 << 40)


def stream(connection: socket.socket, seconds: float) -> None:
    """Send for at most `seconds`, or until the other side leaves (then OSError)."""
    data = bytes(CHUNK)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.send(data)


def sink(connection: socket.socket, seconds: float) -> tuple[int, float]:
    """Read for `seconds` from the first byte; returns bytes and seconds without the first quarter, when TCP warms up.

    Raises OSError when nothing comes.
    """
    buffer = bytearray(CHUNK)
    if not connection.recv_into(buffer):
        raise NoAnswerError("the connection was closed without data")
    begun = last = time.monotonic()
    count, counted_from = 0, 0.0
    while last - begun < seconds:
        connection.settimeout(max(0.01, seconds - (last - begun)))
        try:
            got = connection.recv_into(buffer)
        except socket.timeout:  # noqa: UP041  # another class in Python 3.8
            last = time.monotonic()
            break
        last = time.monotonic()
        if not got:
            break
        if counted_from:
            count += got
        elif last - begun >= seconds / 4:
            counted_from = last
    connection.settimeout(VISIT_S)
    return count, max(last - (counted_from or begun), 1e-9)
