"""Counts where the time of a worker's steps goes: compute, wire, waiting for a peer, waiting for the engine.

Always on, so it must be cheap: two looks at the clock for each call of the communicator, and six sums for each call of
the worker, written to memory that the host's agent can read as a file (agent_steps).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import wraps
from time import monotonic_ns
from typing import ParamSpec, TypeVar

from cpupp.rank.agent_steps import COUNTERS, KINDS, LAYOUT, MAGIC, path_of

P = ParamSpec("P")
R = TypeVar("R")

_STEPS, _TOKENS, _COMPUTE, _WIRE, _WAIT, _IDLE = range(len(COUNTERS))
_DECODE, _OTHER = (1 + i * len(COUNTERS) for i in range(len(KINDS)))  # the first word is MAGIC


class StepClock:
    """The clock of this process's worker. `words`: where it counts, 64 bits each, in the order of LAYOUT.

    talk_ns, wait_ns: inside the communicator since the worker's call began, and of it blocked for a peer.
    """

    def __init__(self) -> None:
        self.talk_ns = self.wait_ns = 0
        self.words = memoryview(bytearray(MAGIC.ljust(LAYOUT.size, b"\0"))).cast("q")
        self._kind = _OTHER
        self._since = 0

    def open(self, site: str, rank: int) -> None:
        """From now on count into the file of this rank. Raises OSError."""
        fd = os.open(path_of(site, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(self.words))  # all pages: a full disk is found here, not by a SIGBUS
            self.words = memoryview(mmap.mmap(fd, LAYOUT.size)).cast("q")
        finally:
            os.close(fd)

    def step(self, num_tokens: int, num_requests: int) -> None:
        """A call begins that is a step of so many tokens of so many requests; none of both: only an order."""
        kind = _DECODE if 0 < num_tokens == num_requests else _OTHER
        if kind != self._kind:
            # Before the first decode step this stage has waited for the others' part of the prompt, and before a new
            # prompt for somebody to send one: neither belongs to a decode step.
            self._kind = _OTHER
        self.resume()
        self._kind = kind
        if num_tokens:
            self.words[kind + _STEPS] += 1
            self.words[kind + _TOKENS] += num_tokens

    def resume(self) -> None:
        """A call begins, the first or another one of a step."""
        now = monotonic_ns()
        if self._since:
            self.words[self._kind + _IDLE] += now - self._since
        self._since = now
        self.talk_ns = self.wait_ns = 0

    def pause(self) -> None:
        """The call has ended."""
        now = monotonic_ns()
        words, kind, talk, wait = self.words, self._kind, self.talk_ns, self.wait_ns
        words[kind + _COMPUTE] += now - self._since - talk
        words[kind + _WIRE] += talk - wait
        words[kind + _WAIT] += wait
        self._since = now


CLOCK = StepClock()


def talks(function: Callable[P, R]) -> Callable[P, R]:
    """Count the time of this function of the communicator, whatever it calls."""

    @wraps(function)
    def counted(*args: P.args, **kwargs: P.kwargs) -> R:
        before, began = CLOCK.talk_ns, monotonic_ns()
        try:
            return function(*args, **kwargs)
        finally:
            CLOCK.talk_ns = before + monotonic_ns() - began  # what was counted inside is part of it

    return counted


def waits(function: Callable[P, R]) -> Callable[P, R]:
    """Count the time of this function, which does nothing but wait for a peer, inside one that `talks`."""

    @wraps(function)
    def counted(*args: P.args, **kwargs: P.kwargs) -> R:
        began = monotonic_ns()
        try:
            return function(*args, **kwargs)
        finally:
            CLOCK.wait_ns += monotonic_ns() - began

    return counted
