"""Hosts over SSH: paramiko against OpenSSH, with the user's own config, keys and known_hosts. No password, ever."""

from __future__ import annotations

import contextlib
import logging
import random
import select
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch import known_hosts
from cpupp.launch.bundle import START_AGENT
from cpupp.launch.ssh_config import SshTarget, resolve
from cpupp.launch.ssh_keys import Identities
from cpupp.launch.transport import STDERR_KEPT, Connection, ConnectionLostError

if TYPE_CHECKING:
    import paramiko

MAX_HOPS = 8
KEEPALIVE_S = 10  # keeps idle connections alive in firewalls; loss is noticed by the session's heartbeats
MAX_LOGINS = 5  # connections for one login: a server hangs up after MaxAuthTries keys
LONGEST_PAUSE_S = 2.0


class SshTransport:
    """One host over SSH. ssh: `[user@]host[:port]` or an alias; config: another file than ~/.ssh/config."""

    def __init__(self, ssh: str, *, config: Path | None = None, connect_timeout_s: float = 15.0) -> None:
        self.target = ssh
        self._config = config
        self._timeout_s = connect_timeout_s

    def connect(self, host: str) -> Connection:
        """Connect, check the host key, log in, start the agent.

        Raises CpuppError SSH-CONFIG, SSH-UNREACHABLE, SSH-HOST-KEY, SSH-HOST-KEY-CHANGED, SSH-AUTH or SSH-PROXY.
        """
        import paramiko

        # Without a handler, logging prints what paramiko's thread complains about to the user's terminal.
        logger = logging.getLogger("paramiko")
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
        try:
            chain = _Chain(self._timeout_s, self._config)
            try:
                transport = chain.reach(resolve(self.target, self._config))
                channel = transport.open_session(timeout=chain.remaining())
                channel.exec_command(START_AGENT)
            except BaseException:
                chain.close()
                raise
        except CpuppError as error:
            error.where = error.where or host
            raise
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise _unreachable(self.target, _words(error), host) from None
        return SshConnection(chain, channel)


