"""A ring in shared memory that carries the bytes of one ordered pair of ranks: one writer, one reader.

Only for machines with total store order (x86-64): the writer's data are visible before the counter that announces
them, without a fence that Python could not issue. A waiting side spins for some tens of microseconds and then sleeps
in the kernel, so a rank that waits for a slow stage does not burn a core that the stage could use.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cpupp.errors import CpuppError, ExitCode
from cpupp.rank.segments import Segment
from cpupp.rank.step_clock import waits

CONTROL_BYTES = 4096
_HEAD, _TAIL = 0, 8  # 64-bit words; a cache line (and more) apart
SPIN_ROUNDS = 800
SLICE_SECONDS = 0.1
TIMEOUT_SECONDS = 1800.0  # as torch.distributed's default for gloo
STEP_BYTES = 512 * 1024  # of a large frame: the reader copies one step while the writer copies the next


class PeerLostError(CpuppError):
    """The other rank of a link died, or did not answer in time. The text names both ranks."""

    def __init__(self, link: str, message: str) -> None:
        super().__init__(
            "PEER-LOST",
            f"{link}: {message}",
            hint="look at the log of the rank that is gone first",
            exit_code=ExitCode.RANK_FAILED,
        )


class Ring:
    """One end of a ring. The writer creates it, the reader attaches.

    capacity: bytes that can be under way before the writer has to wait for the reader.
    """

    def __init__(self, segment: Segment, link: str, capacity: int) -> None:
        self.segment = segment
        self.peer_lives: Callable[[], bool] = segment.owner_lives  # the writer's end asks another segment, see ShmLink
        self.link = link
        self.capacity = capacity
        self._data = segment.address + CONTROL_BYTES
        self._head = segment.words[_HEAD]
        self._tail = segment.words[_TAIL]

    @staticmethod
    def segment_bytes(capacity: int) -> int:
        """Bytes of /dev/shm that a ring of this capacity takes."""
        return CONTROL_BYTES + capacity

    @classmethod
    def create(cls, path: Path, link: str, capacity: int) -> Ring:
        """Make the writer's end. Raises OSError as Segment.create does."""
        return cls(Segment.create(path, cls.segment_bytes(capacity)), link, capacity)

    @classmethod
    def attach(cls, path: Path, link: str, capacity: int) -> Ring:
        """Make the reader's end. Raises OSError as Segment.attach does."""
        return cls(Segment.attach(path, cls.segment_bytes(capacity)), link, capacity)

    def room(self) -> int:
        """Bytes that the writer can write now."""
        return self.capacity - (self._head - self.segment.words[_TAIL])

    def pending(self) -> int:
        """Bytes that the reader can read now."""
        return self.segment.words[_HEAD] - self._tail

    def put(self, address: int, size: int) -> int:
        """Copy up to `size` bytes from memory at `address` into the ring without waiting; return how many."""
        size = min(size, self.room())
        self._copy(self._head, address, size, into_ring=True)
        if size:
            self._head += size
            self.segment.words[_HEAD] = self._head
        return size

    def take(self, address: int, size: int) -> int:
        """Copy up to `size` bytes out of the ring to memory at `address` without waiting; return how many."""
        size = min(size, self.pending(), STEP_BYTES)
        self._copy(self._tail, address, size, into_ring=False)
        if size:
            self._tail += size
            self.segment.words[_TAIL] = self._tail
            if size >= STEP_BYTES // 2:  # small ones: the writer looks again by itself
                self.segment.wake(_TAIL)
        return size

    def put_whole(self, parts: list[tuple[int, int]], total: int) -> bool:
        """Copy all (address, size) parts into the ring if they fit there in one piece now; return whether they did."""
        at = self._head % self.capacity
        if total > self.capacity - at or total > self.room():
            return False
        target = self._data + at
        for address, size in parts:
            ctypes.memmove(target, address, size)
            target += size
        self._head += total
        self.segment.words[_HEAD] = self._head
        self.segment.wake(_HEAD)
        return True

    def peek(self, size: int) -> memoryview | None:
        """The next `size` bytes, left in the ring, if they have arrived and lie there in one piece."""
        at = self._tail % self.capacity
        if size > self.capacity - at or size > self.pending():
            return None
        return self.segment.bytes[CONTROL_BYTES + at : CONTROL_BYTES + at + size]

    def peeked_address(self) -> int:
        """Where in memory the bytes are that `peek` shows."""
        return self._data + self._tail % self.capacity

    def skip(self, size: int) -> None:
        """Give the next `size` bytes, which `peek` has shown, back to the writer."""
        self._tail += size
        self.segment.words[_TAIL] = self._tail

    def wait_for_room(self, deadline: float, meanwhile: Callable[[], bool] | None = None) -> None:
        """Wait until the reader has made room. `meanwhile` may do other work; it returns whether it did some."""
        self._wait(_TAIL, self._head - self.capacity, deadline, meanwhile)

    def wait_for_data(self, deadline: float) -> None:
        """Wait until the writer has written more. Raises PeerLostError (dead, or `deadline` passed)."""
        self._wait(_HEAD, self._tail, deadline, None)

    @waits
    def _wait(self, word: int, blocked: int, deadline: float, meanwhile: Callable[[], bool] | None) -> None:
        words = self.segment.words
        for _ in range(SPIN_ROUNDS):
            if words[word] != blocked:
                return
        while words[word] == blocked:
            if meanwhile is not None and meanwhile():
                continue
            # With other work to watch, sleep short: only this ring's writer or reader can wake us.
            self.segment.wait(word, blocked, SLICE_SECONDS if meanwhile is None else 0.0005)
            self._check(word, blocked, deadline)

    def _check(self, word: int, blocked: int, deadline: float) -> None:
        if self.segment.words[word] != blocked:
            return
        if not self.peer_lives():
            raise PeerLostError(self.link, f"the {'sending' if word == _HEAD else 'receiving'} rank is gone")
        if time.monotonic() > deadline:
            raise PeerLostError(self.link, "no progress before the time-out")

    def _copy(self, position: int, address: int, size: int, *, into_ring: bool) -> None:
        at = position % self.capacity
        first = min(size, self.capacity - at)
        for offset, start, count in ((0, at, first), (first, 0, size - first)):
            if count > 0:
                inside, outside = self._data + start, address + offset
                ctypes.memmove(inside if into_ring else outside, outside if into_ring else inside, count)

    def write(self, parts: list[tuple[int, int]], deadline: float, meanwhile: Callable[[], bool] | None = None) -> None:
        """Write all (address, size) parts, waiting for room where needed. Raises PeerLostError."""
        for address, size in parts:
            while size:
                done = self.put(address, min(size, STEP_BYTES))
                address += done
                size -= done
                self.segment.wake(_HEAD)
                if size and not done:
                    self.wait_for_room(deadline, meanwhile)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size in bytes of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes
