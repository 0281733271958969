"""The private keys to offer to a server, in an order that works with servers that hang up after a few."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpupp.launch.passphrase import Unlocked
from cpupp.launch.ssh_config import SshTarget

if TYPE_CHECKING:
    import paramiko

_MAGIC = b"openssh-key-v1\0"
_unlocked: Unlocked[paramiko.PKey] = Unlocked()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key that can sign, with a certificate or without, and where it comes from. blob: what is offered."""

    private: paramiko.PKey
    source: str
    blob: bytes


class Identities(Iterator[Key]):
    """The keys of a target, each once: those that the config names, the agent's, the default files, the locked ones.

    The keys that the config names go first because servers count refused keys (MaxAuthTries, paramiko #1390). A key
    with a passphrase that the agent does not hold goes last, so that nobody is asked where another key opens the door.
    """

    def __init__(self, target: SshTarget) -> None:
        self.offered: list[str] = []
        self.skipped: list[str] = []
        self._agent: paramiko.agent.AgentSSH | None = None
        self._certificates = [blob for path in target.certificate_files if (blob := _public(path))]
        self._locked: list[Path] = []
        self._again: list[Key] = []
        self._keys = self._find(target)

    def __next__(self) -> Key:
        if self._again:
            return self._again.pop()
        key = next(self._keys)
        self.offered.append(key.source)
        return key

    def put_back(self, key: Key) -> None:
        """The server has not seen this key: it comes again."""
        self._again.append(key)

    def close(self) -> None:
        """Close the connection to the user's agent, whose keys cannot sign any more then."""
        if self._agent is not None:
            with contextlib.suppress(OSError):
                self._agent._close()  # type: ignore[attr-defined]

    def describe(self) -> str:
        """Return what was offered and what could not be, for messages."""
        parts = [f"offered: {', '.join(self.offered) or 'none'}", *self.skipped]
        return "; ".join(parts)

    def _find(self, target: SshTarget) -> Iterator[Key]:
        seen: set[bytes] = set()
        for key in self._candidates(target):
            if key.blob not in seen:
                seen.add(key.blob)
                yield key

    def _candidates(self, target: SshTarget) -> Iterator[Key]:
        held = self._agent_keys(target.identity_agent)
        files = [path for path in target.identity_files if path.exists() or _public(_beside(path, ".pub"))]
        if target.keys_named:
            yield from self._from_files(files, held)
        if not target.identities_only:
            for key in held.values():
                yield from self._with_certificates(key, ())
        if not target.keys_named:
            yield from self._from_files(files, held)
        for path in self._locked:
            yield from self._unlock(path)

    def _agent_keys(self, place: str | None) -> dict[bytes, Key]:
        import paramiko

        try:
            if place is None:
                self._agent = paramiko.Agent()
            elif place:
                self._agent = _agent_at(place)
            keys = self._agent.get_keys() if self._agent is not None else ()
        except (paramiko.SSHException, OSError):
            return {}
        return {key.blob: _agent_key(key) for key in keys}

    def _from_files(self, paths: Iterable[Path], held: dict[bytes, Key]) -> Iterator[Key]:
        for path in paths:
            yield from self._from_file(path, held)

    def _from_file(self, path: Path, held: dict[bytes, Key]) -> Iterator[Key]:
        """The agent's copy of the key when it has one, else the file's."""
        public = _public(_beside(path, ".pub")) or _public_half(path)
        beside = _public(_beside(path, "-cert.pub"))
        if beside in held:
            yield held[beside]
        if public in held:
            yield from self._with_certificates(held[public], (beside,))
            return
        loaded = _load(path, None)
        if loaded is None:
            self._locked.append(path)
        elif isinstance(loaded, str):
            self.skipped.append(f"{path} cannot be read: {loaded}")
        else:
            key = Key(private=loaded, source=str(path), blob=loaded.asbytes())
            yield from self._with_certificates(key, (beside,))

    def _unlock(self, path: Path) -> Iterator[Key]:
        def unlock(words: str) -> paramiko.PKey:
            loaded = _load(path, words)
            if loaded is None or isinstance(loaded, str):
                raise ValueError(loaded)
            return loaded

        got = _unlocked.get(path, unlock)
        if isinstance(got, str):
            self.skipped.append(got)
        else:
            key = Key(private=got, source=str(path), blob=got.asbytes())
            yield from self._with_certificates(key, (_public(_beside(path, "-cert.pub")),))

    def _with_certificates(self, key: Key, beside: Iterable[bytes]) -> Iterator[Key]:
        """The key with each certificate that there is for it, then the key alone."""
        import paramiko

        for blob in (*beside, *self._certificates):
            kind = _kind(blob)
            # A certificate has the numbers of its key behind a nonce.
            if blob and kind.startswith(_kind(key.blob)) and kind != _kind(key.blob) and _numbers(key.blob) in blob:
                signer = copy.copy(key.private)
                signer.load_certificate(paramiko.Message(blob))
                yield Key(private=signer, source=f"{key.source} with a certificate", blob=blob)
        yield key


