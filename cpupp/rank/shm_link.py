"""A link between two ranks that share memory: frames of tensor dicts in two rings.

The order is kept, the sender does not wait until the receiver is there (up to what a ring holds), and two ranks that
both send first do not deadlock.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cpupp.rank.frames import MAX_HEADER_BYTES, PREFIX_BYTES, FrameCodec
from cpupp.rank.reused import ReusedMemory
from cpupp.rank.ring import TIMEOUT_SECONDS, Ring, span


class ShmLink:
    """A link between two ranks that share memory.

    outgoing, incoming: the rings of both directions; me, peer: global ranks, for messages.
    meanwhile: called while a send waits for room; it takes in what has arrived from any peer (`drain`).
    """

    transport = "shm"

    def __init__(self, outgoing: Ring, incoming: Ring, *, timeout: float = TIMEOUT_SECONDS) -> None:
        self._out, self._in = outgoing, incoming
        self._out.peer_lives = incoming.segment.owner_lives
        self._encoder = FrameCodec(outgoing.link)
        self._decoder = FrameCodec(incoming.link)
        self._timeout = timeout
        self._header_out, out_address = _memory(MAX_HEADER_BYTES)
        self._header_in, in_address = _memory(MAX_HEADER_BYTES)
        self._addresses = out_address, in_address
        self._arrived: deque[dict[str, Any]] = deque()
        self._memory = ReusedMemory()
        self._frames = self._read()
        self._partial = False

    def send(self, items: Mapping[str, Any], meanwhile: Callable[[], bool] | None = None) -> None:
        """Put the dict into the ring. Waits only while the ring is full. Raises FrameError, PeerLostError."""
        header, tensors, _ = self._encoder.encode(items, 0)
        self._header_out[: len(header)] = header
        parts = [(self._addresses[0], len(header)), *(span(t) for t in tensors)]
        if not self._out.put_whole(parts, sum(size for _, size in parts)):
            self._out.write(parts, time.monotonic() + self._timeout, meanwhile or self.drain)

    def recv(self) -> dict[str, Any]:
        """Wait for the next dict. Raises FrameError, PeerLostError."""
        deadline = time.monotonic() + self._timeout
        while not self._arrived:
            if not self.drain():
                self._in.wait_for_data(deadline)
        return self._arrived.popleft()

    def drain(self) -> bool:
        """Take in what has arrived, be it a part of a dict, without waiting; return whether there was something.

        A send that waits for room does this too: so two ranks that both send more than a ring holds get through.
        """
        if not self._in.pending():
            return False
        frame = None if self._partial else self._whole()
        if frame is None:
            frame = next(self._frames)
            self._partial = frame is None
        if frame is not None:
            self._arrived.append(frame)
        return True

    def _whole(self) -> dict[str, Any] | None:
        """The next dict if all of it has arrived and lies in one piece: the way of small dicts."""
        prefix = self._in.peek(PREFIX_BYTES)
        if prefix is None:
            return None
        length, payload = self._decoder.lengths(prefix)
        frame = self._in.peek(length + payload)
        if frame is None:
            return None
        result, tensors = self._decoder.decode(frame).allocate()
        address = self._in.peeked_address() + length
        for tensor in tensors:
            size = tensor.nbytes
            ctypes.memmove(tensor.data_ptr(), address, size)
            address += size
        self._in.skip(length + payload)
        return result

    def _read(self) -> Iterator[dict[str, Any] | None]:
        """Yield each dict that is complete, and None whenever the next one needs bytes that have not arrived."""
        address = self._addresses[1]
        while True:
            yield from self._take(address, PREFIX_BYTES)
            length, _ = self._decoder.lengths(self._header_in[:PREFIX_BYTES])
            yield from self._take(address + PREFIX_BYTES, length - PREFIX_BYTES)
            result, tensors = self._decoder.decode(self._header_in[:length]).allocate(self._memory)
            for tensor in tensors:
                yield from self._take(*span(tensor))
            yield result

    def _take(self, address: int, size: int) -> Iterator[None]:
        while size:
            done = self._in.take(address, size)
            address += done
            size -= done
            if not done:
                yield None

    def close(self) -> None:
        """Unmap both rings."""
        self._out.segment.close()
        self._in.segment.close()


def _memory(size: int) -> tuple[memoryview, int]:
    raw = (ctypes.c_char * size)()
    return memoryview(raw).cast("B"), ctypes.addressof(raw)
