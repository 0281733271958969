"""One link, one transport: how a tensor dict gets from one rank to another.

ShmLink writes frames into a ring in shared memory; GlooLink sends them over a gloo group. Both keep the order, neither
blocks the sender until the receiver is there (up to a bound), and two ranks that both send first do not deadlock.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from cpupp.rank.frames import MAX_HEADER_BYTES, PREFIX_BYTES, SEQUENCE, FrameCodec, FrameError, Header
from cpupp.rank.ring import PeerLostError, Ring, span

TAG = 0x6370  # apart from tag 0, which vLLM's own send and recv use on the same group
INLINE_BYTES = 128 * 1024
MAX_IN_FLIGHT = 8
KEPT_IN_FLIGHT = 2
REUSED_BYTES = 256 * 1024
MAX_REUSED = 4
TIMEOUT_SECONDS = 1800.0  # as torch.distributed's default for gloo


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


class GlooLink:
    """A link over a gloo group: small dicts are one message, the tensors of large ones follow without a copy.

    gloo accepts a message that is shorter than the receiver's buffer, so the receiver need not know the size: it posts
    a buffer of INLINE_BYTES. A trailer with the frame's number shows that the message was not cut short.
    """

    transport = "gloo"

    def __init__(
        self,
        group: dist.ProcessGroup,
        me: int,
        peer: int,
        *,
        inline_bytes: int = INLINE_BYTES,
        bound: int = MAX_IN_FLIGHT,
    ) -> None:
        self._group, self._peer = group, dist.get_group_rank(group, peer)
        self._encoder = FrameCodec(f"rank {me} -> rank {peer}")
        self._decoder = FrameCodec(f"rank {peer} -> rank {me}")
        self._inline = max(inline_bytes, MAX_HEADER_BYTES + SEQUENCE.size)
        self._bound = bound
        self._free: list[_Message] = []
        self._in_flight: deque[tuple[_Message, list[dist.Work], list[torch.Tensor]]] = deque()
        self._memory = ReusedMemory()
        self._inbox: _Message | None = None
        self._posted: dist.Work | None = None
        self._last: Header | None = None
        self._prepared: _Prepared | None = None

    def send(self, items: Mapping[str, Any], meanwhile: Callable[[], bool] | None = None) -> None:
        """Start to send; waits only when MAX_IN_FLIGHT dicts are under way. Raises FrameError, PeerLostError."""
        header, tensors, detached = self._encoder.encode(items, self._inline - SEQUENCE.size)
        message = self._message()
        size = len(header)
        message.bytes[:size] = header
        if not detached:
            for tensor in tensors:
                ctypes.memmove(message.address + size, tensor.data_ptr(), tensor.nbytes)
                size += tensor.nbytes
        SEQUENCE.pack_into(message.bytes, size, self._encoder.sequence)
        alive = [_settled(t) for t in tensors if t.nbytes] if detached else []
        try:
            # Straight to the group: the wrappers of torch.distributed cost as much as the message itself.
            works = [self._group.send([message.first(size + SEQUENCE.size)], self._peer, TAG)]
            works += [self._group.send([t], self._peer, TAG) for t in alive]
        except RuntimeError as error:
            raise PeerLostError(self._encoder.link, str(error)) from error
        self._in_flight.append((message, works, alive))
        if len(self._in_flight) > KEPT_IN_FLIGHT and not detached:
            self._reap()  # gone long ago, and now is when nobody waits for us

    def recv(self) -> dict[str, Any]:
        """Wait for the next dict. Raises FrameError, PeerLostError."""
        inbox, posted = self._posting()
        prepared = self._prepare()
        self._posted = self._prepared = None
        self._wait(posted, self._decoder.link)
        if prepared is not None:
            again = self._decoder.again(inbox.bytes)
            if again is not None:
                self._check_trailer(inbox, again.length + again.payload)
                return prepared.filled(inbox.address + again.length)
        length, payload = self._decoder.lengths(inbox.bytes[:PREFIX_BYTES])
        header = self._decoder.decode(inbox.bytes[:length])
        size = length if header.detached else length + payload
        if size + SEQUENCE.size > self._inline:
            raise FrameError(self._decoder.link, f"a payload of {payload} bytes does not fit into its message")
        self._check_trailer(inbox, size)
        self._last = None if header.detached else header
        result, tensors = header.allocate(self._memory)
        if header.detached:
            works = [self._irecv(t) for t in tensors if t.nbytes]
            for work in works:
                self._wait(work, self._decoder.link)
        else:
            address = inbox.address + length
            for tensor in tensors:
                ctypes.memmove(tensor.data_ptr(), address, tensor.nbytes)
                address += tensor.nbytes
        return result

    def expect(self) -> None:
        """Post for the next dict if there has been one: gloo then moves it without asking for a receiver first."""
        if self._inbox is not None:
            with suppress(PeerLostError):  # a peer that has left after its last dict: only a next recv would mind
                self._posting()
                self._prepare()

    def _prepare(self) -> _Prepared | None:
        """Have tensors ready for a dict like the last one: while we wait for it, that costs nobody time."""
        if self._prepared is None and self._last is not None:
            self._prepared = _Prepared(self._last)
        return self._prepared

    def _check_trailer(self, inbox: _Message, at: int) -> None:
        if SEQUENCE.unpack_from(inbox.bytes, at)[0] != self._decoder.sequence:
            raise FrameError(self._decoder.link, f"truncated frame: fewer than {at} bytes arrived")

    def flush(self) -> None:
        """Wait until everything that was sent has left this rank. Raises PeerLostError."""
        while self._in_flight:
            self._reap()

    def _message(self) -> _Message:
        if len(self._in_flight) >= self._bound:
            self._reap()
        return self._free.pop() if self._free else _Message(self._inline)

    def _reap(self) -> None:
        # Not is_completed(): gloo can report completion while it still reads the buffer.
        message, works, _ = self._in_flight[0]
        for work in works:
            self._wait(work, self._encoder.link)
        self._in_flight.popleft()
        self._free.append(message)

    def _posting(self) -> tuple[_Message, dist.Work]:
        if self._inbox is None:
            self._inbox = _Message(self._inline)
        if self._posted is None:
            self._posted = self._irecv(self._inbox.tensor)
        return self._inbox, self._posted

    def _irecv(self, tensor: torch.Tensor) -> dist.Work:
        try:
            return self._group.recv([tensor], self._peer, TAG)
        except RuntimeError as error:
            raise PeerLostError(self._decoder.link, str(error)) from error

    @staticmethod
    def _wait(work: dist.Work, link: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(link, str(error)) from error


class _Message:
    """Memory of one message: as a tensor for gloo, as bytes for the header. Zeros: old memory could hold a trailer."""

    __slots__ = ("_first", "address", "bytes", "tensor")

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8)
        self.bytes = memoryview(self.tensor.numpy())
        self.address = self.tensor.data_ptr()
        self._first = self.tensor

    def first(self, size: int) -> torch.Tensor:
        """The first `size` bytes as a tensor; mostly as many as the last time."""
        if self._first.nbytes != size:
            self._first = self.tensor[:size]
        return self._first


class _Prepared:
    """A dict like the one that this header described, with memory that is still to be filled. For one use."""

    __slots__ = ("_places", "_result")

    def __init__(self, header: Header) -> None:
        self._result, tensors = header.allocate()
        self._places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]

    def filled(self, address: int) -> dict[str, Any]:
        """The dict with the payload that lies in memory at `address`."""
        for place, size in self._places:
            ctypes.memmove(place, address, size)
            address += size
        return self._result


def _memory(size: int) -> tuple[memoryview, int]:
    raw = (ctypes.c_char * size)()
    return memoryview(raw).cast("B"), ctypes.addressof(raw)


Link = ShmLink | GlooLink


class ReusedMemory:
    """Memory for large received tensors, taken again once nobody holds it: fresh memory costs as much as the wire."""

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape; its memory held something else before."""
        kept = self._kept.get((shape, dtype), [])
        for tensor in kept:
            if _holders(tensor) == 1:
                return tensor.detach()
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.nbytes >= REUSED_BYTES and len(kept) < MAX_REUSED:
            if len(self._kept) >= MAX_REUSED:  # prefill sizes vary: keep the last few alone
                del self._kept[next(iter(self._kept))]
            self._kept.setdefault((shape, dtype), kept).append(tensor)
            return tensor.detach()
        return tensor


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory, itself included. There is no public way to ask."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # without the storage object that we ask


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself when nobody else can write to its memory after the send has returned, else a copy.

    vLLM takes our send for a finished one. A stage's output can be a view of a buffer that its next step overwrites
    (the residual of a middle stage is a slice of the received one), and such a view shares its storage.
    """
    return tensor if _holders(tensor) == 1 else tensor.clone()
