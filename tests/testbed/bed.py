"""The test bed: hosts on one machine that differ in everything that matters to cpupp.

    with hosts(2) as [a, b]:
        a.run(["hostname"])                          # inside, without SSH
        connect(a.ssh, key=a.bed.key)                # over a real sshd, from outside
        assert a.shm() == [] and a.processes() == []

A host has its own network (a veth on a bridge, with an address that this machine and the other hosts reach), hostname,
System V and POSIX shared memory, /tmp, /run, /home, users and sshd. It shares the kernel (so the boot id), the pids
and all other files with this machine. Without root the test that asks for hosts is skipped, and on CI it fails.

Beds do not disturb each other. A janitor process removes the bed when the `with` block ends, and also when the tests
are killed.
"""

from __future__ import annotations

import itertools
import os
import random
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self, overload

from tests.testbed import need, network, sweep
from tests.testbed.etc import private_etc, sshd_config
from tests.testbed.host import START_TIMEOUT_S, Host, HostOptions

__all__ = ["Bed", "Host", "HostOptions", "hosts"]


def hosts(*wanted: int | HostOptions, every: HostOptions | None = None) -> Bed:
    """A bed: `hosts(2)`, `hosts(HostOptions(port=2222), HostOptions())`, or `hosts(2, every=HostOptions(...))`.

    A number stands for that many hosts with the options `every`.
    """
    options: list[HostOptions] = []
    for item in wanted:
        options += [every or HostOptions()] * item if isinstance(item, int) else [item]
    return Bed(options)


class Bed(Sequence[Host]):
    """The hosts, in order, and what a client needs to reach them. Use it as a context manager."""

    made: ClassVar[list[str]] = []  # ids of all beds of this process

    def __init__(self, options: Sequence[HostOptions]) -> None:
        if not options:
            raise ValueError("a bed needs at least one host")
        self.id = "".join(random.choices(string.ascii_lowercase + string.digits, k=6))
        self.folder = sweep.bed_folder(self.id)
        self.home = self.folder / "client"  # as HOME of a client: keys, known hosts and SSH config in .ssh
        self.key = self.home / ".ssh" / "id_ed25519"
        self.known_hosts = self.home / ".ssh" / "known_hosts"
        self.ssh_config = self.home / ".ssh" / "config"
        self._options = options
        self._hosts: list[Host] = []
        self._janitor: subprocess.Popen[bytes] | None = None

    @property
    def env(self) -> dict[str, str]:
        """Environment of a client (cpupp) that shall find key, known hosts and SSH aliases of this bed in its home."""
        return {**os.environ, "HOME": str(self.home)}

    def ssh_argv(self, host: Host, *command: str) -> list[str]:
        """The OpenSSH client's command line that runs `command` on `host`."""
        return ["ssh", "-F", str(self.ssh_config), "-o", "BatchMode=yes", host.name, *command]

    def leftovers(self) -> list[str]:
        """What of this bed there is on this machine; empty after the `with` block."""
        return sweep.leftovers(self.id)

    def __enter__(self) -> Self:
        need.need_hosts()
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is not None:
            for host in self._hosts:
                last = "\n".join(host.sshd_log.splitlines()[-15:])
                print(f"--- sshd of host {host.name}, last lines\n{last}", file=sys.stderr)
        self._close()

    def _open(self) -> None:
        Bed.made.append(self.id)
        self.folder.mkdir(mode=0o755)
        # Before anything else is there to be left behind.
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", sweep.__file__, "--janitor", self.id],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal is for the tests, not for it
        )
        me = os.getpid()
        (self.folder / sweep.OWNER_FILE).write_text(f"{me} {sweep.start_time(me)}\n", encoding="utf-8")
        self._make_client()
        bridge = network.Bridge(self.id)
        for index, options in enumerate(self._options):
            host = self._make_host(index, options)
            self._hosts.append(host)
            host.plug(bridge, index)
            host.start_sshd()
        for host in self._hosts:
            host.wait_for_sshd()
        self._write_client_files()

    def _close(self) -> None:
        """Let the janitor do its work, and wait for it."""
        if self._janitor is None:
            return
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        status = self._janitor.wait(sweep.KILL_TIMEOUT_S + START_TIMEOUT_S)
        self._janitor = None
        for host in self._hosts:
            host.reap()
        if status != 0 or (left := self.leftovers()):
            raise RuntimeError(f"bed {self.id} was not removed (janitor: {status}): {left if status == 0 else ''}")

    def _make_client(self) -> None:
        self.key.parent.mkdir(parents=True, mode=0o700)
        make_key(self.key, "test-bed")

    def _make_host(self, index: int, options: HostOptions) -> Host:
        name = options.name or _letters(index)
        if any(name == other.name for other in self._hosts):
            raise ValueError(f"two hosts are called {name}")
        folder = self.folder / name
        (folder / "etc").mkdir(parents=True)
        available = sorted(os.sched_getaffinity(0))
        cores = options.cores if options.cores is not None else [available[index % len(available)]]
        host = Host(name=name, options=options, folder=folder, cores=cores)
        host.bed = self
        make_key(folder / "host_key", f"host-{name}")
        for file, text in private_etc(host).items():
            (folder / "etc" / file).write_text(text, encoding="utf-8")
        (folder / "etc" / "shadow").chmod(0o600)
        (folder / "authorized_keys").write_bytes(self.key.with_suffix(".pub").read_bytes())
        (folder / "sshd_config").write_text(sshd_config(host), encoding="utf-8")
        return host

    def _write_client_files(self) -> None:
        known, config = [], []
        for host in self:
            algorithm, key, *_ = (host.folder / "host_key.pub").read_text(encoding="ascii").split()
            # Port 22 is written without brackets, and any other only with them.
            place = host.address if host.port == 22 else f"[{host.address}]:{host.port}"
            known.append(f"{place} {algorithm} {key}")
            config += [
                f"Host {host.name}",
                f"  HostName {host.address}",
                f"  Port {host.port}",
                f"  User {host.user}",
                "",
            ]
        config += [
            "Host *",
            f"  IdentityFile {self.key}",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.known_hosts}",
            "  StrictHostKeyChecking yes",
        ]
        self.known_hosts.write_text("\n".join(known) + "\n", encoding="ascii")
        self.ssh_config.write_text("\n".join(config) + "\n", encoding="utf-8")

    @overload
    def __getitem__(self, index: int) -> Host: ...
    @overload
    def __getitem__(self, index: slice) -> list[Host]: ...
    def __getitem__(self, index: int | slice) -> Host | list[Host]:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)


def make_key(path: Path, comment: str) -> None:
    """Write a new SSH key without passphrase to `path`, and its public half beside it."""
    network.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def _letters(index: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    names = (
        "".join(letters)
        for length in itertools.count(1)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
    )
    return next(itertools.islice(names, index, None))
