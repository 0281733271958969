"""known_hosts: which lines name a host, and one line more for a key that is accepted."""

from __future__ import annotations

import base64
import binascii
import errno
import fcntl
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpupp.launch.host_certificate import SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One line of a known_hosts file that names our host; marker is `@revoked`, `@cert-authority` or empty."""

    file: Path
    line: int
    marker: str
    kind: str
    key: bytes


def host_names(host: str, port: int, alias: str) -> tuple[str, ...]:
    """Names to look up, best first: the alias alone when there is one, else `[host]:port` and the bare host.

    OpenSSH too accepts the entry without a port for a server on another port, but only when its key matches.
    """
    if alias:
        return (alias.lower(),)
    host = host.lower()
    return (host,) if port == 22 else (f"[{host}]:{port}", host)


def find_keys(name: str, files: Iterable[Path]) -> list[KnownKey]:
    """Return the lines that name `name`, in the files' order. A missing or unreadable file holds none."""
    found = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            continue
        found += [key for names, key in _lines(path, text) if _matches(name, names)]
    return found


def _lines(path: Path, text: str) -> Iterator[tuple[str, KnownKey]]:
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        try:
            key = base64.b64decode(fields[2], validate=True)
        except binascii.Error:
            continue
        yield fields[0], KnownKey(file=path, line=number, marker=marker, kind=fields[1], key=key)


def _matches(name: str, names: str) -> bool:
    if names.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in names[3:].split("|"))
        except (ValueError, binascii.Error):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    matched = False
    for pattern in names.lower().split(","):
        negative = pattern.startswith("!")
        if _glob(name, pattern[negative:]):
            if negative:
                return False
            matched = True
    return matched


def _glob(name: str, pattern: str) -> bool:
    # In known_hosts only * and ? are special; brackets belong to `[host]:port`.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def fingerprint(key: bytes) -> str:
    """Return a key's fingerprint as OpenSSH prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def key_line(name: str, kind: str, key: bytes) -> str:
    """Return the line that makes the key known."""
    return f"{name} {kind} {base64.b64encode(key).decode()}"


def add_key(file: Path, name: str, kind: str, key: bytes, *, hashed: bool) -> None:
    """Append the line that makes the key known; a new file and folder are the user's alone.

    One write of one whole line at the end: another SSH client may append at the same time, and a symbolic link stays
    one. A write that fails half-way is taken back. Raises OSError.
    """
    line = key_line(hashed_name(name) if hashed else name, kind, key).encode("ascii") + b"\n"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) != len(line):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    finally:
        os.close(descriptor)


def hashed_name(name: str) -> str:
    """Return the name as HashKnownHosts writes it."""
    salt = os.urandom(20)
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def algorithms_for(keys: Sequence[KnownKey], offered: Sequence[str]) -> list[str]:
    """Order the host key algorithms so that a server with several keys shows one that we know.

    Certificates are asked for where an authority is known, before anything else, and nowhere else.
    """
    plain = [name for name in offered if not name.endswith(SUFFIX)]
    known: list[str] = []
    for key in keys:
        if not key.marker:
            known += ["rsa-sha2-512", "rsa-sha2-256"] if key.kind == "ssh-rsa" else [key.kind]
    first = [name for name in plain if name in known]
    if any(key.marker == "@cert-authority" for key in keys):
        first = [name + SUFFIX for name in plain] + first
    return first + [name for name in plain if name not in first]
