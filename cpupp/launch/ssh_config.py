"""What the SSH config says about a host: OpenSSH itself is asked (`ssh -G`); without it, paramiko reads the file."""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.ssh_tokens import expand, expand_path, make_tokens
from cpupp.plan.cluster import parse_ssh

SSH_PORT = 22
MAX_HOPS = 8
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_LISTS = ("identityfile", "certificatefile")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """How to reach one sshd.

    name: as the user wrote it; host, port, user: what to connect to. identity_files: private keys to try; keys_named:
    whether the config names them, else they are the default ones; certificate_files: certificates that do not lie
    beside their keys; identities_only: offer no other key of the agent; identity_agent: socket of the agent, None for
    that of the environment, empty for no agent. proxy_jump: hops as `[user@]host[:port]`, first hop first;
    proxy_command: a shell command whose stdin and stdout are the connection, empty without one; proxy_kind: the same
    for all hosts that go the same way. key_alias: the name to look up in known_hosts; known_hosts: those files;
    known_hosts_file: where a new key belongs, None when the config keeps none; hash_known_hosts: hide the names of new
    keys; revoked_keys: a file of revoked keys. address_family: `any`, `inet` or `inet6`; bind_address: own address,
    empty for any; connect_timeout_s, alive_interval_s: 0 when the config has none.
    """

    name: str
    host: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    keys_named: bool
    certificate_files: tuple[Path, ...]
    identities_only: bool
    identity_agent: str | None
    proxy_jump: tuple[str, ...]
    proxy_command: str
    proxy_kind: str
    key_alias: str
    known_hosts: tuple[Path, ...]
    known_hosts_file: Path | None
    hash_known_hosts: bool
    revoked_keys: Path | None
    address_family: str
    bind_address: str
    connect_timeout_s: float
    alive_interval_s: int


def route(text: str, config: Path | None = None) -> tuple[SshTarget, ...]:
    """Resolve a target and all jumps on the way to it; the first is connected to from here, the last is the target.

    Raises CpuppError SSH-CONFIG.
    """
    way = [resolve(text, config)]
    while way[0].proxy_jump:
        *before, name = way[0].proxy_jump
        hop = resolve(name, config)
        if before:
            hop = replace(hop, proxy_jump=tuple(before), proxy_command="", proxy_kind="")
        way.insert(0, hop)
        if len(way) > MAX_HOPS + 1:
            raise config_error(f"{text}: more than {MAX_HOPS} jumps: the SSH config runs in a circle")
    return tuple(way)


def resolve(text: str, config: Path | None = None) -> SshTarget:
    """Resolve `[user@]host[:port]` or an alias by the SSH config (the user's and the system's, unless given).

    What is written in `text` wins over the config. Raises CpuppError SSH-CONFIG.
    """
    parsed = parse_ssh(text)
    if parsed is None:
        raise config_error(f"{text!r} is no SSH target: [user@]host[:port] is")
    user, alias, port = parsed
    try:
        return _target(text, alias, user, port, _settings(alias, user, port, config))
    except ValueError as error:
        raise config_error(f"{text}: {error}") from None


def _target(text: str, alias: str, user: str | None, port: int | None, settings: Mapping[str, Any]) -> SshTarget:
    host = _word(settings, "hostname") or alias
    port = port or int(_word(settings, "port") or SSH_PORT)
    user = user or _word(settings, "user") or getpass.getuser()
    # ssh -G puts every host of a jump in brackets.
    jump = re.sub(r"\[([^][:]*)\]", r"\1", _word(settings, "proxyjump"))
    command = _word(settings, "proxycommand")
    key_alias = _word(settings, "hostkeyalias")
    tokens = make_tokens(alias=alias, host=host, port=port, user=user, jump=jump, key_alias=key_alias)
    files = settings.get("identityfile") or DEFAULT_KEYS
    named = not set(DEFAULT_KEYS).issubset(files)  # without an IdentityFile, ssh -G lists all default names
    user_known, known = _known_hosts(settings, tokens)
    revoked = _word(settings, "revokedhostkeys")
    return SshTarget(
        name=text,
        host=host,
        port=port,
        user=user,
        identity_files=_paths(files, tokens),
        keys_named=named,
        certificate_files=_paths(settings.get("certificatefile", ()), tokens),
        identities_only=_is_on(settings, "identitiesonly"),
        identity_agent=_agent(str(settings.get("identityagent") or ""), tokens),
        proxy_jump=tuple(jump.replace(" ", "").split(",")) if jump else (),
        proxy_command=expand(command, tokens),
        proxy_kind=command,
        key_alias=key_alias,
        known_hosts=user_known + known,
        known_hosts_file=next((path for path in user_known[:1] if path != Path(os.devnull)), None),
        hash_known_hosts=_is_on(settings, "hashknownhosts"),
        revoked_keys=expand_path(revoked, tokens) if revoked else None,
        address_family=_word(settings, "addressfamily") or "any",
        bind_address=_word(settings, "bindaddress"),
        connect_timeout_s=float(_word(settings, "connecttimeout") or 0),
        alive_interval_s=int(_word(settings, "serveraliveinterval") or 0),
    )


