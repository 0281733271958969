"""Log in with a key. No password, ever."""

from __future__ import annotations

import time

import paramiko

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.ssh_config import SshTarget
from cpupp.launch.ssh_dial import Deadline
from cpupp.launch.ssh_keys import Identities, Key


def log_in(transport: paramiko.Transport, target: SshTarget, identities: Identities, deadline: Deadline) -> bool:
    """Offer keys until one is taken. Returns False when the server hung up and keys are left.

    `identities` remembers across connections which keys were offered. The time that somebody needs to type a passphrase
    does not count. Raises CpuppError SSH-AUTH.
    """
    while True:
        before = time.monotonic()
        key = next(identities, None)
        deadline.put_off(time.monotonic() - before)
        if key is None:
            raise no_login(target, f"no key was accepted for user {target.user} ({identities.describe()})")
        if not transport.is_active():  # it hung up before it saw the key
            identities.put_back(key)
            return False
        transport.auth_timeout = deadline.remaining()
        taken = _offer(transport, target, key)
        if taken is not None:
            return taken


def _offer(transport: paramiko.Transport, target: SshTarget, key: Key) -> bool | None:
    """Return whether the key opened the door, None to try the next one here."""
    try:
        more = transport.auth_publickey(target.user, key.private)
    except paramiko.BadAuthenticationType as error:
        raise no_login(target, f"the server takes no keys, only {', '.join(error.allowed_types)}") from None
    except paramiko.AuthenticationException:
        return None if transport.is_active() else False
    except (paramiko.SSHException, OSError, EOFError):
        # Also an agent that refuses to sign, or that went away: the next key may be a file.
        return None if transport.is_active() else False
    if more:
        raise no_login(target, f"after the key the server also wants {', '.join(more)}")
    return True


def no_login(target: SshTarget, words: str) -> CpuppError:
    """The error of a server that let nobody in."""
    return CpuppError(
        "SSH-AUTH",
        f"{target.name}: {words}",
        hint=f"`ssh -p {target.port} {target.user}@{target.host}` must work without a password; "
        "set User and IdentityFile in ~/.ssh/config, or ssh-add the key",
        exit_code=ExitCode.UNREACHABLE,
    )
