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

from cpupp.rank.frames import MAX_HEADER_BYTES, PREFIX_BYTES, FrameCodec, FrameError, Header
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
        self._broken: FrameError | None = None
        self._last: Header | None = None
        self._ready: _Ready | None = None

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
                if self._ready is None and self._last is not None:
                    self._ready = _Ready(self._last)  # now, while there is nothing else to do
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
            self._last = self._ready = None  # the next frame's header is another one from now on
            if self._broken is not None:
                raise self._broken
            try:
                frame = next(self._frames)
            except FrameError as error:
                self._broken = error
                raise
            self._partial = frame is None
        if frame is not None:
            self._arrived.append(frame)
        return True

    def _whole(self) -> dict[str, Any] | None:
        """The next dict if all of it has arrived and lies in one piece: the way of small dicts."""
        ready, self._ready = self._ready, None
        frame = None if ready is None else self._in.peek(ready.size)
        header = None if frame is None or ready is None else self._decoder.again(frame, ready.header)
        if ready is None or header is None:
            prefix = self._in.peek(PREFIX_BYTES)
            if prefix is None:
                return None
            length, payload = self._decoder.lengths(prefix)
            frame = self._in.peek(length + payload)
            if frame is None:
                return None
            header = self._decoder.decode(frame)
            ready = _Ready(header)
        self._last = header
        result = ready.filled(self._in.peeked_address())
        self._in.skip(ready.size)
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


class _Ready:
    """A dict like the one of this header, with memory that is still to be filled. size: bytes of its frame."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.size = header.length + header.payload
        self._result, tensors = header.allocate()
        self._places = [span(tensor) for tensor in tensors]

    def filled(self, address: int) -> dict[str, Any]:
        """The dict with the payload of the frame that lies in memory at `address`."""
        address += self.header.length
        for place, size in self._places:
            ctypes.memmove(place, address, size)
            address += size
        return self._result


def _memory(size: int) -> tuple[memoryview, int]:
    raw = (ctypes.c_char * size)()
    return memoryview(raw).cast("B"), ctypes.addressof(raw)
