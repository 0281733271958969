"""Collectives of ranks that share memory: each has a segment of two slots that the others read.

Operation number k uses slot k % 2 of every rank. A rank copies its data into its slot, publishes k, and waits until
all others have published k. Nobody can overwrite a slot that somebody still reads: to reach operation k + 2 a rank has
seen everybody publish k + 1, and who publishes k + 1 has finished k. That includes ranks that only give (gather).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from cpupp.rank.ring import CONTROL_BYTES, SLICE_SECONDS, PeerLostError, span
from cpupp.rank.segments import Segment
from cpupp.rank.step_clock import waits

SLOT_BYTES = 2 << 20
SPIN_ROUNDS = 1000
_PUBLISHED = 0


def sum_in_order(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Sum equally long tensors into `out` (which may be one of them), in float32 if they are 16 bits wide."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)  # rounds once, as a sum in float32 would
        return
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


class Board:
    """One rank's view of the segments of its subset.

    segments: in group order, this rank's own at `position`; names: how messages call the ranks (`rank 3`).
    """

    def __init__(self, segments: list[Segment], position: int, names: list[str], timeout: float) -> None:
        self._segments = segments
        self._position = position
        self._names = names
        self._timeout = timeout
        self._sequence = 0
        self._others = [i for i in range(len(segments)) if i != position]
        self._bytes = [
            torch.frombuffer(s.buffer, dtype=torch.uint8, count=2 * SLOT_BYTES, offset=CONTROL_BYTES) for s in segments
        ]
        self._views: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    @staticmethod
    def segment_bytes() -> int:
        """Bytes of /dev/shm that each rank of a board takes."""
        return CONTROL_BYTES + 2 * SLOT_BYTES

    @classmethod
    def create(cls, path: Path) -> Segment:
        """Make this rank's own segment. Raises OSError as Segment.create does."""
        return Segment.create(path, cls.segment_bytes())

    @classmethod
    def attach(cls, path: Path) -> Segment:
        """Map another rank's segment. Raises OSError as Segment.attach does."""
        return Segment.attach(path, cls.segment_bytes())

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place, contiguous. Floating point is accumulated in float32 (float64 in itself), in group order.

        The order is the same on every rank, so the results are equal bit for bit. Raises PeerLostError.
        """
        flat = tensor.view(-1)
        for part in self._chunks(flat):
            sum_in_order([s[: part.numel()] for s in self.publish(part)], part)

    def all_gather(self, tensor: torch.Tensor, out: list[torch.Tensor]) -> None:
        """Copy every rank's contiguous tensor into the equally shaped (maybe strided) tensors of `out`."""
        if 0 < tensor.nbytes <= SLOT_BYTES:
            slots = self.publish(tensor.view(-1))
            for target, slot in zip(out, slots, strict=True):
                target.copy_(slot[: tensor.numel()].view(tensor.shape))
            return
        whole = [torch.empty_like(tensor) for _ in out]
        parts = [self._chunks(w.view(-1)) for w in whole]
        for part, *targets in zip(self._chunks(tensor.view(-1)), *parts, strict=True):
            for target, slot in zip(targets, self.publish(part), strict=True):
                target.copy_(slot[: part.numel()])
        for target, full in zip(out, whole, strict=True):
            target.copy_(full)

    def gather(self, tensor: torch.Tensor, out: list[torch.Tensor] | None) -> None:
        """As `all_gather`, for the rank that gives `out`; the others only give. Raises PeerLostError."""
        if out is not None:
            self.all_gather(tensor, out)
            return
        for part in self._chunks(tensor.view(-1)):
            self.publish(part)

    def _chunks(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        return iter(flat.split(SLOT_BYTES // flat.itemsize)) if flat.numel() else iter(())

    def publish(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Show `part` (up to SLOT_BYTES) to the others, wait for theirs, return the slots of all, in group order.

        The slots are longer than what was put in, and stay as they are until the second next operation.
        """
        self._sequence += 1
        slot = self._sequence & 1
        own = self._segments[self._position]
        ctypes.memmove(own.address + CONTROL_BYTES + slot * SLOT_BYTES, *span(part))
        own.words[_PUBLISHED] = self._sequence
        own.wake(_PUBLISHED)
        for i in self._others:
            self._wait(i)
        key = part.dtype, slot
        views = self._views.get(key)
        if views is None:
            bounds = slice(slot * SLOT_BYTES, (slot + 1) * SLOT_BYTES)
            views = self._views[key] = [b[bounds].view(part.dtype) for b in self._bytes]
        return views

    @waits
    def _wait(self, i: int) -> None:
        segment, due = self._segments[i], self._sequence
        words = segment.words
        for _ in range(SPIN_ROUNDS):
            if words[_PUBLISHED] >= due:
                return
        deadline = time.monotonic() + self._timeout
        while (seen := words[_PUBLISHED]) < due:
            segment.wait(_PUBLISHED, seen, SLICE_SECONDS)
            if words[_PUBLISHED] >= due:
                return
            link = f"{self._names[i]} -> {self._names[self._position]}"
            if not segment.owner_lives():
                raise PeerLostError(link, f"{self._names[i]} is gone in the middle of a collective")
            if time.monotonic() > deadline:
                raise PeerLostError(link, f"{self._names[i]} did not join a collective before the time-out")

    def close(self) -> None:
        """Drop the views and unmap."""
        self._views.clear()
        self._bytes.clear()
        for segment in self._segments:
            segment.close()
