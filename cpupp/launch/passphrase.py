"""Passphrases of private keys, asked for on the terminal: once per key for all hosts and hops of this process."""

from __future__ import annotations

import getpass
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
TRIES = 3


class Unlocked(Generic[T]):
    """The keys that a passphrase has opened so far, by file; asks for those that it does not know yet.

    One question at a time, whoever asks; a key that was not opened is not asked for again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[Path, T | str] = {}

    def get(self, path: Path, unlock: Callable[[str], T]) -> T | str:
        """Return the key in `path`, or why there is none.

        unlock: makes the key of a passphrase; raises ValueError when it is the wrong one.
        """
        with self._lock:
            if path not in self._keys:
                self._keys[path] = _ask(path, unlock)
            return self._keys[path]


def _ask(path: Path, unlock: Callable[[str], T]) -> T | str:
    if not _is_terminal():
        return f"{path} needs its passphrase: ssh-add it"
    with _Terminal():
        for attempt in range(TRIES):
            again = "wrong; " if attempt else ""
            try:
                words = getpass.getpass(f"{again}passphrase for {path}: ")
            except (EOFError, OSError):
                break
            if not words:
                break
            try:
                return unlock(words)
            except ValueError:
                continue
        else:
            return f"{path}: {TRIES} wrong passphrases"
    return f"{path}: no passphrase given"


def _is_terminal() -> bool:
    """Whether somebody sits there: both ends of the question are a terminal."""
    try:
        return sys.stdin.isatty() and sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


class _Terminal:
    """While entered, `restore_terminal` knows what the terminal was like before the question hid what is typed."""

    saved: list[Any] | None = None

    def __enter__(self) -> None:
        try:
            _Terminal.saved = list(termios.tcgetattr(sys.stdin.fileno()))
        except (termios.error, OSError, ValueError):
            _Terminal.saved = None

    def __exit__(self, *_: object) -> None:
        _Terminal.saved = None


def restore_terminal() -> None:
    """Show again what is typed, when the process ends in the middle of a question."""
    saved = _Terminal.saved
    if saved is not None:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, saved)
        print(file=sys.stderr)
