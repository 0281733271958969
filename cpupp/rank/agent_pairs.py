"""Knocking at the doors of the other hosts (agent_doors): which open, how fast the way is. Standard library only.

States of a port: open; refused (a RST or `port unreachable` came back); dropped (nothing came back); unreachable (the
network or this host's own firewall said so); silent (open, but nobody speaks); stranger (speaks, but is no agent of
this doctor); wrong-host (another host of the cluster file answers); stalled (small messages pass, large ones do not).
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from typing import Any

from .agent_doors import CHUNK, MESSAGE, NoAnswerError, cut, greet, read_exactly, read_line, sink

CONNECT_S = 1.5
ANSWER_S = 3.0
STALL_S = 2.0
BLOCK = 96 << 10
LARGEST_LATENCY_S = 0.4  # of all small messages together
IP_MTU = 14
IPV6_MTU = 24
TCP_MAXSEG = 2
SIZES = (8948, 4040, 1460, 1412, 1372, 1332, 1240, 1160, 1024, 768, 536)  # TCP payloads of usual MTUs


def reach(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Knock at all ports of all peers at once.

    targets: [{"peer", "address", "ports", "block": the port at which large messages are tried too}]. Returns for each
    port {"peer", "port", "state", "detail", "mtu": the kernel's path MTU or 0, "passes": largest packet that arrives
    where large ones stall, else 0}.
    """
    found: list[dict[str, Any]] = []
    threads = []
    for target in request["targets"]:
        for port in target["ports"]:
            row = {"peer": target["peer"], "port": port, "state": "silent", "detail": "", "mtu": 0, "passes": 0}
            found.append(row)
            arguments = (row, target["address"], request["key"], port == target["block"])
            threads.append(threading.Thread(target=_knock, args=arguments, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _knock(row: dict[str, Any], address: str, key: str, block: bool) -> None:
    try:
        connection = _connect(address, row["port"])
    except OSError as error:
        row["state"], row["detail"] = _refusal(error)
        return
    try:
        connection.settimeout(ANSWER_S)
        name = greet(connection, key)
        row["mtu"] = _path_mtu(connection)
        if name != row["peer"]:
            row["state"], row["detail"] = "wrong-host", name
            return
        row["state"] = "open"
        if block and not _large_messages_pass(connection, row):
            row["state"] = "stalled"
            row["passes"] = _largest_packet(connection, address, row["port"], key)
    except NoAnswerError as error:
        row["state"], row["detail"] = "stranger", str(error)
    except socket.timeout:  # noqa: UP041  # another class in Python 3.8
        row["state"], row["detail"] = "silent", f"connected, but no answer within {ANSWER_S:g} s"
    except OSError as error:
        row["state"], row["detail"] = "stranger", str(error.strerror or error)
    finally:
        cut(connection)


def _refusal(error: OSError) -> tuple[str, str]:
    words = str(error.strerror or error)
    if isinstance(error, ConnectionRefusedError):
        return "refused", words
    if isinstance(error, (socket.timeout, TimeoutError)):
        return "dropped", f"no answer within {CONNECT_S:g} s"
    return "unreachable", words


def _connect(address: str, port: int, largest: int = 0) -> socket.socket:
    """Connect; largest: bytes of TCP payload in a packet, both ways (0: what the interface allows)."""
    family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if largest:
            connection.setsockopt(socket.IPPROTO_TCP, TCP_MAXSEG, largest)
        connection.settimeout(CONNECT_S)
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection


def _path_mtu(connection: socket.socket) -> int:
    """What the kernel holds to be the largest packet on the way; 0 when it does not say."""
    with contextlib.suppress(OSError):
        if connection.family == socket.AF_INET6:
            return connection.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)
        return connection.getsockopt(socket.IPPROTO_IP, IP_MTU)
    return 0


def _large_messages_pass(connection: socket.socket, row: dict[str, Any]) -> bool:
    """Send a block and get one back."""
    connection.settimeout(STALL_S)
    step = "sending"
    try:
        connection.sendall(b"block %d\n" % BLOCK + bytes(BLOCK))
        read_line(connection)
        step = "receiving"
        return read_exactly(connection, BLOCK) == BLOCK
    except OSError:
        row["detail"] = step
        return False


def _largest_packet(connection: socket.socket, address: str, port: int, key: str) -> int:
    """Return the largest IP packet that arrives on the way where larger ones do not; 0 when none of the usual does."""
    headers = 60 if connection.family == socket.AF_INET6 else 40
    usual = connection.getsockopt(socket.IPPROTO_TCP, TCP_MAXSEG)
    sizes = [size for size in SIZES if size < usual]
    passed: list[int] = []

    def attempt(size: int) -> None:
        with contextlib.suppress(OSError):
            smaller = _connect(address, port, size)
            try:
                smaller.settimeout(ANSWER_S)
                greet(smaller, key)
                if _large_messages_pass(smaller, {}):
                    passed.append(size)
            finally:
                cut(smaller)

    threads = [threading.Thread(target=attempt, args=(size,), daemon=True) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(passed) + headers if passed else 0


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the way to one peer, both ways, over a few seconds at most; the launcher sees to it that nobody disturbs.

    peer, address, port, key: as in `reach`; messages: small ones there and back; seconds: of each stream. Returns
    latency and jitter (s; median of the round trips, and their 90th percentile less the median) and `up` and `down`
    (bytes/s from here and to here). None: it did not come to an end. error: why.
    """
    found: dict[str, Any] = {"latency": None, "jitter": None, "up": None, "down": None, "error": ""}
    seconds = float(request["seconds"])
    try:
        with contextlib.closing(_visit(request)) as connection:
            found["latency"], found["jitter"] = _round_trips(connection, int(request["messages"]))
        found["down"] = _download(_visit(request), seconds)
        found["up"] = _upload(_visit(request), seconds)
    except OSError as error:
        found["error"] = str(error.strerror or error)
    return found


def _visit(request: dict[str, Any]) -> socket.socket:
    connection = _connect(request["address"], int(request["port"]))
    connection.settimeout(ANSWER_S)
    try:
        if greet(connection, request["key"]) != request["peer"]:
            raise NoAnswerError("another host answers")
    except OSError:
        cut(connection)
        raise
    return connection


def _round_trips(connection: socket.socket, num_messages: int) -> tuple[float, float]:
    connection.sendall(b"echo\n")
    message = bytes(MESSAGE)
    times: list[float] = []
    end = time.monotonic() + LARGEST_LATENCY_S
    while len(times) < num_messages and (len(times) < 5 or time.monotonic() < end):
        begun = time.perf_counter()
        connection.sendall(message)
        if read_exactly(connection, MESSAGE) != MESSAGE:
            raise NoAnswerError("the connection was closed")
        times.append(time.perf_counter() - begun)
    times.sort()
    median = statistics.median(times)
    return median, times[len(times) * 9 // 10] - median


def _download(connection: socket.socket, seconds: float) -> float:
    try:
        connection.sendall(b"stream %g\n" % (seconds + ANSWER_S))
        count, span = sink(connection, seconds)
        return count / span
    finally:
        cut(connection)


def _upload(connection: socket.socket, seconds: float) -> float:
    """Send until the other side has counted enough; what is still in our buffers then is dropped."""
    words: list[str] = []

    def listen() -> None:
        with contextlib.suppress(OSError):
            words.extend(read_line(connection).split(" "))

    try:
        connection.sendall(b"sink %g\n" % seconds)
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        data = bytes(CHUNK)
        end = time.monotonic() + seconds + ANSWER_S
        while not words and time.monotonic() < end:
            connection.send(data)
        listener.join(ANSWER_S)
        if len(words) != 2:
            raise NoAnswerError("the other side did not say what arrived")
        return int(words[0]) / float(words[1])
    finally:
        cut(connection)
