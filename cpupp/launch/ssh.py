"""Hosts over SSH: paramiko against OpenSSH, with the user's own config, keys and known_hosts. No password, ever."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from pathlib import Path

import paramiko

from cpupp.errors import CpuppError
from cpupp.launch.bundle import START_AGENT
from cpupp.launch.ssh_dial import unreachable, words_of
from cpupp.launch.ssh_network import CONNECT_TIMEOUT_S, AcceptNew, Lease, SshNetwork
from cpupp.launch.transport import STDERR_KEPT, Connection, ConnectionLostError

OPEN_TIMEOUT_S = 15.0  # for the agent's channel, once we are logged in
UNKNOWN_STATUS = -1  # paramiko's word for none


class SshTransport:
    """One host over SSH. ssh: `[user@]host[:port]` or an alias; network: shares connections with other hosts.

    accept_new: see `SshNetwork.reach`. Without a network, it has one of its own; config: another file than
    ~/.ssh/config, for that one.
    """

    def __init__(
        self,
        ssh: str,
        *,
        network: SshNetwork | None = None,
        accept_new: AcceptNew | None = None,
        config: Path | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.target = ssh
        self._accept_new = accept_new
        self._network = network or SshNetwork(config=config, connect_timeout_s=connect_timeout_s)

    def connect(self, host: str) -> Connection:
        """Connect, check the host key, log in, start the agent.

        Raises CpuppError SSH-CONFIG, SSH-UNREACHABLE, SSH-HOST-KEY, SSH-HOST-KEY-CHANGED or SSH-AUTH.
        """
        # Without a handler, logging prints what paramiko's thread complains about to the user's terminal.
        logger = logging.getLogger("paramiko")
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())
        try:
            lease = self._network.reach(self.target, accept_new=self._accept_new)
            try:
                return _start(lease)
            except (paramiko.SSHException, OSError, EOFError) as error:
                if not lease.shared and not isinstance(error, paramiko.ChannelException):
                    raise
            # The server allows no more sessions in one connection (MaxSessions), or that one had just gone.
            return _start(self._network.reach(self.target, accept_new=self._accept_new, alone=True))
        except CpuppError as error:
            error.where = error.where or host
            raise
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise unreachable(self.target, words_of(error), host) from None


def _start(lease: Lease) -> SshConnection:
    try:
        channel = lease.transport.open_session(timeout=OPEN_TIMEOUT_S)
        channel.exec_command(START_AGENT)
    except BaseException:
        lease.release()
        raise
    return SshConnection(lease, channel)


class SshConnection:
    """The agent's pipes in an SSH channel."""

    def __init__(self, lease: Lease, channel: paramiko.Channel) -> None:
        self._lease = lease
        self._channel = channel
        self._ready = channel.fileno()
        self._words = b""

    def send(self, data: bytes) -> None:
        """Write all bytes. Raises ConnectionLostError."""
        try:
            self._channel.sendall(data)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise ConnectionLostError(f"the SSH connection is closed ({words_of(error)})") from None

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
        """Return the remote command's exit status (negative: signal), None when the server sent none in time."""
        if not self._channel.status_event.wait(timeout_s):
            return None
        status = self._channel.exit_status
        return None if status == UNKNOWN_STATUS else status

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
        """Drop the connection and all hops that nobody else uses. Never raises."""
        self._lease.release()
        with contextlib.suppress(Exception):
            self._channel.close()  # it gives back the two descriptors of `fileno`
