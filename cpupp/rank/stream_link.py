"""A link over a connection of its own: a frame in one system call, from where its tensors are to where they will be.

The order is kept, the sender does not wait until the receiver is there (up to MAX_IN_FLIGHT dicts), and two ranks that
both send first do not deadlock: what the kernel does not take at once is sent by a thread. Tensors of a dict past
STREAM_BYTES go by gloo, which is faster there.
"""

from __future__ import annotations

import ctypes
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from cpupp.rank.frames import MAX_HEADER_BYTES, PREFIX_BYTES, FrameCodec, FrameError, Header
from cpupp.rank.gloo_link import MAX_IN_FLIGHT, PARTS_TAG
from cpupp.rank.reused import ReusedMemory, settled
from cpupp.rank.ring import PeerLostError
from cpupp.rank.step_clock import waits

STREAM_BYTES = 2 * 1024 * 1024 + MAX_HEADER_BYTES
MAX_PARTS = 512
"""Buffers of one system call; the kernel takes 1,024."""
CLOSE_S = 2.0
PATIENCE_MS = 1
"""How long a send waits for room in the kernel before a thread goes on with it."""

Part = Any
"""A buffer of bytes: `bytes`, a memoryview, or a ctypes array over the memory of a tensor."""


class StreamLink:
    """A link over a connection. me, peer: global ranks; group, position: where the peer gets what is too large."""

    transport = "gloo"

    def __init__(
        self,
        connection: socket.socket,
        me: int,
        peer: int,
        group: dist.ProcessGroup | None,
        position: int,
        *,
        inline_bytes: int = STREAM_BYTES,
        bound: int = MAX_IN_FLIGHT,
    ) -> None:
        self._socket, self._group, self._position = connection, group, position
        self._encoder = FrameCodec(f"rank {me} -> rank {peer}")
        self._decoder = FrameCodec(f"rank {peer} -> rank {me}")
        self._inline, self._bound = inline_bytes, bound
        self._outlet = _Outlet(connection, self._encoder.link, bound)
        self._in_flight: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self._memory = ReusedMemory()
        self._head = memoryview(bytearray(MAX_HEADER_BYTES))
        self._surplus = memoryview(b"")
        self._last: Header | None = None
        self._ready: _Ready | None = None

    def send(self, items: Mapping[str, Any], meanwhile: Callable[[], bool] | None = None) -> None:
        """Start to send; waits only when MAX_IN_FLIGHT dicts are under way. Raises FrameError, PeerLostError."""
        header, tensors, detached = self._encoder.encode(items, self._inline)
        if not detached:
            self._outlet.send([header, *[_bytes_of(t) for t in tensors if t.nbytes]])
            return
        self._outlet.send([header])
        alive = [settled(t) for t in tensors if t.nbytes]
        assert self._group is not None
        try:
            works = [self._group.send([t], self._position, PARTS_TAG) for t in alive]
        except RuntimeError as error:
            raise PeerLostError(self._encoder.link, str(error)) from error
        self._in_flight.append((works, alive))
        if len(self._in_flight) > self._bound:
            self._reap()

    def recv(self) -> dict[str, Any]:
        """Wait for the next dict. Raises FrameError, PeerLostError."""
        ready = self._prepare()
        if ready is None or self._surplus:
            return self._recv_any()
        self._ready = None
        got = self._wait_for(ready.parts)
        while got < PREFIX_BYTES or (got < ready.header.length and self._is_like(ready.header)):
            got += self._wait_for(_after(ready.parts, got))
        if got < ready.header.length or self._decoder.again(self._head, ready.header) is None:
            self._surplus = memoryview(_joined(ready.parts)[:got])
            return self._recv_any()
        if got < ready.size:
            self._fill(_after(ready.parts, got))
        return ready.result

    def expect(self) -> None:
        """Have tensors ready for a dict like the last one: while it is on its way, that costs nobody time."""
        self._prepare()

    def flush(self) -> None:
        """Wait until everything that was sent has left this rank. Raises PeerLostError."""
        self._outlet.flush()
        while self._in_flight:
            self._reap()

    def close(self) -> None:
        """Let what was sent leave, for CLOSE_S at most, then close the connection. Raises PeerLostError."""
        try:
            self._outlet.close()
            while self._in_flight:
                self._reap()
        finally:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
                # The kernel takes back what the peer has not read yet where we leave something unread.
                self._socket.setblocking(False)
                while self._socket.recv(1 << 16):
                    pass
            self._socket.close()

    def _prepare(self) -> _Ready | None:
        if self._ready is None and self._last is not None:
            self._ready = _Ready(self._last, self._head, self._memory)
        return self._ready

    def _is_like(self, expected: Header) -> bool:
        """Whether the frame whose prefix is here is as long as the expected one: a shorter one may be here whole."""
        return self._decoder.lengths(self._head[:PREFIX_BYTES]) == (expected.length, expected.payload)

    def _recv_any(self) -> dict[str, Any]:
        """A dict of which nothing is known beforehand."""
        self._last = self._ready = None
        self._fill([self._head[:PREFIX_BYTES]])
        length, payload = self._decoder.lengths(self._head[:PREFIX_BYTES])
        self._fill([self._head[PREFIX_BYTES:length]])
        header = self._decoder.decode(self._head[:length])
        if not header.detached and length + payload > self._inline:
            raise FrameError(self._decoder.link, f"a payload of {payload} bytes does not fit into its message")
        result, tensors = header.allocate(self._memory)
        filled = [t for t in tensors if t.nbytes]
        if header.detached:
            self._receive_parts(filled)
            return result
        for at in range(0, len(filled), MAX_PARTS):
            self._fill([_bytes_of(t) for t in filled[at : at + MAX_PARTS]])
        if len(filled) < MAX_PARTS:
            self._last = header
        return result

    def _receive_parts(self, tensors: Sequence[torch.Tensor]) -> None:
        assert self._group is not None
        try:
            for work in [self._group.recv([t], self._position, PARTS_TAG) for t in tensors]:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(self._decoder.link, str(error)) from error

    def _fill(self, parts: Sequence[Part]) -> None:
        """Fill all the parts, first with what came in excess before."""
        size = sum(map(len, parts))
        got = 0
        if self._surplus:
            for part in parts:
                view = memoryview(part).cast("B")
                num = min(len(view), len(self._surplus))
                view[:num] = self._surplus[:num]
                self._surplus = self._surplus[num:]
                got += num
        while got < size:
            got += self._wait_for(_after(parts, got), socket.MSG_WAITALL)

    @waits
    def _wait_for(self, parts: Sequence[Part], flags: int = 0) -> int:
        try:
            num = self._socket.recvmsg_into(parts, 0, flags)[0]
        except OSError as error:
            raise PeerLostError(self._decoder.link, str(error.strerror)) from error
        if num == 0:
            raise PeerLostError(self._decoder.link, "Connection closed by peer")
        return num

    def _reap(self) -> None:
        works, _ = self._in_flight[0]
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(self._encoder.link, str(error)) from error
        self._in_flight.popleft()


