"""Where the time of each rank's steps went, as its worker counts it into a small file of the site folder.

The worker maps the file and writes to it after each step (see step_clock); who wants to know reads it. Nothing is asked
of vLLM for that. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import Any

PREFIX = "steps-"
MAGIC = b"cpupp-s1"
KINDS = ("decode", "other")
"""Of a step: each of its requests gets one token; or it holds a piece of a prompt, and all else."""
COUNTERS = ("steps", "tokens", "compute_ns", "wire_ns", "wait_ns", "idle_ns")
"""For each kind, since the worker started. The four times add up to all that passed since its first step.

compute: inside the worker's own calls, the communicator excepted; wire: the communicator's own work (send, receive,
copy); wait: blocked in it until a peer's data is there, its travel included; idle: between calls, until the engine
orders the next one.
"""
LAYOUT = struct.Struct(f"=8s{len(KINDS) * len(COUNTERS)}q")


def path_of(site: str, rank: int) -> str:
    """Where the worker of a rank writes."""
    return os.path.join(site, f"{PREFIX}{rank}")


def read_steps(site: str) -> dict[str, dict[str, dict[str, int]]]:
    """Return rank -> kind -> counter -> value, of all ranks that write to this site. Never raises."""
    found = {}
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(site)):
            if name.startswith(PREFIX) and name[len(PREFIX) :].isdigit():
                with contextlib.suppress(OSError, struct.error), open(os.path.join(site, name), "rb") as file:
                    found[name[len(PREFIX) :]] = decode(file.read(LAYOUT.size))
    return {rank: kinds for rank, kinds in found.items() if kinds}


def decode(data: bytes) -> dict[str, Any]:
    """Return kind -> counter -> value; empty when the file is of another version. Raises struct.error."""
    magic, *values = LAYOUT.unpack(data)
    if magic != MAGIC:
        return {}
    width = len(COUNTERS)
    parts = [values[i * width : (i + 1) * width] for i in range(len(KINDS))]
    return {kind: dict(zip(COUNTERS, part)) for kind, part in zip(KINDS, parts)}  # noqa: B905  # Python 3.8 has no `strict`