def _paths(names: Iterable[str], tokens: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(expand_path(name, tokens) for name in names if name.lower() != "none")


def _known_hosts(settings: Mapping[str, Any], tokens: Mapping[str, str]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The user's files and the system's."""
    home, account = str(Path.home()), pwd.getpwuid(os.getuid()).pw_dir
    default = "{0}/.ssh/known_hosts {0}/.ssh/known_hosts2"
    user = str(settings.get("userknownhostsfile") or default.format(home))
    if user == default.format(account):  # ssh looks up the home in passwd and knows nothing of $HOME
        user = default.format(home)
    world = str(settings.get("globalknownhostsfile") or "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2")
    return _paths(user.split(), tokens), _paths(world.split(), tokens)


def _agent(value: str, tokens: Mapping[str, str]) -> str | None:
    if value.lower() == "none":
        return ""
    if value in ("", "SSH_AUTH_SOCK", "$SSH_AUTH_SOCK"):
        return None
    if value.startswith("$") and not value.startswith("${"):
        return os.path.expandvars(value)
    return str(expand_path(value, tokens))


def _word(settings: Mapping[str, Any], key: str) -> str:
    """The setting's text; the word `none` counts as no setting."""
    text = str(settings.get(key) or "")
    return "" if text.lower() == "none" else text


def _is_on(settings: Mapping[str, Any], key: str) -> bool:
    return _word(settings, key).lower() in ("yes", "true")


def _settings(alias: str, user: str | None, port: int | None, config: Path | None) -> dict[str, Any]:
    path = config or Path.home() / ".ssh" / "config"
    program = shutil.which("ssh")
    # ssh reads the config below the home that passwd names, and the system's with it, unless it is told one file.
    moved = str(Path.home()) != pwd.getpwuid(os.getuid()).pw_dir
    if not path.exists():
        if config is not None:
            raise config_error(f"{config}: no such file")
        if moved or program is None:
            return {}
    if program is not None:
        return _ask_openssh(program, alias, user, port, path if config is not None or moved else None)
    return _ask_paramiko(path, alias)


def _ask_paramiko(path: Path, alias: str) -> dict[str, Any]:
    import paramiko

    try:
        return dict(paramiko.SSHConfig.from_path(str(path)).lookup(alias))
    except (paramiko.SSHException, OSError, ValueError, ImportError) as error:
        raise config_error(f"{path}: {error}") from None


def _ask_openssh(program: str, alias: str, user: str | None, port: int | None, config: Path | None) -> dict[str, Any]:
    command = [program, "-G"]
    command += ["-F", str(config)] if config else []
    command += ["-l", user] if user else []
    command += ["-p", str(port)] if port else []
    try:
        done = subprocess.run(
            [*command, "--", alias], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=20
        )
    except subprocess.TimeoutExpired:
        raise config_error(f"ssh -G {alias} did not answer within 20 s: does a `Match exec` hang?") from None
    if done.returncode != 0:
        raise config_error(done.stderr.strip() or f"ssh -G {alias} ended with {done.returncode}")
    settings: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key in _LISTS:
            settings.setdefault(key, []).append(value)
        else:
            settings.setdefault(key, value)
    return settings


def config_error(message: str) -> CpuppError:
    """An error of the SSH config."""
    return CpuppError(
        "SSH-CONFIG", message, hint="`ssh -G HOST` shows what OpenSSH reads", exit_code=ExitCode.UNREACHABLE
    )
