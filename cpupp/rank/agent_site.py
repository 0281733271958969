"""The site folder: where one attempt of one run keeps its files on this host, and how it disappears again.

Every process of cpupp that may still need the folder holds a shared lock on its file `alive`; whoever finds that
nobody else holds one removes the folder. A folder left by a crash of all of them is removed by the next agent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from typing import Any

from . import agent_proc, agent_records

ALIVE = "alive"
RECORD = agent_records.RECORD
FOLDERS = ("tmp", "rpc", "logs")

# `<site>/rpc/<uuid>` is the path of a unix socket, of which the kernel takes 107 bytes.
LONGEST_SITE = 107 - len("/rpc/") - 36 - 1


class SiteError(Exception):
    """No place on this host can hold the site folder; the text lists each place with its reason."""


def boot_id() -> str:
    """Return the kernel's boot id, empty when it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def places() -> list[str]:
    """Return the folders that may hold sites, best first."""
    uid = os.getuid()
    home = os.path.expanduser("~")
    found = [f"/var/tmp/cpupp-{uid}", f"/tmp/cpupp-{uid}"]
    return [os.path.join(home, ".cache", "cpupp"), *found] if home.startswith("/") else found


def run_named_by(pid: int) -> str:
    """Return the run whose site the environment of a process names, as that of a rank does; empty for others."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            name, _, value = entry.decode("utf-8", "replace").partition("=")
            if name == "PYTHONPATH" and os.path.dirname(value) in places():
                record = agent_records.read_json(value, RECORD)
                return str((record or {}).get("run", ""))
    return ""


def hold(site: str) -> int:
    """Take a shared lock on the site for as long as the returned descriptor is open."""
    descriptor = os.open(os.path.join(site, ALIVE), os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def make_site(
    run: str, attempt: int, host: str, files: dict[str, str], told: dict[str, Any] | None = None
) -> tuple[str, int]:
    """Create the site folder (0700) with its files; return its path and the descriptor that holds it.

    told: what the launcher wants to be found in the site's record, under the key `record`.
    A place that allows no execution (torch maps compiled code from TMPDIR) is used only when there is no other.
    Raises SiteError when every place fails.
    """
    own = agent_proc.read_process(os.getpid())
    agent = {"agent": os.getpid(), "agent_start": own.start if own else 0}
    record = {"run": run, "attempt": attempt, "host": host, **agent, **identity(), "record": told or {}}
    reasons = []
    for executable in (True, False):
        for base in places():
            try:
                if _runs_code(base) == executable:
                    return _make_in(base, host, record, files)
            except (OSError, SiteError) as error:
                reasons.append(f"{base}: {error}")
    raise SiteError("no place for the site folder: " + "; ".join(reasons))


def _make_in(base: str, host: str, record: dict[str, Any], files: dict[str, str]) -> tuple[str, int]:
    # A home may be shared by all hosts, and hosts may share a name: only chance keeps the folders apart.
    site = os.path.join(base, f"{host[:10]}-{os.urandom(5).hex()}")
    if len(os.fsencode(site)) > LONGEST_SITE:
        raise SiteError(f"the path is longer than {LONGEST_SITE} bytes, too long for sockets")
    held = -1
    try:
        _own_site(base, site)
        os.close(os.open(os.path.join(site, ALIVE), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        held = hold(site)
        for name in FOLDERS:
            os.mkdir(os.path.join(site, name), 0o700)
        for relative, text in files.items():
            _write(site, relative, text)
        # Last: a folder without its record is still being made, and nobody sweeps it away.
        _write(site, RECORD, json.dumps(record, sort_keys=True))
    except (OSError, SiteError):
        if held >= 0:
            os.close(held)
        remove_tree(site)
        _leave(base)
        raise
    return site, held


def _own_site(base: str, site: str) -> None:
    for _ in range(5):  # whoever removes the last site of a place removes the place too
        with contextlib.suppress(FileNotFoundError):
            _own_folder(base)
            os.mkdir(site, 0o700)
            return
    raise SiteError("is removed again and again")


def _leave(base: str) -> None:
    """Remove the place when no site and no record is in it."""
    with contextlib.suppress(OSError):
        os.rmdir(base)


def _own_folder(base: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.makedirs(base, 0o700)
    state = os.lstat(base)
    if not stat.S_ISDIR(state.st_mode):
        raise SiteError("is not a folder")
    if state.st_uid != os.getuid():
        raise SiteError(f"belongs to uid {state.st_uid}")
    if state.st_mode & 0o022:
        os.chmod(base, 0o700)


def _runs_code(base: str) -> bool:
    path = base
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return not os.statvfs(path).f_flag & os.ST_NOEXEC


def _write(site: str, relative: str, text: str) -> None:
    parts = relative.split("/")
    if relative.startswith("/") or ".." in parts or "" in parts:
        raise SiteError(f"file name {relative!r} leaves the site folder")
    folder = site
    for part in parts[:-1]:
        folder = os.path.join(folder, part)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    descriptor = os.open(os.path.join(site, relative), os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def remove_site(site: str) -> bool:
    """Remove the site unless somebody still holds it. Returns whether it is gone.

    The caller must have closed its own descriptor. Several callers at the same moment are safe: the last one that let
    go gets the exclusive lock. A detached run leaves its record.
    """
    try:
        descriptor = os.open(os.path.join(site, ALIVE), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return not os.path.exists(site)
    try:
        if not _lock_alone(descriptor):
            return False
        if agent_records.is_detached(site):
            agent_records.keep(site)
        remove_tree(site)
    finally:
        os.close(descriptor)
    _leave(os.path.dirname(site))
    return True


def _lock_alone(descriptor: int) -> bool:
    for delay_s in (0.02, 0.05, 0.0):  # somebody may just ask whether it is held
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            time.sleep(delay_s)
        else:
            return True
    return False


def is_held(site: str) -> bool:
    """Whether a process of cpupp still needs the site."""
    try:
        descriptor = os.open(os.path.join(site, ALIVE), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_tree(path: str) -> None:
    """Remove a folder and all below it; what cannot be removed is left without a word."""
    shutil.rmtree(path, ignore_errors=True)
    if os.path.isdir(path):
        # A rank can leave folders without write permission behind.
        for folder, _, _ in os.walk(path):
            with contextlib.suppress(OSError):
                os.chmod(folder, 0o700)
        shutil.rmtree(path, ignore_errors=True)


def sweep_sites() -> list[str]:
    """Remove the sites of this user that crashed agents of this very host left behind; return their paths."""
    swept = []
    for base in places():
        agent_records.sweep(base, time.time())
        with contextlib.suppress(OSError):
            for entry in os.scandir(base):
                if entry.is_dir(follow_symlinks=False) and _is_dead(entry.path) and remove_site(entry.path):
                    swept.append(entry.path)
    return swept


def _is_dead(site: str) -> bool:
    # Locks may not reach over NFS, so another host's folder in a shared home is never judged.
    record = agent_records.read_json(site, RECORD)
    return record is not None and all(record.get(key) == value for key, value in identity().items())


def identity() -> dict[str, str]:
    """Return what tells this machine, since it was started, from others that may share a home with it."""
    return {"boot_id": boot_id(), "hostname": socket.gethostname()}
