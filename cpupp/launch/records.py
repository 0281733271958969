"""The run's folder: plan, spec, events and result, written so that a crash leaves a record that can be read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from cpupp.errors import CpuppError
from cpupp.launch.private import private, private_folder
from cpupp.rank.agent_mask import Mask

RESERVES = (64 << 10, 32 << 10, 16 << 10, 8 << 10)
"""Bytes held on the disk, the first that it has: a run's last state is written even where others fill it meanwhile."""


def new_run_id() -> str:
    """A run id: UTC time to the second and four hex digits, short enough for names in /dev/shm."""
    return f"{time.strftime('%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


class RunRecord:
    """One run's folder (0700): `run.json`, `spec.yaml`, `plan.json`, `events.ndjson`, `logs/`, `result.json`.

    `mask` hides secrets in all of them; `tell` gets, once, why something could not be written.
    """

    def __init__(self, folder: Path, mask: Mask | None = None, tell: Callable[[str], None] = lambda text: None) -> None:
        with making(folder):
            private_folder(folder)
            path = folder / "events.ndjson"
            self._events = open(path, "a", encoding="utf-8", buffering=1, opener=private)  # noqa: SIM115  # to the end
        self.folder = folder
        self._mask = mask or Mask()
        self._tell = tell
        self._told = False
        self.logs = folder / "logs"
        self._reserve = folder / ".reserve"
        self._hold()

    def write(self, name: str, value: Any, *, must: bool = False) -> None:
        """Write a JSON file (text and bytes as they are) atomically: temporary file, fsync, rename.

        A full disk does not end the run. Raises CpuppError STATE-FOLDER where the file must be written.
        """
        try:
            try:
                self._write(name, value)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._note(error)
                self._reserve.unlink(missing_ok=True)
                self._write(name, value)
                self._hold()
        except OSError as error:
            with contextlib.suppress(OSError):
                (self.folder / f"{name}.new").unlink(missing_ok=True)
            if must:
                raise _state_error(error, self.folder) from None
            self._note(error)

    def _write(self, name: str, value: Any) -> None:
        if not isinstance(value, str | bytes):
            value = json.dumps(value, indent=2, default=_plain) + "\n"
        raw = value.encode("utf-8") if isinstance(value, str) else value
        target = self.folder / name
        temporary = target.with_name(target.name + ".new")
        with open(temporary, "wb", opener=private) as file:
            file.write(self._masked(raw))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)

    def _hold(self) -> None:
        for size in RESERVES:
            try:
                with open(self._reserve, "wb", opener=private) as file:
                    os.posix_fallocate(file.fileno(), 0, size)
                return
            except OSError:
                with contextlib.suppress(OSError):
                    self._reserve.unlink(missing_ok=True)

    def _masked(self, raw: bytes) -> bytes:
        encoding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"  # as cluster files may be
        text = raw.decode(encoding, "surrogateescape")
        shown = self._mask.text(text)
        return raw if shown == text else shown.encode(encoding, "surrogateescape")

    def event(self, kind: str, **data: Any) -> None:
        """Append one event with the wall clock. A full disk does not end the run."""
        line = json.dumps({"time": time.time(), "event": kind, **data}, default=_plain)
        try:
            self._events.write(self._mask.text(line) + "\n")
        except OSError as error:
            self._note(error)
        except ValueError:  # it is closed
            return

    def _note(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._tell(f"the record of this run cannot be written, and lacks what happens now: {_words(error)}")

    def close(self) -> None:
        """Close the event file, and give back what was held of the disk."""
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._events.close()


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """Tell an OSError of the body as what it is for the user: the run's folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise _state_error(error, folder) from None


def _state_error(error: OSError, folder: Path) -> CpuppError:
    hint = "free some room there, or set XDG_STATE_HOME to a folder that you can write: plans, events and logs go there"
    return CpuppError(
        "STATE-FOLDER", f"the run's folder cannot be written: {_words(error)}", hint=hint, where=str(folder)
    )


def _words(error: OSError) -> str:
    return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