class _Ready:
    """Room for a dict like the one of this header, made before it has arrived. size: of the whole frame, in bytes."""

    def __init__(self, header: Header, head: memoryview, memory: ReusedMemory) -> None:
        self.header = header
        self.result, tensors = header.allocate(memory)
        self.parts: list[Part] = [head[: header.length], *[_bytes_of(t) for t in tensors if t.nbytes]]
        self.size = header.length + header.payload


class _Outlet:
    """The sending end: the kernel takes a frame at once, or a thread goes on with what it did not take."""

    def __init__(self, connection: socket.socket, link: str, bound: int) -> None:
        self._socket, self._link, self._bound = connection, link, bound
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._closed = False

    def send(self, parts: Sequence[Part]) -> None:
        """Send the parts, or a copy of them later. Raises PeerLostError."""
        if len(parts) > MAX_PARTS:
            parts = [_joined(parts)]
        # Only this thread adds to what waits, so empty stays empty.
        left = parts if self._waiting or self._error else self._offer(parts)
        if left:
            self._hand_over(_joined(left))

    def flush(self) -> None:
        """Wait until the kernel has everything. Raises PeerLostError."""
        self._wait_until(0)

    def close(self) -> None:
        """Wait for that, but not for ever on a peer that does not read, and end the thread. Raises PeerLostError."""
        try:
            self._wait_until(0, CLOSE_S)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _offer(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Give the kernel what it takes; return what is left."""
        while parts:
            try:
                sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if not self._room.poll(PATIENCE_MS):
                    return parts
                continue
            except OSError as error:
                raise PeerLostError(self._link, str(error.strerror)) from error
            parts = _after(parts, sent)
        return parts

    def _hand_over(self, data: bytes) -> None:
        with self._changed:
            self._waiting.append(data)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cpupp-stream", daemon=True)
                self._thread.start()
        self._wait_until(self._bound)

    @waits
    def _wait_until(self, num_waiting: int, timeout_s: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) <= num_waiting or self._error is not None, timeout_s)
            if self._error is not None:
                raise PeerLostError(self._link, str(self._error.strerror)) from self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                data = self._waiting[0]
            try:
                self._socket.sendall(data, socket.MSG_NOSIGNAL)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


def _bytes_of(tensor: torch.Tensor) -> Part:
    """The memory of a contiguous tensor that is not empty; only as long as the tensor lives."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _joined(parts: Sequence[Part]) -> bytes:
    return b"".join(memoryview(part).cast("B") for part in parts)


def _after(parts: Sequence[Part], num: int) -> Sequence[Part]:
    """What is left of the parts behind the first `num` bytes; no empty part."""
    for i, part in enumerate(parts):
        if num < len(part):
            return [memoryview(part).cast("B")[num:], *parts[i + 1 :]]
        num -= len(part)
    return []
