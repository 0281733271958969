"""The ways to hosts: one logged-in connection for each sshd, shared by all that end there or jump through it."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import paramiko

from cpupp.errors import CpuppError
from cpupp.launch.host_key import check_host_key
from cpupp.launch.ssh_config import SshTarget, route
from cpupp.launch.ssh_dial import Deadline, HostTransport, Wire, unreachable, words_of
from cpupp.launch.ssh_keys import Identities
from cpupp.launch.ssh_login import log_in, no_login

CONNECT_TIMEOUT_S = 15.0  # for each hop, where the config has no ConnectTimeout
KEEPALIVE_S = 10  # keeps idle connections alive in firewalls; loss is noticed by the session's heartbeats
MAX_LOGINS = 5  # connections for one login: a server hangs up after MaxAuthTries keys
MAX_REFUSALS = 4  # attempts at a port where nobody listens: an sshd that starts again needs a moment
MAX_AT_ONCE = 8  # logins under way at one sshd or through one jump host: MaxStartups is 10:30:100 by default
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 2.0

AcceptNew = Callable[[str], None]


class SshNetwork:
    """Connects, and shares connections. Thread-safe.

    config: another file than ~/.ssh/config; connect_timeout_s: for each hop.
    """

    def __init__(self, *, config: Path | None = None, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._config = config
        self._timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._ways: dict[Hashable, _Way] = {}
        self._gates: dict[Hashable, threading.Semaphore] = {}

    def reach(self, text: str, *, accept_new: AcceptNew | None = None, alone: bool = False) -> Lease:
        """Return a logged-in connection to `[user@]host[:port]` or an alias; alone: one that nobody else uses.

        accept_new: None to refuse hosts whose key is not known, else their keys are added to known_hosts, and this is
        told in words about each.
        Raises CpuppError SSH-CONFIG, SSH-UNREACHABLE, SSH-HOST-KEY, SSH-HOST-KEY-CHANGED or SSH-AUTH.
        """
        targets = route(text, self._config)
        lease = Lease(self, accept_new)
        key: tuple[Hashable, ...] = ()
        try:
            for target in targets:
                key = (*key, replace(target, name=""))
                if alone and target is targets[-1]:
                    key = (*key, object())
                self._enter(lease, key, target)
        except BaseException:
            lease.release()
            raise
        return lease

    def _enter(self, lease: Lease, key: tuple[Hashable, ...], target: SshTarget) -> None:
        """Add one connection to the lease: one that there is, or a new one through the last of the lease."""
        with self._lock:
            way = self._ways.get(key)
            lease.shared = way is not None and way.usable()
            if way is None or not lease.shared:
                way = self._ways[key] = _Way(key)
            way.num_users += 1
            before = lease.ways[-1] if lease.ways else None
            lease.ways.append(way)
        if not lease.shared:
            try:
                way.opened.set_result(self._open(way, target, before, lease.accept_new))
            except BaseException as error:  # handed to all who wait for this connection
                way.opened.set_exception(error)
        try:
            lease.transport = way.opened.result()
        except CpuppError as error:  # each host gets one of its own: they are told where they happened
            raise CpuppError(error.code, error.message, hint=error.hint, exit_code=error.exit_code) from None

    def _open(self, way: _Way, target: SshTarget, before: _Way | None, accept_new: AcceptNew | None) -> HostTransport:
        jump = before.opened.result() if before is not None else None
        gate: Hashable = target.proxy_kind or (target.host, target.port)
        with self._gate(before.key if before is not None else gate), contextlib.closing(Identities(target)) as keys:
            deadline = Deadline(target.connect_timeout_s or self._timeout_s)
            for _ in range(MAX_LOGINS):
                way.wire.close()
                transport = _connect(way, target, jump, deadline)
                _check(transport, target, accept_new)
                if log_in(transport, target, keys, deadline):
                    transport.set_keepalive(min(KEEPALIVE_S, target.alive_interval_s or KEEPALIVE_S))
                    return transport
                # The server hung up after too many keys: come back with those that it has not seen.
        raise no_login(target, f"the server hung up {MAX_LOGINS} times ({keys.describe()})")

    def _gate(self, key: Hashable) -> threading.Semaphore:
        with self._lock:
            return self._gates.setdefault(key, threading.Semaphore(MAX_AT_ONCE))

    def leave(self, way: _Way) -> None:
        """Give a connection back; the last user closes it."""
        with self._lock:
            way.num_users -= 1
            if way.num_users:
                return
            if self._ways.get(way.key) is way:
                del self._ways[way.key]
        way.wire.close()


@functools.cache
def network_of(config: Path | None, connect_timeout_s: float) -> SshNetwork:
    """The connections of this process by that config file, None for the user's."""
    return SshNetwork(config=config, connect_timeout_s=connect_timeout_s)


class _Way:
    """One connection, from the moment that somebody begins to make it."""

    def __init__(self, key: tuple[Hashable, ...]) -> None:
        self.key = key
        self.wire = Wire()
        self.opened: Future[HostTransport] = Future()
        self.num_users = 0

    def usable(self) -> bool:
        """Whether it still is being made, or works."""
        if not self.opened.done():
            return True
        return self.opened.exception() is None and self.opened.result().is_active()


class Lease:
    """The connections on the way to a host, the first hop first. shared: somebody else may use the last of them."""

    def __init__(self, network: SshNetwork, accept_new: AcceptNew | None) -> None:
        self._network = network
        self.accept_new = accept_new
        self.ways: list[_Way] = []
        self.shared = False
        self.transport: HostTransport

    def release(self) -> None:
        """Give all connections back, the inner one first. Idempotent."""
        while self.ways:
            self._network.leave(self.ways.pop())


def _connect(way: _Way, target: SshTarget, jump: paramiko.Transport | None, deadline: Deadline) -> HostTransport:
    """Return a transport whose host key is proved. Tries again while the server drops us and time is left.

    A server that is busy with others (MaxStartups) closes connections before it says anything.
    """
    pause, refusals = FIRST_PAUSE_S, 0
    while True:
        way.wire = Wire()
        try:
            transport = way.wire.open(target, jump, deadline)
        except (paramiko.SSHException, OSError, EOFError) as error:
            # What a proxy command failed of, nobody knows.
            refused = isinstance(error, ConnectionRefusedError | paramiko.ChannelException)
            refusals += refused or bool(target.proxy_command)
            if not _is_temporary(error) or refusals == MAX_REFUSALS or deadline.remaining() <= pause:
                words = words_of(error) + way.wire.complaint()
                way.wire.close()
                raise unreachable(target.name, words) from None
            way.wire.close()
        else:
            return transport
        time.sleep(random.uniform(pause / 2, pause))
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _check(transport: paramiko.Transport, target: SshTarget, accept_new: Callable[[str], None] | None) -> None:
    key = transport.get_remote_server_key()
    certificate = key.public_blob
    blob = None if certificate is None else certificate.key_blob
    check_host_key(target, key.get_name(), key.asbytes(), blob, accept_new)


def _is_temporary(error: Exception) -> bool:
    """Whether the next attempt may succeed: dropped by a busy server, or nobody listens yet."""
    dropped = isinstance(error, EOFError | ConnectionError | paramiko.ChannelException)
    return dropped or "banner" in str(error)
