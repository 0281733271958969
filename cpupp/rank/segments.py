"""Shared-memory segments: one writer creates, its peers attach, and the name goes as soon as all have attached.

A segment without a name cannot be left behind: when the last process that maps it dies, however it dies, the kernel
frees it. The creator holds a lock on its segment for as long as it lives, in any PID namespace, so a peer that waits
can tell a slow rank from a dead one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
from pathlib import Path
from typing import Any

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX = _FUTEX_NUMBERS.get(platform.machine(), 202)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Segment:
    """A mapped segment. `buffer`, `bytes`, `address`: its memory; `words`: as 64-bit words; `size` in bytes."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self.buffer = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._anchor: Any = ctypes.c_char.from_buffer(self.buffer)
        self.address = ctypes.addressof(self._anchor)
        self.bytes = memoryview(self.buffer)
        self.words = self.bytes.cast("Q")

    @classmethod
    def create(cls, path: Path, size: int) -> Segment:
        """Create, reserve all pages, lock and map a segment.

        Raises OSError: ENOSPC when /dev/shm has no room, which is found here and not by a SIGBUS at the first write;
        EROFS, EACCES; EEXIST for a name in use, unless its owner is dead: then the stale segment is replaced.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            if not _stale(path):
                raise
            path.unlink(missing_ok=True)
            fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, size)
            return cls(path, fd, size)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    @classmethod
    def attach(cls, path: Path, size: int) -> Segment:
        """Map a peer's segment. Raises OSError when it is not there or is not of `size` bytes."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != size:
                raise OSError(errno.EINVAL, f"{path} has {os.fstat(fd).st_size} bytes, not {size}")
            return cls(path, fd, size)
        except BaseException:
            os.close(fd)
            raise

    def unlink(self) -> None:
        """Remove the name; the memory lives on in those who map it."""
        self.path.unlink(missing_ok=True)

    def owner_lives(self) -> bool:
        """Whether the creator of this attached segment still runs (asked of the kernel; a few microseconds)."""
        return not _unlocked(self._fd)

    def wait(self, word: int, seen: int, seconds: float) -> None:
        """Sleep until the 64-bit word no longer holds `seen`, somebody wakes us, or `seconds` have passed."""
        timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        low = ctypes.c_uint32(seen & 0xFFFFFFFF)
        address = ctypes.c_void_p(self.address + 8 * word)
        _libc.syscall(_FUTEX, address, _FUTEX_WAIT, low, ctypes.byref(timeout), None, 0)

    def wake(self, word: int) -> None:
        """Wake all who sleep on the word."""
        _libc.syscall(_FUTEX, ctypes.c_void_p(self.address + 8 * word), _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)

    def close(self) -> None:
        """Unmap and release the lock. Tensors over this memory must be gone: else the map stays until they are."""
        self.words.release()
        self.bytes.release()
        self._anchor = None
        with contextlib.suppress(BufferError):
            self.buffer.close()
        os.close(self._fd)


def _unlocked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        return _unlocked(fd)
    finally:
        os.close(fd)
