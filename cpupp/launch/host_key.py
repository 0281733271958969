"""Is the server who it should be? Its key or certificate against known_hosts, strict whatever the config says."""

from __future__ import annotations

import base64
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch import known_hosts
from cpupp.launch.host_certificate import HostCertificate, read_certificate, refusal
from cpupp.launch.known_hosts import KnownKey
from cpupp.launch.ssh_config import SshTarget, config_error

_adding = threading.Lock()


def known_keys(target: SshTarget) -> list[list[KnownKey]]:
    """The lines of known_hosts that name the target, one list for each of its names, the best name first."""
    names = known_hosts.host_names(target.host, target.port, target.key_alias)
    return [known_hosts.find_keys(name, target.known_hosts) for name in names]


def check_host_key(
    target: SshTarget, kind: str, blob: bytes, certificate: bytes | None, accept_new: Callable[[str], None] | None
) -> None:
    """Raise CpuppError unless known_hosts vouches for the key that the server proved to have.

    certificate: its blob, when the server showed one for that key; accept_new: None to refuse unknown keys, else they
    are added to the user's known_hosts and this is told about each, in words.
    Errors: SSH-HOST-KEY-CHANGED (changed, revoked), SSH-HOST-KEY (unknown, worthless certificate), SSH-CONFIG.
    """
    found = known_keys(target)
    lines = [line for part in found for line in part]
    _check_revoked(target, kind, blob, lines)
    complaint = ""
    if certificate is not None:
        complaint = _check_certificate(target, certificate, blob, lines)
        if not complaint:
            return
    if any(line.key == blob and not line.marker for line in lines):
        return
    _check_changed(target, kind, blob, found[0])
    if accept_new is None or complaint:
        raise _unknown(target, kind, blob, complaint)
    _accept(target, kind, blob, accept_new)


def _check_revoked(target: SshTarget, kind: str, blob: bytes, lines: Sequence[KnownKey]) -> None:
    revoked = next((line for line in lines if line.marker == "@revoked" and line.key == blob), None)
    place = f"{revoked.file} line {revoked.line}" if revoked else ""
    if target.revoked_keys is not None and _is_in_revoked_file(target.revoked_keys, kind, blob):
        place = str(target.revoked_keys)
    if place:
        raise CpuppError(
            "SSH-HOST-KEY-CHANGED",
            f"{target.name}: its {kind} key {known_hosts.fingerprint(blob)} is revoked by {place}",
            hint="ask the administrator of that host for its new key",
            exit_code=ExitCode.UNREACHABLE,
        )


def _is_in_revoked_file(file: Path, kind: str, blob: bytes) -> bool:
    """Whether RevokedHostKeys (a list of public keys, or a KRL) holds the key. Raises CpuppError when unreadable."""
    try:
        data = file.read_bytes()
        if data.startswith(b"SSHKRL\n\0"):
            return _is_in_krl(file, kind, blob)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise config_error(f"RevokedHostKeys {file}: {error}") from None
    return any(base64.b64encode(blob) in line.split() for line in data.splitlines())


def _is_in_krl(file: Path, kind: str, blob: bytes) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as public:
        public.write(known_hosts.key_line("", kind, blob).strip() + "\n")
        public.flush()
        command = ["ssh-keygen", "-Q", "-f", os.fspath(file), public.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode != 0 and "REVOKED" not in done.stdout:
        raise config_error(f"RevokedHostKeys {file}: {done.stderr.strip() or done.stdout.strip()}")
    return done.returncode != 0


def _check_certificate(target: SshTarget, blob: bytes, key: bytes, lines: Sequence[KnownKey]) -> str:
    """Return what is wrong with the certificate, empty when it proves who the server is."""
    try:
        certificate = read_certificate(blob)
    except ValueError as error:
        return f"its certificate cannot be read ({error})"
    if certificate.key != key:
        return "its certificate is about another key"
    authority = known_hosts.fingerprint(certificate.authority)
    if not any(line.marker == "@cert-authority" and line.key == certificate.authority for line in lines):
        return f"its certificate is signed by {authority}, which is no @cert-authority for it"
    why = _refusal(target, certificate, lines)
    return f"its certificate, signed by {authority}, {why}" if why else ""


def _refusal(target: SshTarget, certificate: HostCertificate, lines: Sequence[KnownKey]) -> str:
    revoked = {line.key for line in lines if line.marker == "@revoked"}
    kind = certificate.authority[4 : 4 + int.from_bytes(certificate.authority[:4], "big")].decode("ascii", "replace")
    if target.revoked_keys is not None and _is_in_revoked_file(target.revoked_keys, kind, certificate.authority):
        revoked.add(certificate.authority)
    return refusal(certificate, target.key_alias or target.host, time.time(), revoked)


def _check_changed(target: SshTarget, kind: str, blob: bytes, lines: Sequence[KnownKey]) -> None:
    changed = next((line for line in lines if line.kind == kind and not line.marker), None)
    if changed is None:
        return
    name = known_hosts.host_names(target.host, target.port, target.key_alias)[0]
    raise CpuppError(
        "SSH-HOST-KEY-CHANGED",
        f"{target.name}: its {kind} key is {known_hosts.fingerprint(blob)}, but {changed.file} line {changed.line} has "
        f"{known_hosts.fingerprint(changed.key)}: either the host was reinstalled, or somebody else answers for it",
        hint=f"when you are sure of the new key, remove that line: ssh-keygen -f {changed.file} -R '{name}'",
        exit_code=ExitCode.UNREACHABLE,
    )


def _unknown(target: SshTarget, kind: str, blob: bytes, complaint: str) -> CpuppError:
    name = known_hosts.host_names(target.host, target.port, target.key_alias)[0]
    file = target.known_hosts_file
    if file is None:
        hint = "the SSH config keeps no known hosts for it (UserKnownHostsFile): name a file there"
    else:
        way = "run again with --accept-new, or " if not complaint else ""
        line = known_hosts.key_line(name, kind, blob)
        hint = f"compare the fingerprint with the host's own, then {way}add this line to {file}: {line}"
    where = file or "any known_hosts file"
    return CpuppError(
        "SSH-HOST-KEY",
        f"{target.name}: its {kind} key {known_hosts.fingerprint(blob)} is not in {where}"
        + (f", and {complaint}" if complaint else ""),
        hint=hint,
        exit_code=ExitCode.UNREACHABLE,
    )


def _accept(target: SshTarget, kind: str, blob: bytes, tell: Callable[[str], None]) -> None:
    """Add the key to the user's known_hosts, unless the host has a key there already. Raises CpuppError."""
    file = target.known_hosts_file
    name = known_hosts.host_names(target.host, target.port, target.key_alias)[0]
    with _adding:
        # Another thread may just have added it. A host that is known by a key of another kind is no new host.
        lines = [line for line in known_keys(target)[0] if not line.marker]
        if any(line.key == blob for line in lines):
            return
        if file is None or lines:
            error = _unknown(target, kind, blob, "")
            if lines:
                error.message += f"; {lines[0].file} line {lines[0].line} knows another key, {lines[0].kind}"
            raise error
        try:
            known_hosts.add_key(file, name, kind, blob, hashed=target.hash_known_hosts)
        except OSError as error:
            refused = _unknown(target, kind, blob, "")
            refused.message += f", and cannot be added: {error.strerror}"
            raise refused from None
    tell(f"{target.name}: added its {kind} key {known_hosts.fingerprint(blob)} to {file}")