class _Chain:
    """The connections to a host: one, or one for each jump and one through the last of them."""

    def __init__(self, timeout_s: float, config: Path | None) -> None:
        self._end = time.monotonic() + timeout_s
        self._config = config
        self._transports: list[paramiko.Transport] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def remaining(self) -> float:
        """Seconds left to connect, at least a little."""
        return max(0.1, self._end - time.monotonic())

    def reach(self, target: SshTarget, hops: int = 0) -> paramiko.Transport:
        """Return a logged-in transport to the target."""
        if hops > MAX_HOPS:
            raise _unreachable(target.name, f"more than {MAX_HOPS} jumps: the SSH config runs in a circle")
        with contextlib.closing(Identities(target)) as identities:
            for _ in range(MAX_LOGINS):
                transport = self._connect(target, hops)
                if _log_in(transport, target, identities):
                    transport.set_keepalive(KEEPALIVE_S)
                    return transport
                # The server hung up after too many keys: come back with those that it has not seen.
        raise _no_login(target, f"the server hung up {MAX_LOGINS} times ({identities.describe()})")

    def _connect(self, target: SshTarget, hops: int) -> paramiko.Transport:
        """Return a transport with a verified host key. Tries again while the server drops us and time is left.

        A server that is busy with others (MaxStartups) closes connections before it says anything.
        """
        pause = 0.2
        while True:
            transport = self._try_connect(target, hops, self.remaining() < pause)
            if transport is not None:
                self._transports.append(transport)
                _check_host_key(transport, target)
                return transport
            time.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _try_connect(self, target: SshTarget, hops: int, last: bool) -> paramiko.Transport | None:
        """Return a transport after the key exchange; None when the server dropped us, an error the `last` time."""
        import paramiko

        names = known_hosts.host_names(target.host, target.port, target.key_alias)
        known = [key for name in names for key in known_hosts.find_keys(name, target.known_hosts)]
        transport: paramiko.Transport | None = None
        try:
            transport = paramiko.Transport(self._socket(target, hops))
            transport.daemon = True
            transport.banner_timeout = transport.auth_timeout = self.remaining()
            options = transport.get_security_options()
            options.key_types = known_hosts.algorithms_for(known, options.key_types)
            transport.start_client(timeout=self.remaining())
            if not transport.initial_kex_done:
                raise TimeoutError(f"no SSH handshake within {transport.banner_timeout:.0f} s")
        except (paramiko.SSHException, OSError, EOFError) as error:
            if transport is not None:
                transport.close()
            dropped = isinstance(error, EOFError | ConnectionResetError) or "banner" in str(error)
            if dropped and not last:
                return None
            raise _unreachable(target.name, _words(error)) from None
        return transport

    def _socket(self, target: SshTarget, hops: int) -> socket.socket | paramiko.Channel:
        if target.proxy_jump:
            *before, name = target.proxy_jump
            hop = resolve(name, self._config)
            if before:
                hop = replace(hop, proxy_jump=tuple(before), proxy_command="")
            transport = self.reach(hop, hops + len(target.proxy_jump))
            return transport.open_channel("direct-tcpip", (target.host, target.port), ("", 0), timeout=self.remaining())
        if target.proxy_command:
            return self._proxy(target)
        connection = socket.create_connection((target.host, target.port), timeout=self.remaining())
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _proxy(self, target: SshTarget) -> socket.socket:
        command = target.proxy_command
        for mark, value in (("%h", target.host), ("%p", str(target.port)), ("%r", target.user), ("%n", target.host)):
            command = command.replace(mark, value)
        ours, theirs = socket.socketpair()
        with theirs:
            # In a session of its own, so that Ctrl-C at the terminal leaves the way to the host open for the stop.
            process = subprocess.Popen(
                ["/bin/sh", "-c", "exec " + command],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
            )
        self._processes.append(process)
        return ours

    def close(self) -> None:
        """Close all connections, the inner one first, and end the proxy commands."""
        for transport in reversed(self._transports):
            with contextlib.suppress(Exception):
                transport.close()
        for process in self._processes:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)


def _check_host_key(transport: paramiko.Transport, target: SshTarget) -> None:
    """Raise CpuppError unless known_hosts holds the key that the server proved to have."""
    key = transport.get_remote_server_key()
    blob, kind = key.asbytes(), key.get_name()
    names = known_hosts.host_names(target.host, target.port, target.key_alias)
    lines = [known_hosts.find_keys(name, target.known_hosts) for name in names]
    same = [line for found in lines for line in found if line.key == blob]
    user_file = target.known_hosts[0]
    shown = known_hosts.fingerprint(blob)
    revoked = next((line for line in same if line.marker == "@revoked"), None)
    if revoked is not None:
        raise CpuppError(
            "SSH-HOST-KEY-CHANGED",
            f"{target.name}: its {kind} key {shown} is revoked by {revoked.file} line {revoked.line}",
            hint="ask the administrator of that host for its new key",
            exit_code=ExitCode.UNREACHABLE,
        )
    if any(not line.marker for line in same):
        return
    changed = next((line for line in lines[0] if line.kind == kind and not line.marker), None)
    if changed is not None:
        raise CpuppError(
            "SSH-HOST-KEY-CHANGED",
            f"{target.name}: its {kind} key is {shown}, but {changed.file} line {changed.line} has "
            f"{known_hosts.fingerprint(changed.key)}: either the host was reinstalled, or somebody else answers for it",
            hint=f"when you are sure of the new key, remove that line: ssh-keygen -f {changed.file} -R '{names[0]}'",
            exit_code=ExitCode.UNREACHABLE,
        )
    raise CpuppError(
        "SSH-HOST-KEY",
        f"{target.name}: its {kind} key {shown} is not in {user_file}",
        hint=f"compare the fingerprint with the host's own, then add this line to {user_file}: "
        + known_hosts.key_line(names[0], kind, blob),
        exit_code=ExitCode.UNREACHABLE,
    )


