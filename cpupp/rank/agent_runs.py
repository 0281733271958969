"""Every run of this user on this host, whoever launched it: found in the sites and in the kept records.

No register is needed, so none can be lost: a site tells which run it is, and its lock whether anything of it lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, Callable, Iterator  # noqa: UP035  # Python 3.8 cannot subscript those of collections.abc

from . import agent_logs, agent_proc, agent_records, agent_site, agent_steps
from .agent_request import RequestError

ANSWER_S = 3.0  # beyond the grace: what an agent gets before it is killed
KEEPERS_S = 7.0  # what the keepers need to end everything when their agent is gone
STALE_S = 60.0
LONGEST_PIECE = 4 << 20


class Found:
    """One site or kept record. record: its site.json."""

    def __init__(self, path: str, record: dict[str, Any], kept: bool) -> None:
        self.path = path
        self.record = record
        self.kept = kept

    @property
    def is_held(self) -> bool:
        """Whether anything of the run still lives here."""
        return not self.kept and agent_site.is_held(self.path)

    @property
    def is_stale(self) -> bool:
        """Whether it is a site that was left by a machine that stopped: of an earlier boot, and silent since."""
        state = agent_records.read_json(self.path, agent_records.STATE) or {}
        earlier = self.record.get("boot_id") != agent_site.boot_id()
        return earlier and not self.is_held and time.time() - float(state.get("time", 0)) > STALE_S

    def agent(self) -> int:
        """Return the pid of its agent, 0 when that has ended."""
        pid, start = self.record.get("agent"), self.record.get("agent_start")
        process = agent_proc.read_process(pid) if isinstance(pid, int) else None
        return pid if process and not process.ended and process.start == start else 0  # type: ignore[return-value]  # an int


def find(run: str | None = None, host: str | None = None) -> Iterator[Found]:
    """Find the sites and kept records of this user that were made on this machine; those of one run, of one host."""
    hostname = agent_site.identity()["hostname"]
    for place in agent_site.places():
        with contextlib.suppress(OSError):
            sites = [entry.path for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)]
            for path, kept in [(path, False) for path in sites] + [(path, True) for path in agent_records.kept(place)]:
                record = agent_records.read_json(path, agent_records.RECORD)
                if record is None or record.get("hostname") != hostname:
                    continue  # another host of a shared home
                if run in (None, record.get("run")) and host in (None, record.get("host")):
                    yield Found(path, record, kept)


def runs(own_site: str) -> list[dict[str, Any]]:
    """Describe every run here. own_site: the site of the agent that is asked.

    held: something of it lives; ended: it is a kept record, and `result` says how it ended; mine: of this very agent;
    steps: see agent_steps.read_steps.
    """
    return [
        {
            "site": found.path,
            "run": found.record.get("run"),
            "attempt": found.record.get("attempt"),
            "host": found.record.get("host"),
            "record": found.record,
            "state": agent_records.read_json(found.path, agent_records.STATE),
            "steps": agent_steps.read_steps(found.path),
            "result": agent_records.read_json(found.path, agent_records.RESULT) if found.kept else None,
            "held": found.is_held,
            "ended": found.kept,
            "mine": found.path == own_site,
        }
        for found in find()
    ]


def run_stop(request: dict[str, Any], own_site: str, stop_own: Callable[[float], Any]) -> dict[str, Any]:
    """End a run here: its agents are asked, then killed, and their keepers end the rest.

    Takes `grace` + 10 s at most. Returns how many sites there were (`found`), those that something still holds
    (`stuck`), and the folders and segments of the run that are still there (`remaining`). May be repeated.
    """
    run, grace_s = str(request["run"]), float(request.get("grace", 5.0))
    sites = [found for found in find(run, request.get("host")) if not found.kept]
    for found in sites:
        with contextlib.suppress(OSError):
            order = {"grace": grace_s, "time": time.time()}
            agent_records.write_json(os.path.join(found.path, agent_records.STOP), order)
        if found.path != own_site:
            agent_proc.send_signal(filter(None, [found.agent()]), signal.SIGTERM)
    if any(found.path == own_site for found in sites):
        stop_own(grace_s)
    others = [found for found in sites if found.path != own_site]
    if not _wait_free(others, grace_s + ANSWER_S):
        for found in others:
            if found.is_held:
                agent_proc.send_signal(filter(None, [found.agent()]), signal.SIGKILL)
        _wait_free(others, KEEPERS_S)
    for found in others:
        with contextlib.suppress(OSError):
            if not found.is_held and os.path.isdir(found.path):
                agent_site.remove_site(found.path)
    prefix = f"cpupp-{run}-"
    if not any(found.is_held for found in find(run)):
        agent_proc.remove_segments((), prefix)
    return {
        "found": len(sites),
        "stuck": sorted(found.path for found in sites if found.is_held),
        "remaining": sorted(found.path for found in sites if os.path.isdir(found.path))
        + sorted(f"{agent_proc.SHM}/{name}" for name in agent_proc.shm_files() if name.startswith(prefix)),
    }


def _wait_free(sites: list[Found], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while any(found.is_held for found in sites):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def run_log(request: dict[str, Any]) -> dict[str, Any]:
    """Read a piece of a node's output, of a run that lives or of a kept record.

    offset: counts all bytes that the node ever wrote, negative from the end; size: bytes at most. In the answer,
    `offset` is where to read on, `size` where the output ends now. What came before `begin` was given to a launcher.
    """
    run, node = str(request["run"]), int(request["node"])
    size = min(int(request.get("size", 65536)), LONGEST_PIECE)
    several = sorted(find(run, request.get("host")), key=lambda found: -int(found.record.get("attempt", 0)))
    for found in several:
        state = agent_records.read_json(found.path, agent_records.STATE) or {}
        begin = next((entry["log_begin"] for entry in state.get("nodes", ()) if entry["node"] == node), 0)
        log = os.path.join(found.path, "logs", f"node{node}.log")
        with contextlib.suppress(FileNotFoundError):
            piece = agent_logs.read_log(log, int(request.get("offset", 0)), size, begin)
            return {
                "data": piece.data.decode("utf-8", "surrogateescape"),
                "offset": piece.offset,
                "size": piece.size,
                "begin": begin,
                "ended": found.kept or not found.is_held,
            }
    raise RequestError("RUN-UNKNOWN", f"no output of vLLM node {node} of run {run} is kept here")


def run_forget(request: dict[str, Any]) -> dict[str, Any]:
    """Remove the kept records of an ended run, and sites of it that were left by an earlier boot of this machine."""
    forgotten = []
    for found in find(str(request["run"]), request.get("host")):
        if found.kept:
            agent_records.drop(found.path)
        elif found.is_stale:
            agent_site.remove_tree(found.path)
        else:
            continue
        forgotten.append(found.path)
    return {"forgotten": forgotten}
