"""Wakes the keeper when a file appears in /dev/shm, so that it is seen while its maker still lives. Linux only.

A process may die a moment after it made a segment (a full /dev/shm is a bus error at the first write); later nothing
tells whose that was. Standard library only: inotify by way of libc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from . import agent_proc

IN_CREATE = 0x100
IN_MOVED_TO = 0x80


def open_watch() -> int:
    """Return a non-blocking descriptor that is readable after a file appeared, -1 where that cannot be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    except AttributeError:
        return -1
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, agent_proc.SHM.encode(), IN_CREATE | IN_MOVED_TO) < 0:
        os.close(descriptor)
        return -1
    return descriptor


def drain(descriptor: int) -> None:
    """Forget what was told so far."""
    with contextlib.suppress(OSError):
        while os.read(descriptor, 65536):
            pass
