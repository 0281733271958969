"""How fast this host reads memory: every core at once, for a fifth of a second. Standard library only."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent_children import Children

# Runs in a Python of its own, which has one thread and can fork. Each child reads a buffer that no cache holds, as a
# matrix is read that one token passes: bytearray.find is the C library's memchr, the fastest plain read that the
# standard library has. All begin when the pipe closes, each has its own CPU, and each says how fast its median pass
# was by the time on its CPU, and which share of the clock that time was: a moment in which a neighbour on the machine
# was busy must not make a host slow. A host that is too busy for all that is not waited for.
MEASURE = """
import json, os, signal, sys, time
cpus, size, seconds = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
ready_in, ready_out = os.pipe()
start_in, start_out = os.pipe()
said_in, said_out = os.pipe()
for cpu in cpus:
    if os.fork():
        continue
    os.close(start_out)
    signal.alarm(5)
    try:
        os.sched_setaffinity(0, {cpu})
        buffer = bytearray(b"\\1") * size
        os.write(ready_out, b"r")
        os.read(start_in, 1)
        began, used, passes = time.monotonic(), [time.process_time()], []
        while time.monotonic() - began < seconds:
            buffer.find(b"\\0")
            used.append(time.process_time())
            passes.append(used[-1] - used[-2])
        share = min(1.0, (used[-1] - used[0]) / (time.monotonic() - began))
        line = [cpu, share * size / sorted(passes)[len(passes) // 2], share]
        os.write(said_out, (json.dumps(line) + chr(10)).encode())
    except (OSError, MemoryError):
        os.write(ready_out, b"r")
    finally:
        os._exit(0)
os.close(ready_out)
os.close(said_out)
num_ready = 0
while num_ready < len(cpus):
    data = os.read(ready_in, 4096)
    if not data:
        break
    num_ready += len(data)
os.close(start_out)
said = b""
while True:
    data = os.read(said_in, 65536)
    if not data:
        break
    said += data
print("@bandwidth " + json.dumps([json.loads(line) for line in said.splitlines()]))
"""
SECONDS = 0.2
"""Two periods of the kernel's CPU quota (100 ms): shorter would see it granted or withheld, not both."""
BUFFER = 32 << 20  # a core's share of the largest L3 caches is 12 MiB (2026)
SMALLEST_BUFFER = 8 << 20
MOST_MEMORY = 8  # the buffers take an eighth of what is available at most
TIMEOUT_S = 10.0


def bandwidth_facts(cpus: list[dict[str, int]], room: int, children: Children) -> list[dict[str, Any]]:
    """Measure every NUMA node at once, one CPU of each physical core (see BandwidthFacts).

    room: bytes of memory that can be taken. Empty when there is too little, or when it cannot be measured.
    """
    cores: dict[tuple[int, int], dict[str, int]] = {}
    for cpu in cpus:
        cores.setdefault((cpu["socket"], cpu["core"]), cpu)
    numa = {cpu["cpu"]: cpu["numa"] for cpu in cores.values()}
    size = min(BUFFER, room // MOST_MEMORY // max(1, len(numa)))
    if not numa or size < SMALLEST_BUFFER:
        return []
    argv = [sys.executable, "-ISc", MEASURE, json.dumps(sorted(numa)), str(size), str(SECONDS)]
    try:
        answer = children.ask(argv, TIMEOUT_S, {})
    except (OSError, ValueError):
        return []
    rows = _rows(answer.output.decode("utf-8", "replace"))
    if {row[0] for row in rows} != set(numa):  # one of them died: a sum without it would be wrong
        return []
    found = []
    for node in sorted(set(numa.values())):
        own = [row for row in rows if numa[row[0]] == node]
        share = sum(row[2] for row in own) / len(own)
        total = int(sum(row[1] for row in own))
        found.append(
            {"numa": node, "cpus": [row[0] for row in own], "bytes_per_s": total, "cpu_share": round(share, 2)}
        )
    return found


def _rows(text: str) -> list[tuple[int, float, float]]:
    for line in text.splitlines():
        if line.startswith("@bandwidth "):
            return sorted((int(cpu), float(rate), float(share)) for cpu, rate, share in json.loads(line[11:]))
    return []
