"""known_hosts, strict: a host's key is known, unknown, changed or revoked. Nothing is ever written."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


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


def algorithms_for(keys: Sequence[KnownKey], offered: Sequence[str]) -> list[str]:
    """Order the host key algorithms so that a server with several keys shows one that we know."""
    known: list[str] = []
    for key in keys:
        if not key.marker:
            known += ["rsa-sha2-512", "rsa-sha2-256"] if key.kind == "ssh-rsa" else [key.kind]
    first = [name for name in offered if name in known]
    return first + [name for name in offered if name not in first]
