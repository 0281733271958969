"""The run's folder: plan, spec, events and result, written so that a crash leaves a record that can be read."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from cpupp.errors import CpuppError


def new_run_id() -> str:
    """A run id: UTC time to the second and four hex digits, short enough for names in /dev/shm."""
    return f"{time.strftime('%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


class RunRecord:
    """One run's folder (0700): `run.json`, `spec.yaml`, `plan.json`, `events.ndjson`, `logs/`, `result.json`."""

    def __init__(self, folder: Path) -> None:
        with making(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._events = (folder / "events.ndjson").open("a", encoding="utf-8", buffering=1)
        self.folder = folder
        self.logs = folder / "logs"

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file (text and bytes as they are) atomically: temporary file, fsync, rename.

        A full disk does not end the run.
        """
        with contextlib.suppress(OSError):
            self._write(name, value)

    def _write(self, name: str, value: Any) -> None:
        if not isinstance(value, str | bytes):
            value = json.dumps(value, indent=2, default=_plain) + "\n"
        raw = value.encode("utf-8") if isinstance(value, str) else value
        target = self.folder / name
        temporary = target.with_name(target.name + ".new")
        with temporary.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)

    def event(self, kind: str, **data: Any) -> None:
        """Append one event with the wall clock. A full disk does not end the run."""
        with contextlib.suppress(OSError, ValueError):
            self._events.write(json.dumps({"time": time.time(), "event": kind, **data}, default=_plain) + "\n")

    def close(self) -> None:
        """Close the event file."""
        with contextlib.suppress(OSError):
            self._events.close()


@contextlib.contextmanager
def making(folder: Path) -> Iterator[None]:
    """Tell an OSError of the body as what it is for the user: the run's folder cannot be made."""
    try:
        yield
    except OSError as error:
        message = f"the run's folder cannot be made: {error.strerror} ({error.filename})"
        hint = "set XDG_STATE_HOME to a folder that you can write; plans, events and logs of runs go there"
        raise CpuppError("STATE-FOLDER", message, hint=hint, where=str(folder)) from None


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
