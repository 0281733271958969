"""`run.json`: what commands of other days need to know of a run: who launched it, where it runs, its state."""

from __future__ import annotations

import os
import pwd
import socket
import time
from collections.abc import Sequence
from typing import Any

from cpupp.launch.api import public_url
from cpupp.launch.records import RunRecord
from cpupp.launch.runs import boot_id, start_ticks
from cpupp.plan.plan import Plan
from cpupp.plan.runstate import RunState

RUN_FILE = "run.json"


class RunFile:
    """The run's `run.json`, rewritten atomically whenever something in it changes."""

    def __init__(self, record: RunRecord, plan: Plan, *, run: str, file: str) -> None:
        """Write it for the first time. file: the cluster file's absolute path, empty when there is none.

        Raises CpuppError STATE-FOLDER: a run that no later command can find must not begin.
        """
        self._record = record
        self.data: dict[str, Any] = {
            "run": run,
            "name": plan.name,
            "file": file,
            "started": time.time(),
            "launcher": launcher_identity(),
            "detached": False,
            "hosts": [{"name": host.name, "ssh": host.ssh, "local": host.local} for host in plan.hosts],
            "attempt": 1,
            "status": RunState.STARTING,
            "failure": None,
            "url": public_url(plan),
            "served_name": plan.served_name,
        }
        record.write(RUN_FILE, self.data, must=True)

    def update(self, *, must: bool = False, **changes: Any) -> None:
        """Set values; the file is written when that changes any. Raises CpuppError STATE-FOLDER where it must be."""
        new = {**self.data, **changes}
        if new != self.data:
            self._record.write(RUN_FILE, new, must=must)
            self.data = new


def launcher_identity() -> dict[str, Any]:
    """This process, so that a later command can tell whether it still runs.

    pid; start: clock ticks since boot at which it started; boot_id, hostname, user.
    """
    return {
        "pid": os.getpid(),
        "start": start_ticks(os.getpid()) or 0,
        "boot_id": boot_id(),
        "hostname": socket.gethostname(),
        "user": _user(),
    }


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def site_record(plan: Plan, host: str, *, created: float, api: str, names: Sequence[str]) -> dict[str, Any]:
    """What the host keeps of the run beside its site folder, for those who ask the host and have no record.

    api: the API's base URL as the head itself reaches it, empty elsewhere; `url` is that of its clients.
    """
    me = launcher_identity()
    return {
        "cluster": plan.name,
        "launcher": f"{me['user']}@{me['hostname']}",
        "created": created,
        "head": host == plan.head,
        "num_nodes": len(plan.nodes),
        "hosts": list(names),
        "api": api if host == plan.head else "",
        "url": public_url(plan),
        "served_name": plan.served_name,
    }
