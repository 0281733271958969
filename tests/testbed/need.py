"""What a test needs of the machine. Missing, it is a skip with the reason; on CI it is a failure.

A skipped layer looks green. A machine that is there to run the tests must therefore have everything.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

# Debian keeps sshd, ip and tc where the PATH of a plain user does not look.
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
BED_TOOLS = ("ip", "tc", "unshare", "nsenter", "taskset", "sshd", "ssh", "ssh-keygen")


def missing(reason: str) -> None:
    """Skip the test that calls this; on CI, fail it."""
    tell: Callable[[str], None] = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    tell(reason)


def need_root() -> None:
    """This test makes namespaces."""
    if os.geteuid() != 0:
        missing("needs root: test hosts are namespaces")


def need_tool(*names: str) -> None:
    """This test runs these commands."""
    absent = [name for name in names if shutil.which(name, path=SEARCH) is None]
    if absent:
        missing(f"needs {', '.join(absent)}: run `make tools` as root")


def need_hosts() -> None:
    """This test makes test hosts."""
    need_root()
    need_tool(*BED_TOOLS)
