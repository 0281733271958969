"""What ~/.ssh/config says about a host: read by paramiko, or by OpenSSH itself where paramiko cannot."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpupp.errors import CpuppError, ExitCode
from cpupp.plan.cluster import parse_ssh

SSH_PORT = 22
# paramiko follows no Include and needs a package of its own for `Match exec`.
_NEEDS_OPENSSH = re.compile(r"^\s*(include|match)\b", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """How to reach one sshd.

    name: as the user wrote it; host, port, user: what to connect to; identity_files: private keys to try, expanded;
    identities_only: offer no other key of the agent; proxy_jump: hops as `[user@]host[:port]`, first hop first;
    proxy_command: a shell command whose stdin and stdout are the connection, empty without one; key_alias: the name to
    look up in known_hosts; known_hosts: those files, the user's first.
    """

    name: str
    host: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    proxy_jump: tuple[str, ...]
    proxy_command: str
    key_alias: str
    known_hosts: tuple[Path, ...]


def resolve(text: str, config: Path | None = None) -> SshTarget:
    """Resolve `[user@]host[:port]` or an alias by the SSH config (`~/.ssh/config` unless given).

    What is written in `text` wins over the config. Raises CpuppError SSH-CONFIG.
    """
    parsed = parse_ssh(text)
    assert parsed is not None, text
    user, alias, port = parsed
    settings = _settings(alias, user, port, config)
    jump = _first(settings, "proxyjump")
    command = _first(settings, "proxycommand")
    host = _first(settings, "hostname") or alias
    known = _first(settings, "userknownhostsfile") or "~/.ssh/known_hosts ~/.ssh/known_hosts2"
    known += " " + (_first(settings, "globalknownhostsfile") or "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2")
    return SshTarget(
        name=text,
        host=host,
        port=port or int(_first(settings, "port") or SSH_PORT),
        user=user or _first(settings, "user") or getpass.getuser(),
        identity_files=tuple(_expand(name) for name in settings.get("identityfile", ())),
        identities_only=_first(settings, "identitiesonly").lower() in ("yes", "true"),
        proxy_jump=() if jump.lower() in ("", "none") else tuple(jump.replace(" ", "").split(",")),
        proxy_command="" if command.lower() == "none" else command,
        key_alias=_first(settings, "hostkeyalias"),
        known_hosts=tuple(_expand(name) for name in known.split() if name != "none"),
    )


def _first(settings: dict[str, Any], key: str) -> str:
    value = settings.get(key) or ""
    if isinstance(value, list):
        return str(value[0])
    return str(value)


def _expand(name: str) -> Path:
    return Path(name.strip('"').replace("%d", str(Path.home()), 1)).expanduser()


def _settings(alias: str, user: str | None, port: int | None, config: Path | None) -> dict[str, Any]:
    path = config or Path.home() / ".ssh" / "config"
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        if config is not None:
            raise _config_error(f"{config}: no such file") from None
        return {}
    except OSError as error:
        raise _config_error(f"{path}: {error.strerror}") from None
    if _NEEDS_OPENSSH.search(text):
        program = shutil.which("ssh")
        if program is not None:
            return _ask_openssh(program, alias, user, port, config)
    return _ask_paramiko(path, alias)


def _ask_paramiko(path: Path, alias: str) -> dict[str, Any]:
    import paramiko

    try:
        return dict(paramiko.SSHConfig.from_path(str(path)).lookup(alias))
    except (paramiko.SSHException, OSError, ValueError, ImportError) as error:
        raise _config_error(f"{path}: {error}") from None


def _ask_openssh(program: str, alias: str, user: str | None, port: int | None, config: Path | None) -> dict[str, Any]:
    command = [program, "-G"]
    command += ["-F", str(config)] if config else []
    command += ["-l", user] if user else []
    command += ["-p", str(port)] if port else []
    done = subprocess.run([*command, "--", alias], capture_output=True, text=True, check=False, timeout=20)
    if done.returncode != 0:
        raise _config_error(done.stderr.strip() or f"ssh -G {alias} ended with {done.returncode}")
    settings: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key == "identityfile":
            settings.setdefault(key, []).append(value)
        else:
            settings[key] = value
    return settings


def _config_error(message: str) -> CpuppError:
    return CpuppError(
        "SSH-CONFIG", message, hint="`ssh -G HOST` shows what OpenSSH reads", exit_code=ExitCode.UNREACHABLE
    )
