"""One connection to one sshd, up to the end of the key exchange: sockets, proxy commands, the host key's algorithms."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any, ClassVar

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.host_key import known_keys
from cpupp.launch.known_hosts import algorithms_for
from cpupp.launch.ssh_config import SshTarget

FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
PROXY_WORDS = 2000  # bytes of a proxy command's stderr for messages
_PLAIN: dict[int, Callable[[Any, Any], None]] = paramiko.Transport._channel_handler_table  # type: ignore[attr-defined]


class Deadline:
    """A point in time that can be put off."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, at least a little."""
        return max(0.1, self._end - time.monotonic())

    def put_off(self, seconds: float) -> None:
        """Give so much time more."""
        self._end += seconds


def _take_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Take `exit-signal` (RFC 4254, 6.10), which paramiko drops, as a negative exit status; leave the rest to it."""
    begin = message.packet.tell()
    if message.get_text() != "exit-signal":
        message.packet.seek(begin)
        _PLAIN[MSG_CHANNEL_REQUEST](channel, message)
        return
    message.get_boolean()
    with contextlib.suppress(KeyError):  # a signal that only the other system has
        channel.exit_status = -signal.Signals[f"SIG{message.get_text()}"].value
    channel.status_event.set()


class HostTransport(paramiko.Transport):
    """A transport that asks for exactly these kinds of host key; paramiko puts all certificates last."""

    _channel_handler_table: ClassVar[dict[int, Callable[[Any, Any], None]]] = {
        **_PLAIN,
        MSG_CHANNEL_REQUEST: _take_request,
    }
    host_algorithms: tuple[str, ...] = ()

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """Host key algorithms, the one that we like best first."""
        return self.host_algorithms


class Wire:
    """A socket to an sshd, a channel through a jump host, or a proxy command, with the transport on it."""

    def __init__(self) -> None:
        self.transport: HostTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def open(self, target: SshTarget, jump: paramiko.Transport | None, deadline: Deadline) -> HostTransport:
        """Connect and exchange keys. The server proves its host key; whether it is the right one is not checked.

        Raises SSHException, OSError or EOFError.
        """
        self.transport = transport = HostTransport(self._socket(target, jump, deadline))
        transport.daemon = True
        transport.banner_timeout = transport.auth_timeout = transport.handshake_timeout = deadline.remaining()
        known = [key for found in known_keys(target) for key in found]
        transport.host_algorithms = tuple(algorithms_for(known, transport.get_security_options().key_types))
        transport.start_client(timeout=deadline.remaining())
        if not transport.initial_kex_done:
            what = "handshake" if transport.remote_version else "banner"
            raise TimeoutError(f"no SSH {what} within {deadline.seconds:g} s")
        return transport

    def _socket(
        self, target: SshTarget, jump: paramiko.Transport | None, deadline: Deadline
    ) -> socket.socket | paramiko.Channel:
        if jump is not None:
            place = (target.host, target.port)
            return jump.open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=deadline.remaining())
        if target.proxy_command:
            return self._proxy(target.proxy_command)
        return _dial(target, deadline)

    def _proxy(self, command: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the wire
        with theirs:
            # In a session of its own, so that Ctrl-C at the terminal leaves the way to the host open for the stop.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", "exec " + command],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                start_new_session=True,
            )
        return ours

    def complaint(self) -> str:
        """The end of what the proxy command said on its stderr, as a part of a message."""
        if self._errors is None:
            return ""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - PROXY_WORDS))
        words = self._errors.read().decode("utf-8", "replace").strip()
        return f" (its ProxyCommand says: {words})" if words else ""

    def close(self) -> None:
        """End the transport and the proxy command. Never raises."""
        if self.transport is not None:
            with contextlib.suppress(Exception):
                self.transport.close()
        if self._process is not None:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
                    break
        if self._errors is not None:
            self._errors.close()


def _dial(target: SshTarget, deadline: Deadline) -> socket.socket:
    """Connect to the first address of the host that answers."""
    failure: OSError = OSError(f"{target.host} has no address")
    family = FAMILIES.get(target.address_family, socket.AF_UNSPEC)
    for kind, _, _, _, address in socket.getaddrinfo(target.host, target.port, family, socket.SOCK_STREAM):
        connection = socket.socket(kind, socket.SOCK_STREAM)
        try:
            connection.settimeout(deadline.remaining())
            if target.bind_address:
                connection.bind((target.bind_address, 0))
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection
    raise failure


def unreachable(name: str, words: str, where: str = "") -> CpuppError:
    """The error of a connection that did not come about."""
    return CpuppError(
        "SSH-UNREACHABLE",
        f"cannot connect to {name}: {words}",
        where=where,
        hint="is the host up, its sshd running, and address and port right?",
        exit_code=ExitCode.UNREACHABLE,
    )


def words_of(error: BaseException) -> str:
    """What an error of paramiko or the system says."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "banner" in str(error):
        return "it accepts connections, but says nothing that an SSH server says"
    return str(error) or type(error).__name__
