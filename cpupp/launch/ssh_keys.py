"""The private keys to offer to a server, in an order that works with servers that hang up after a few."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpupp.launch.ssh_config import SshTarget

if TYPE_CHECKING:
    import paramiko

DEFAULT_NAMES = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key that can sign, and where it comes from."""

    private: paramiko.PKey
    source: str


class Identities(Iterator[Key]):
    """The keys of a target, each once: those that the config names first, then the agent's, then the default files.

    The keys that the config names go first because servers count refused keys (MaxAuthTries, paramiko #1390).
    """

    def __init__(self, target: SshTarget) -> None:
        self.offered: list[str] = []
        self.skipped: list[str] = []
        self._agent: paramiko.Agent | None = None
        self._keys = self._find(target)

    def __next__(self) -> Key:
        key = next(self._keys)
        self.offered.append(key.source)
        return key

    def close(self) -> None:
        """Close the connection to the user's agent, whose keys cannot sign any more then."""
        if self._agent is not None:
            self._agent.close()

    def describe(self) -> str:
        """Return what was offered and what could not be, for messages."""
        parts = [f"offered: {', '.join(self.offered) or 'none'}", *self.skipped]
        return "; ".join(parts)

    def _find(self, target: SshTarget) -> Iterator[Key]:
        seen: set[bytes] = set()
        for key in self._candidates(target):
            blob = key.private.asbytes()
            if blob not in seen:
                seen.add(blob)
                yield key

    def _candidates(self, target: SshTarget) -> Iterator[Key]:
        held = self._agent_keys()
        explicit = [path for path in target.identity_files if path.exists() or _public(path)]
        for path in explicit:
            yield from self._from_file(path, held)
        if not target.identities_only:
            yield from held.values()
        folder = Path.home() / ".ssh"
        for name in DEFAULT_NAMES if not explicit else ():
            if (folder / name).exists():
                yield from self._from_file(folder / name, held)

    def _agent_keys(self) -> dict[bytes, Key]:
        import paramiko

        try:
            self._agent = paramiko.Agent()
            keys = self._agent.get_keys()
        except (paramiko.SSHException, OSError):
            return {}
        return {key.asbytes(): Key(private=key, source=f"agent key {key.fingerprint}") for key in keys}

    def _from_file(self, path: Path, held: dict[bytes, Key]) -> Iterator[Key]:
        """The agent's copy of the key when it has one, else the file's."""
        import paramiko

        public = _public(path)
        if public in held:
            yield held[public]
            return
        try:
            yield Key(private=paramiko.PKey.from_path(path), source=str(path))
        except paramiko.PasswordRequiredException:
            self.skipped.append(f"{path} needs its passphrase: ssh-add it")
        except (paramiko.SSHException, OSError, ValueError, TypeError) as error:
            # Encrypted OpenSSH keys end up as plain ValueError or TypeError in some versions of cryptography.
            words = (
                "needs its passphrase: ssh-add it" if "password" in str(error).lower() else f"cannot be read: {error}"
            )
            self.skipped.append(f"{path} {words}")


def _public(path: Path) -> bytes:
    """The public key beside a private one, empty when there is none."""
    try:
        return base64.b64decode(Path(f"{path}.pub").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return b""