def _load(path: Path, words: str | None) -> paramiko.PKey | str | None:
    """Return the key in the file, None when it needs a passphrase (or another), else what is wrong."""
    import paramiko

    kind = _kind(_public_half(path)).decode("ascii", "replace")
    classes: list[Any] = [paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey]
    fitting = [cls for cls in classes if not kind or kind in cls.identifiers()]
    what = f"{kind} keys are for the agent" if not fitting else ""
    for cls in fitting:
        try:
            key: paramiko.PKey = cls.from_private_key(io.StringIO(path.read_text(encoding="ascii")), words)
            return key
        except paramiko.PasswordRequiredException:
            return None
        except (paramiko.SSHException, OSError, ValueError, TypeError) as error:
            # Encrypted OpenSSH keys end up as plain ValueError or TypeError in some versions of cryptography.
            if "password" in str(error).lower():
                return None
            what = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
    return what


def _agent_at(place: str) -> paramiko.agent.AgentSSH:
    from paramiko.agent import AgentSSH

    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30.0)
    agent = AgentSSH()
    try:
        connection.connect(place)
        agent._connect(connection)  # type: ignore[attr-defined]
    except BaseException:
        connection.close()
        raise
    return agent


def _agent_key(key: paramiko.AgentKey) -> Key:
    if _kind(key.blob).endswith(b"-cert-v01@openssh.com"):
        # Without this, paramiko asks the agent to sign with the plain key, which it may not hold by itself.
        key.asbytes = lambda: key.blob  # type: ignore[method-assign]
    return Key(private=key, source=f"agent key {key.comment or key.get_name()}", blob=key.blob)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _public(path: Path) -> bytes:
    """The public key or certificate in a file of one line, empty when there is none."""
    try:
        return base64.b64decode(path.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return b""


def _public_half(path: Path) -> bytes:
    """The public key in a private one of OpenSSH's format, which a passphrase does not hide; empty in other formats."""
    try:
        lines = path.read_text(encoding="ascii").split("-----")
        data = base64.b64decode(lines[2])
        if "OPENSSH PRIVATE KEY" not in lines[1] or not data.startswith(_MAGIC):
            return b""
        place = len(_MAGIC)
        for _ in range(3):  # cipher, key derivation, its options
            place += 4 + int(struct.unpack_from(">I", data, place)[0])
        (length,) = struct.unpack_from(">I", data, place + 4)
        return data[place + 8 : place + 8 + length]
    except (OSError, ValueError, IndexError, struct.error):
        return b""


def _kind(blob: bytes) -> bytes:
    return blob[4 : 4 + int.from_bytes(blob[:4], "big")]


def _numbers(blob: bytes) -> bytes:
    return blob[4 + len(_kind(blob)) :]