def _log_in(transport: paramiko.Transport, target: SshTarget, identities: Identities) -> bool:
    """Offer keys until one is taken. Returns False when the server hung up and keys are left.

    `identities` remembers across connections which keys were offered.
    """
    import paramiko

    for key in identities:
        try:
            more = transport.auth_publickey(target.user, key.private)
        except paramiko.BadAuthenticationType as error:
            raise _no_login(target, f"the server takes no keys, only {', '.join(error.allowed_types)}") from None
        except paramiko.AuthenticationException:
            if not transport.is_active():
                return False
            continue
        except (paramiko.SSHException, OSError, EOFError):
            if not transport.is_active():
                return False
            raise
        if more:
            raise _no_login(target, f"after the key the server also wants {', '.join(more)}")
        return True
    raise _no_login(target, f"no key was accepted for user {target.user} ({identities.describe()})")


def _no_login(target: SshTarget, words: str) -> CpuppError:
    return CpuppError(
        "SSH-AUTH",
        f"{target.name}: {words}",
        hint=f"`ssh -p {target.port} {target.user}@{target.host}` must work without a password; "
        "set User and IdentityFile in ~/.ssh/config, or ssh-add the key",
        exit_code=ExitCode.UNREACHABLE,
    )


def _unreachable(name: str, words: str, where: str = "") -> CpuppError:
    return CpuppError(
        "SSH-UNREACHABLE",
        f"cannot connect to {name}: {words}",
        where=where,
        hint="is the host up, its sshd running, and address and port right?",
        exit_code=ExitCode.UNREACHABLE,
    )


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


class SshConnection:
    """The agent's pipes in an SSH channel."""

    def __init__(self, chain: _Chain, channel: paramiko.Channel) -> None:
        self._chain = chain
        self._channel = channel
        self._ready = channel.fileno()
        self._words = b""

    def send(self, data: bytes) -> None:
        """Write all bytes. Raises ConnectionLostError."""
        try:
            self._channel.sendall(data)
        except OSError as error:
            raise ConnectionLostError(f"the SSH connection is closed ({error})") from None

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next bytes, empty at the end, None after the time-out. Raises ConnectionLostError."""
        channel = self._channel
        end = time.monotonic() + timeout_s
        while True:
            # Read before the buffers are looked at: data may arrive in between, its end may not.
            ended = channel.eof_received or channel.closed
            self._keep_words()
            if channel.recv_ready():
                return channel.recv(1 << 17)
            if ended:
                if not channel.eof_received:
                    raise ConnectionLostError("the SSH connection broke")
                return b""
            remaining = end - time.monotonic()
            if remaining <= 0:
                return None
            try:
                select.select([self._ready], [], [], remaining)
            except (OSError, ValueError) as error:
                raise ConnectionLostError(f"the SSH connection is closed ({error})") from None

    def exit_status(self, timeout_s: float) -> int | None:
        """Return the remote command's exit status, None when the server sent none in time."""
        if not self._channel.status_event.wait(timeout_s):
            return None
        status = self._channel.exit_status
        return None if status < 0 else status

    def last_words(self) -> str:
        """Return the end of the remote side's stderr."""
        self._keep_words()
        return self._words.decode("utf-8", "replace").strip()

    def _keep_words(self) -> None:
        while self._channel.recv_stderr_ready():
            self._words = (self._words + self._channel.recv_stderr(65536))[-STDERR_KEPT:]

    def send_end(self) -> None:
        """Close the agent's stdin."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def close(self) -> None:
        """Drop the connection and all hops. Never raises."""
        self._chain.close()
        with contextlib.suppress(Exception):
            self._channel.close()  # nothing is sent any more; it gives back the two descriptors of `fileno`
