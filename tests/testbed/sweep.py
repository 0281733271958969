"""Find and remove what a test bed left on this machine, whoever made it and however it ended.

Standard library only and no import of ours, because it also runs as the janitor of a bed: a process of its own that
waits until its standard input ends and then removes the bed. The pipe ends when the tests close it, and also when they
are killed, so there is one way to clean up, and no way around it.

    python tests/testbed/sweep.py              # list what dead test runs left
    python tests/testbed/sweep.py --remove     # and remove it
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FOLDERS = Path("/var/tmp")
FOLDER_PREFIX = "cpupp-bed-"
BRIDGE_PREFIX = "cb-"
VETH_PREFIX = "cv-"
OWNER_FILE = "owner"

_LINK = re.compile(rf"(?:{BRIDGE_PREFIX}|{VETH_PREFIX})([a-z0-9]+)(?:-\d+)?")
_FOLDER_IN_MOUNTS = re.compile(re.escape(FOLDER_PREFIX) + r"([a-z0-9]+)")
KILL_TIMEOUT_S = 30.0


def bed_folder(bed_id: str) -> Path:
    """Folder with the keys, configs and logs of the bed."""
    return FOLDERS / f"{FOLDER_PREFIX}{bed_id}"


def bed_processes() -> dict[int, str]:
    """The bed id of every process that lives in a test host, by pid.

    A host's mount namespace holds bind mounts of files in the bed's folder, which no other namespace has. That finds
    processes that changed their title, their environment, their session and their parent.
    """
    found: dict[int, str] = {}
    known: dict[str, str | None] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208 (names only, and many)
        # A process that ends while we look is simply not there.
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")  # noqa: PTH115
            if namespace not in known:
                match = _FOLDER_IN_MOUNTS.search(Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8"))
                known[namespace] = match.group(1) if match else None
            if bed_id := known[namespace]:
                found[pid] = bed_id
    return found


def bed_links() -> Iterator[tuple[str, str]]:
    """Every (bed id, link name) of bridges and veths of test beds in this network namespace."""
    for link in Path("/sys/class/net").iterdir():
        if match := _LINK.fullmatch(link.name):
            yield match.group(1), link.name


def bed_folders() -> Iterator[tuple[str, Path]]:
    """Every (bed id, folder) of test beds."""
    for folder in FOLDERS.glob(f"{FOLDER_PREFIX}*"):
        yield folder.name.removeprefix(FOLDER_PREFIX), folder


def leftovers(bed_id: str | None = None) -> list[str]:
    """What is there of one bed, or of all beds: processes, links and folders, one line each."""
    lines = [f"bed {owner}: process {pid}: {_command(pid)}" for pid, owner in bed_processes().items()]
    lines += [f"bed {owner}: link {link}" for owner, link in bed_links()]
    lines += [f"bed {owner}: folder {folder}" for owner, folder in bed_folders()]
    return sorted(line for line in lines if bed_id is None or line.startswith(f"bed {bed_id}:"))


def sweep(bed_id: str) -> None:
    """Kill every process of the bed's hosts, then remove its links and its folder."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while victims := [pid for pid, owner in bed_processes().items() if owner == bed_id]:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"bed {bed_id}: processes {victims} do not end")
        time.sleep(0.02)
    for owner, link in list(bed_links()):
        if owner == bed_id:
            # A veth goes by itself, and at a time of its own, when the namespace of its other end does.
            subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True)
    shutil.rmtree(bed_folder(bed_id), ignore_errors=True)


def dead_beds() -> list[str]:
    """Ids of the beds whose test run is gone."""
    seen = {*bed_processes().values(), *(bed_id for bed_id, _ in [*bed_links(), *bed_folders()])}
    return sorted(bed_id for bed_id in seen if not _owner_lives(bed_id))


def _owner_lives(bed_id: str) -> bool:
    try:
        pid, started = (bed_folder(bed_id) / OWNER_FILE).read_text(encoding="utf-8").split()
        return start_time(int(pid)) == int(started)
    except (OSError, ValueError):
        return False


def start_time(pid: int) -> int:
    """When process `pid` started, in clock ticks since boot: with the pid, its identity."""
    # The name in parentheses may itself hold blanks and parentheses; the fields after the last one do not.
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "(ended)"


def main(arguments: list[str]) -> int:
    """`--janitor ID` waits and removes one bed; otherwise list, and with `--remove` remove, the dead beds."""
    if arguments[:1] == ["--janitor"]:
        sys.stdin.buffer.read()
        sweep(arguments[1])
        return 0
    for bed_id in dead_beds():
        print("\n".join(leftovers(bed_id)))
        if "--remove" in arguments:
            sweep(bed_id)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
