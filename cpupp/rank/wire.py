"""Tensors of known shape between the positions of a gloo group: what collectives over hosts are made of."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from cpupp.rank.frames import FrameError
from cpupp.rank.ring import PeerLostError
from cpupp.rank.step_clock import waits

TAG = 0x6371  # apart from the links' tag
SMALL_TAG = 0x6372
DIRECT_BYTES = 32 * 1024
LENGTH = struct.Struct("<Q")
MAX_VIEWS = 64

Work = tuple[int, dist.Work]
"""A peer's position, and what is under way to or from it."""


class Wire:
    """Tensors of known shape between positions of a gloo group. `names`: how messages call the positions."""

    def __init__(self, group: dist.ProcessGroup, position: int, names: list[str]) -> None:
        self._group, self._position, self._names = group, position, names
        self._boxes: dict[int, _Mailbox] = {}

    def swap(self, peers: list[int], tensor: torch.Tensor) -> list[torch.Tensor]:
        """Give `tensor` (contiguous, up to DIRECT_BYTES) to all peers and return theirs, of equal shape and dtype.

        What comes back stays until `expect` or the next swap with that peer. `expect` posts the receive for that one:
        gloo moves a message at once that is already waited for. In front of a tensor travels its length: gloo takes a
        shorter one than is due without a word. Raises PeerLostError, and FrameError when a peer's is of another length.
        """
        boxes = [self._box(p) for p in peers]
        for peer, box in zip(peers, boxes, strict=True):
            self._finish(peer, box.sending)  # of the swap before: long gone
            self._post(peer, box)
            box.sending = self._start(self._group.send, peer, box.fill(tensor), SMALL_TAG)
        return [self._receive(peer, box, tensor) for peer, box in zip(peers, boxes, strict=True)]

    def expect(self, peers: list[int]) -> None:
        """Post the receives of the next `swap` with these peers; what the last one returned is overwritten."""
        with suppress(PeerLostError):  # only a next swap would mind that a peer has left
            for peer in peers:
                self._post(peer, self._box(peer))

    def _box(self, peer: int) -> _Mailbox:
        box = self._boxes.get(peer)
        if box is None:
            box = self._boxes[peer] = _Mailbox()
        return box

    def _post(self, peer: int, box: _Mailbox) -> None:
        if box.posted is None:
            box.posted = self._start(self._group.recv, peer, box.inbox, SMALL_TAG)

    def _receive(self, peer: int, box: _Mailbox, tensor: torch.Tensor) -> torch.Tensor:
        posted, box.posted = box.posted, None
        self._wait(peer, posted)
        if box.length() != tensor.nbytes:
            raise FrameError(
                self._link(peer), f"{box.length()} bytes arrived in a collective, {tensor.nbytes} were due"
            )
        return box.received(tensor)

    @waits
    def _wait(self, peer: int, work: dist.Work | None) -> None:
        self._finish(peer, work)

    def _finish(self, peer: int, work: dist.Work | None) -> None:
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(peer, error) from error

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """gloo's own sum of two ranks, in place: one addition, rounded once, the same on both. Raises PeerLostError."""
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise self._lost(1 - self._position, error) from error

    def exchange(self, out: list[tuple[int, torch.Tensor]], into: list[tuple[int, torch.Tensor]]) -> None:
        """Send and receive all the (position, contiguous tensor) pairs at once. Raises PeerLostError."""
        self.finish(self.start(out, into))

    def start(self, out: list[tuple[int, torch.Tensor]], into: list[tuple[int, torch.Tensor]]) -> list[Work]:
        """Begin an exchange; neither kind of tensor may be touched before `finish`. Raises PeerLostError."""
        works = [(p, self._start(self._group.recv, p, tensor)) for p, tensor in into]
        return works + [(p, self._start(self._group.send, p, tensor)) for p, tensor in out]

    def finish(self, works: list[Work]) -> None:
        """Wait for what `start` returned. Raises PeerLostError."""
        for peer, work in works:
            self._finish(peer, work)

    def _start(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work],
        peer: int,
        tensor: torch.Tensor,
        tag: int = TAG,
    ) -> dist.Work:
        try:
            return operation([tensor], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _lost(self, peer: int, error: RuntimeError) -> PeerLostError:
        return PeerLostError(self._link(peer), f"{self._names[peer]} left in the middle of a collective: {error}")

    def _link(self, peer: int) -> str:
        return f"{self._names[peer]} -> {self._names[self._position]}"


class _Mailbox:
    """Memory for small tensors to and from one peer, and what is under way there."""

    def __init__(self) -> None:
        self.inbox = torch.zeros(LENGTH.size + DIRECT_BYTES, dtype=torch.uint8)
        self._outbox = torch.zeros(LENGTH.size + DIRECT_BYTES, dtype=torch.uint8)
        self._bytes_in, self._bytes_out = memoryview(self.inbox.numpy()), memoryview(self._outbox.numpy())
        self.posted: dist.Work | None = None
        self.sending: dist.Work | None = None
        self._views: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` into the outbox, behind its length, and return the bytes to send."""
        out, _ = self._view(tensor)
        LENGTH.pack_into(self._bytes_out, 0, tensor.nbytes)
        ctypes.memmove(out.data_ptr() + LENGTH.size, tensor.data_ptr(), tensor.nbytes)
        return out

    def length(self) -> int:
        """Bytes of the tensor that is in the inbox, as its sender says."""
        (length,) = LENGTH.unpack_from(self._bytes_in)
        return int(length)

    def received(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is in the inbox, as long as `tensor` and of its dtype, one-dimensional."""
        return self._view(tensor)[1]

    def _view(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = tensor.nbytes, tensor.dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            end = LENGTH.size + key[0]
            views = self._outbox[:end], self.inbox[LENGTH.size : end].view(tensor.dtype)
            self._views[key] = views
        return views
