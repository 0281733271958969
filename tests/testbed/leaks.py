"""What tests may not leave behind: processes, test hosts, and files in /dev/shm and /tmp."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from tests.testbed import processes, sweep
from tests.testbed.bed import Bed
from tests.testbed.processes import OrphanWatch, Process

# Set it where other people's programs run too: foreign files cannot be told from ours, so they are only printed.
SHARED_MACHINE = "CPUPP_TEST_SHARED_MACHINE"

# Nobody keeps anything but shared memory in /dev/shm, so there every new name counts. In /tmp only these: cpupp's own,
# vLLM's, and the ZMQ sockets of vLLM, which are named by a bare uuid.
_OURS_IN_TMP = re.compile(r"cpupp.*|vllm.*|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}.*")
# Helpers of the standard library that end with the process they belong to.
_HELPER = re.compile(r"multiprocessing\.(resource_tracker|forkserver)")

ORPHAN_GRACE_S = 10.0


def files() -> set[Path]:
    """The shared memory segments and the temporary files that could be ours."""
    found = set(Path("/dev/shm").iterdir())
    found.update(path for path in Path("/tmp").iterdir() if _OURS_IN_TMP.fullmatch(path.name))
    return found


def new_files(before: set[Path]) -> list[Path]:
    """Files that are there now and were not `before`."""
    return sorted(files() - before)


def own_children() -> list[Process]:
    """Living children of this process, but for the helpers of the standard library."""
    found = [processes.look(pid) for pid in processes.children(os.getpid())]
    return [process for process in found if process and process.alive and not _HELPER.search(process.command)]


def beds_left() -> list[str]:
    """What the beds of this test run have left."""
    return [line for bed_id in Bed.made for line in sweep.leftovers(bed_id)]


def end_orphans(watch: OrphanWatch) -> list[Process]:
    """Give orphans a moment to end by themselves; kill and return those that do not."""
    deadline = time.monotonic() + ORPHAN_GRACE_S
    while (left := watch.orphans()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return left
