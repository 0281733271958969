"""Kept records: what a detached run leaves on its host when it has ended. Standard library only.

`<place>/ended/<run>-<attempt>-<host>/` has site.json and state.json as they were last, result.json and logs/. It stays
until the user forgets it, or until it is old. A run with a launcher leaves nothing: its launcher has the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from typing import Any

from . import agent_logs

ENDED = "ended"
RECORD = "site.json"
STATE = "state.json"
RESULT = "result.json"
DETACHED = "detached.json"  # in a site: its end leaves a record
STOP = "stop.json"  # in a site: somebody wants the run to end
KEPT_S = 14 * 86400.0
NO_WORD = {"code": "AGENT-LOST", "message": "the agent ended without a word", "node": -1, "last_lines": []}


def read_json(*path: str) -> dict[str, Any] | None:
    """Return the object in a file, None when there is none that can be read."""
    try:
        with open(os.path.join(*path), encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: str, data: dict[str, Any]) -> None:
    """Write the object so that a reader sees the old text or the new one. Raises OSError."""
    part = path + ".part"
    descriptor = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(json.dumps(data).encode("ascii"))
    os.rename(part, path)


def result(failure: dict[str, Any] | None) -> dict[str, Any]:
    """Return how a detached run ended on this host, as result.json has it."""
    return {"outcome": "failed" if failure else "stopped", "failure": failure, "time": time.time()}


def is_detached(site: str) -> bool:
    """Whether the site's end leaves a record."""
    return os.path.exists(os.path.join(site, DETACHED))


def keep(site: str) -> None:
    """Move what is worth keeping out of a site that nobody holds any more. Never raises: the site goes in any case."""
    with contextlib.suppress(OSError):
        record = read_json(site, RECORD) or {}
        name = "-".join(str(record.get(key, "")) for key in ("run", "attempt", "host"))
        folder = os.path.join(os.path.dirname(site), ENDED, re.sub(r"[^\w.-]", "_", name))
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(folder), 0o700)
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder, 0o700)
        with contextlib.suppress(OSError):
            _complete_logs(os.path.join(site, "logs"))
        os.rename(os.path.join(site, "logs"), os.path.join(folder, "logs"))
        for entry in (STATE, RESULT):
            with contextlib.suppress(OSError):
                os.rename(os.path.join(site, entry), os.path.join(folder, entry))
        if not os.path.exists(os.path.join(folder, RESULT)):
            ordered = os.path.exists(os.path.join(site, STOP))
            state = read_json(folder, STATE) or {}
            failure = state.get("failure") or {**NO_WORD, "time": time.time()}
            write_json(os.path.join(folder, RESULT), result(None if ordered else failure))
        # Last: without it the folder is no record yet.
        os.rename(os.path.join(site, RECORD), os.path.join(folder, RECORD))


def _complete_logs(folder: str) -> None:
    for name in os.listdir(folder):
        if name.endswith(".raw"):
            agent_logs.complete(os.path.join(folder, name[: -len(".raw")] + ".log"))


def kept(place: str) -> list[str]:
    """Return the folders of the kept records in a place."""
    with contextlib.suppress(OSError):
        return [entry.path for entry in os.scandir(os.path.join(place, ENDED)) if entry.is_dir(follow_symlinks=False)]
    return []


def drop(folder: str) -> None:
    """Remove a kept record, and the folders above it that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(folder))
        os.rmdir(os.path.dirname(os.path.dirname(folder)))


def sweep(place: str, now: float) -> None:
    """Remove the kept records that are old, whichever host of a shared home they are from. now: unix seconds."""
    for folder in kept(place):
        with contextlib.suppress(OSError):
            if now - os.stat(folder).st_mtime > KEPT_S:
                drop(folder)
