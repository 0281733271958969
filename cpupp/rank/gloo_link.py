"""A link over a gloo group: a frame of a tensor dict in one message, or the tensors of a large one behind it.

The order is kept, the sender does not wait until the receiver is there (up to MAX_IN_FLIGHT dicts), and two ranks that
both send first do not deadlock.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from cpupp.rank.frames import MAX_HEADER_BYTES, PREFIX_BYTES, SEQUENCE, FrameCodec, FrameError, Header
from cpupp.rank.reused import MAX_REUSED, ReusedMemory, holders, settled
from cpupp.rank.ring import PeerLostError
from cpupp.rank.step_clock import waits

TAG = 0x6370  # apart from tag 0, which vLLM's own send and recv use on the same group
PARTS_TAG = 0x636F  # apart again: a tensor must not run into the inbox that waits for the next header
INLINE_BYTES = 1024 * 1024 + MAX_HEADER_BYTES
COPY_BYTES = 32 * 1024
"""A payload up to this size is copied out of the message; a larger one stays there, and the tensors are views of it."""
ALIGNMENT = 64
MAX_IN_FLIGHT = 8
AHEAD = 2
"""Receives that are posted. gloo sends what nobody waits for only after it has asked, there and back. With one receive
the word that the next is posted races with the peer's next dict; with two it has long arrived.
"""


class GlooLink:
    """A link over a gloo group: dicts up to INLINE_BYTES are one message, the tensors of larger ones follow it.

    gloo accepts a message that is shorter than the receiver's buffer, so the receiver need not know the size: it posts
    buffers of INLINE_BYTES, AHEAD of them at any time. A trailer with the frame's number shows that the message was
    not cut short.
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
        self._posted: deque[tuple[_Message, dist.Work]] = deque()
        self._last: Header | None = None
        self._ready: _Ready | None = None
        self._inboxes: list[_Message] = []
        self._received = False

    def send(self, items: Mapping[str, Any], meanwhile: Callable[[], bool] | None = None) -> None:
        """Start to send; waits only when MAX_IN_FLIGHT dicts are under way. Raises FrameError, PeerLostError."""
        header, tensors, detached = self._encoder.encode(items, self._inline - SEQUENCE.size - ALIGNMENT)
        message = self._free.pop() if self._free else _Message(self._inline)
        size = len(header)
        message.bytes[:size] = header
        if not detached:
            size = aligned(size)
            for tensor in tensors:
                ctypes.memmove(message.address + size, tensor.data_ptr(), tensor.nbytes)
                size += tensor.nbytes
        SEQUENCE.pack_into(message.bytes, size, self._encoder.sequence)
        alive = [settled(t) for t in tensors if t.nbytes] if detached else []
        try:
            # Straight to the group: the wrappers of torch.distributed cost as much as the message itself.
            works = [self._group.send([message.first(size + SEQUENCE.size)], self._peer, TAG)]
            works += [self._group.send([t], self._peer, PARTS_TAG) for t in alive]
        except RuntimeError as error:
            raise PeerLostError(self._encoder.link, str(error)) from error
        self._in_flight.append((message, works, alive))
        if len(self._in_flight) > self._bound:
            self._reap()  # after the send: mostly it is gone long ago, and nobody waits for us now

    def recv(self) -> dict[str, Any]:
        """Wait for the next dict. Raises FrameError, PeerLostError."""
        self._received = True
        self._post()
        ready = self._prepare()
        inbox, posted = self._posted.popleft()
        self._ready = None
        self._wait_for_peer(posted, self._decoder.link)
        header = None if ready is None else self._decoder.again(inbox.bytes, ready.header)
        if ready is None or header is None:
            header = self._header(inbox)
            if header.detached:
                self._check_trailer(inbox, header.length)
                return self._detached(header)
            ready = _Ready(header, inbox)
        self._check_trailer(inbox, aligned(header.length) + header.payload)
        self._last = header
        return ready.filled()

    def _header(self, inbox: _Message) -> Header:
        length, payload = self._decoder.lengths(inbox.bytes[:PREFIX_BYTES])
        header = self._decoder.decode(inbox.bytes[:length])
        if not header.detached and aligned(length) + payload + SEQUENCE.size > self._inline:
            raise FrameError(self._decoder.link, f"a payload of {payload} bytes does not fit into its message")
        return header

    def _detached(self, header: Header) -> dict[str, Any]:
        self._last = None
        result, tensors = header.allocate(self._memory)
        works = [self._irecv(t, PARTS_TAG) for t in tensors if t.nbytes]
        for work in works:
            self._wait(work, self._decoder.link)
        return result

    def expect(self) -> None:
        """Make ready for the next dict if there has been one."""
        if self._received:
            with suppress(PeerLostError):  # as in _post
                self._post()
                self._prepare()

    def _prepare(self) -> _Ready | None:
        """Have tensors ready for a dict like the last one: while we wait for it, that costs nobody time."""
        if self._ready is None and self._last is not None:
            self._ready = _Ready(self._last, self._posted[0][0])
        return self._ready

    def _check_trailer(self, inbox: _Message, at: int) -> None:
        if SEQUENCE.unpack_from(inbox.bytes, at)[0] != self._decoder.sequence:
            raise FrameError(self._decoder.link, f"truncated frame: fewer than {at} bytes arrived")

    def flush(self) -> None:
        """Wait until everything that was sent has left this rank. Raises PeerLostError."""
        while self._in_flight:
            self._reap()

    def close(self) -> None:
        """Let what was sent leave. Raises PeerLostError."""
        self.flush()

    def _reap(self) -> None:
        # Not is_completed(): gloo can report completion while it still reads the buffer.
        message, works, _ = self._in_flight[0]
        for work in works:
            self._wait_for_peer(work, self._encoder.link)
        self._in_flight.popleft()
        self._free.append(message)

    def _post(self) -> None:
        while len(self._posted) < AHEAD:
            inbox = self._idle_inbox()
            try:
                self._posted.append((inbox, self._irecv(inbox.tensor, TAG)))
            except PeerLostError:
                if not self._posted:
                    raise
                return  # a peer that has left after a dict that is here: only the receive after that would mind

    def _idle_inbox(self) -> _Message:
        posted = [inbox for inbox, _ in self._posted]
        inbox = next((m for m in self._inboxes if m not in posted and m.is_idle()), None)
        if inbox is None:
            inbox = _Message(self._inline)
            if len(self._inboxes) < MAX_REUSED:
                self._inboxes.append(inbox)
        return inbox

    def _irecv(self, tensor: torch.Tensor, tag: int) -> dist.Work:
        try:
            return self._group.recv([tensor], self._peer, tag)
        except RuntimeError as error:
            raise PeerLostError(self._decoder.link, str(error)) from error

    @waits
    def _wait_for_peer(self, work: dist.Work, link: str) -> None:
        self._wait(work, link)

    @staticmethod
    def _wait(work: dist.Work, link: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(link, str(error)) from error


class _Message:
    """Memory of one message: as a tensor for gloo, as bytes for the header. Zeros: old memory could hold a trailer."""

    __slots__ = ("_first", "_own_holders", "address", "bytes", "tensor")

    def __init__(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8)
        self.bytes = memoryview(self.tensor.numpy())
        self.address = self.tensor.data_ptr()
        self._first = self.tensor
        self._own_holders = holders(self.tensor)

    def first(self, size: int) -> torch.Tensor:
        """The first `size` bytes as a tensor; mostly as many as the last time."""
        if self._first.nbytes != size:
            self._first = self.tensor[:size]
        return self._first

    def is_idle(self) -> bool:
        """Whether no tensor that was given out lies in this memory any more."""
        return holders(self.tensor) == self._own_holders


class _Ready:
    """A dict like the one of this header, before its payload has arrived in the inbox. For one use.

    Making it takes longer than anything else in a hop, so it is made while nobody waits.
    """

    def __init__(self, header: Header, inbox: _Message) -> None:
        self.header = header
        self._inbox = inbox
        self._at = aligned(header.length)
        self._copies: list[tuple[int, int, int]] = []
        self._copied = header.payload <= COPY_BYTES
        self._result, _ = header.allocate(self)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor of the dict: in the inbox, or in memory of its own that `filled` copies to."""
        at, size = self._at, prod(shape) * dtype.itemsize
        self._at += size
        if self._copied or at % dtype.itemsize:
            tensor = torch.empty(shape, dtype=dtype)
            self._copies.append((tensor.data_ptr(), at, size))
            return tensor
        return self._inbox.tensor[at : at + size].view(dtype).view(shape)

    def filled(self) -> dict[str, Any]:
        """The dict, now that the payload has arrived."""
        for address, at, size in self._copies:
            ctypes.memmove(address, self._inbox.address + at, size)
        return self._result


def aligned(length: int) -> int:
    """Where the payload starts behind a header of this length."""
    return -(-length // ALIGNMENT) * ALIGNMENT
