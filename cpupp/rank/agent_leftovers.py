"""What earlier runs left on this host: files in /dev/shm, and processes of vLLM or cpupp. Standard library only.

A file counts as dead when no process that we can see maps or holds it, and when we can see every process that could.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from typing import Any

from . import agent_proc, agent_runs, agent_site

# Names that vLLM, torch, Python's shared memory, Intel's OpenMP and cpupp give. Anything else may be a user's own data.
OURS = re.compile(r"cpupp-|psm_|vllm|torch_|__KMP_REGISTERED_LIB_|sem\.(mp-|loky|psm)|shm_broadcast|loky-")
YOUNGEST_S = 60.0  # between its creation and the first mapping a segment looks dead
INITIAL_PID, INITIAL_IPC = "pid:[4026531836]", "ipc:[4026531839]"
AGENT, KEEPER = "cpupp-agent", "cpupp-keeper"
VLLM = re.compile(r"vllm\.entrypoints|cpupp\.rank\.vllm_|(^|/)vllm (serve|bench|run-batch)|^VLLM::|vllm\.v1\.")


def leftovers(now: float) -> list[dict[str, Any]]:
    """Return the files in /dev/shm that carry our names, whoever owns them: state is alive, dead or unknown."""
    files = {name: key for name, key in agent_proc.shm_files(owned_only=False).items() if OURS.match(name)}
    if not files:
        return []
    device = next(iter(files.values()))[0]
    used = agent_proc.shm_in_use(agent_proc.process_table(), device)
    found = []
    for name, key in sorted(files.items()):
        try:
            state = os.lstat(f"{agent_proc.SHM}/{name}")
        except OSError:
            continue
        age_s = max(0.0, now - state.st_mtime)
        found.append(
            {
                "name": name,
                "size": state.st_blocks * 512,
                "age_s": age_s,
                "owner": _user(state.st_uid),
                "mine": state.st_uid == os.getuid(),
                "state": "alive" if key in used or age_s < YOUNGEST_S else _judge(name, state),
            }
        )
    return found


def clean(now: float) -> list[dict[str, Any]]:
    """Remove the dead files of this user from /dev/shm; return name and size of what was removed."""
    removed = []
    for entry in leftovers(now):
        if entry["mine"] and entry["state"] == "dead":
            # Looks once more whether a process uses it, just before it goes.
            path = f"{agent_proc.SHM}/{entry['name']}"
            with contextlib.suppress(OSError):
                state = os.lstat(path)
                if agent_proc.remove_segments({(state.st_dev, state.st_ino)}):
                    removed.append({"name": entry["name"], "size": entry["size"]})
    return removed


def _judge(name: str, state: os.stat_result) -> str:
    """Return `dead`, or `unknown` where a process that we cannot see may use the file."""
    if _hides_processes():
        return "unknown"
    match = re.match(r"__KMP_REGISTERED_LIB_(\d+)_", name)
    if match and agent_proc.read_process(int(match[1])):
        return "alive"
    if os.getuid() != 0 and (state.st_uid != os.getuid() or state.st_mode & 0o077):
        return "unknown"  # the maps of other users' processes are closed to us
    return "dead"


def _hides_processes() -> bool:
    """Whether /dev/shm may be that of the machine while we see the processes of a container only."""
    try:
        pids, ipc = os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/ipc")
    except OSError:
        return True
    return pids != INITIAL_PID and ipc == INITIAL_IPC


def strangers(now: float) -> list[dict[str, Any]]:
    """Return the processes of vLLM and cpupp on this host that are not of this connection.

    run: the run of cpupp that they belong to, as far as this user's sites tell; held: whether that run lives.
    """
    table = agent_proc.process_table()
    own = {os.getpid(), *agent_proc.descendants([os.getpid()], table)}
    agents = {}
    for found in agent_runs.find():
        if not found.kept and found.agent():
            agents[found.agent()] = str(found.record.get("run"))
    boot = _boot_time()
    ticks = os.sysconf("SC_CLK_TCK")
    found_ones = []
    for pid, process in sorted(table.items()):
        kind = "" if pid in own or process.ended else _kind(pid)
        if kind:
            with contextlib.suppress(OSError):
                found_ones.append(
                    {
                        "pid": pid,
                        "kind": kind,
                        "name": agent_proc.name_of(pid),
                        "age_s": max(0.0, now - boot - process.start / ticks),
                        "owner": _user(os.stat(f"/proc/{pid}").st_uid),
                        "run": _run_of(pid, table, agents),
                        "orphan": process.ppid <= 1,
                    }
                )
    return found_ones


def _kind(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
    if AGENT in words or KEEPER in words:
        return "agent" if AGENT in words else "keeper"
    return "vllm" if VLLM.search(words) else ""


def _run_of(pid: int, table: dict[int, agent_proc.Proc], agents: dict[int, str]) -> str:
    """Return the run whose agent is the process or above it, else the one that its environment names."""
    above = pid
    for _ in range(64):
        if above in agents:
            return agents[above]
        process = table.get(above)
        if process is None or process.ppid <= 1:
            break
        above = process.ppid
    return agent_site.run_named_by(pid)


def _boot_time() -> float:
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        for line in file:
            if line.startswith("btime "):
                return float(line.split()[1])
    return 0.0


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
