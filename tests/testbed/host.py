"""One test host: what it is asked to be, and what a test can do with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.testbed import network, processes
from tests.testbed.processes import Process

if TYPE_CHECKING:
    from tests.testbed.bed import Bed

START_TIMEOUT_S = 30.0  # takes 0.1 s; vLLM on the same cores makes it seconds

# Runs once inside the new namespaces; everything that varies comes in as a variable. Only the mounts below are
# private. The rest (the repository, /var/tmp, the system) is this machine's, so a path means the same everywhere.
SETUP = r"""
hostname "$BED_HOSTNAME"
ip link set lo up
ip address add "$BED_ADDRESS/$BED_PREFIX" dev "$BED_INTERFACE"
ip link set "$BED_INTERFACE" up
ip route add default via "$BED_GATEWAY"

mount -t tmpfs -o "mode=1777,size=$BED_SHM_SIZE" bed-shm /dev/shm
mount -t tmpfs -o mode=1777 bed-tmp /tmp
mount -t tmpfs -o mode=755 bed-run /run
mount -t tmpfs -o mode=755 bed-home /home
mkdir -m 755 /run/sshd

# /sys/class/net shows the network namespace of the process that mounted it; the cgroups below it are kept.
mkdir /run/cgroup
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup /run/cgroup; fi
mount -t sysfs -o ro bed-sys /sys
if [ -d /sys/fs/cgroup ]; then mount --rbind /run/cgroup /sys/fs/cgroup; fi
umount -R -l /run/cgroup 2>/dev/null || true
rmdir /run/cgroup 2>/dev/null || true

for file in passwd shadow group hosts; do mount --bind "$BED_FOLDER/etc/$file" "/etc/$file"; done
mkdir -m 700 "$BED_HOME" "$BED_HOME/.ssh"
install -m 600 "$BED_FOLDER/authorized_keys" "$BED_HOME/.ssh/authorized_keys"
chown -R "$BED_UID:$BED_UID" "$BED_HOME"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What one host shall be. Everything left out gets the default of its place in the bed."""

    name: str | None = None  # how tests and ssh configs call it: a, b, c, ...
    port: int = 22  # of its sshd
    user: str = "root"  # who logs in; any other name is made, on this host alone
    hostname: str | None = None  # host-a, ...; two hosts may have the same
    shm_size: str = "4g"  # of /dev/shm, as tmpfs takes it
    cores: Sequence[int] | None = None  # core i for host i, as far as this machine has them
    etc_hosts: Sequence[str] = ()  # lines that come before the default ones
    sshd_config: Sequence[str] = ()  # lines that come before the default ones, and so win
    rate: str | None = None  # of its link, both ways, as tc takes it: 100mbit
    env: Mapping[str, str] = field(default_factory=dict)  # in every SSH session and every `run`
    interface: str = "eth0"  # name of its end of the link


class Host:
    """A running host. Made by `testbed.bed.hosts`; see there."""

    def __init__(self, *, name: str, options: HostOptions, folder: Path, cores: Sequence[int]) -> None:
        self.name = name
        self.options = options
        self.folder = folder
        self.cores = tuple(cores)
        self.hostname = options.hostname or f"host-{name}"
        self.user = options.user
        self.port = options.port
        self.home = Path("/home") / options.user
        self.bed: Bed  # set by the bed, as it makes the host
        self.link: network.Link  # set by `plug`
        self._sshd: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        # Born without a network; sleeps until the bed ends and keeps the namespaces alive through `crash`.
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--propagation", "private"]
        self._holder = subprocess.Popen(
            ["unshare", *namespaces, "sleep", "infinity"], stdin=subprocess.DEVNULL, start_new_session=True
        )
        # Not sooner: until unshare has made room for sleep, its mounts still spread to this machine.
        wait_for(lambda: self._holder_name() == "sleep", f"namespaces for host {name}")
        self.mount_namespace = str(Path(f"/proc/{self.pid}/ns/mnt").readlink())

    # Where it is, and how to reach it

    @property
    def address(self) -> str:
        """Its address on the bed's network, reachable from this machine and from the other hosts."""
        return self.link.address

    @property
    def interface(self) -> str:
        """Name of its network interface, as the host itself sees it."""
        return self.link.interface

    @property
    def ssh(self) -> str:
        """SSH target as a cluster file takes it: user@address:port."""
        return f"{self.user}@{self.address}:{self.port}"

    @property
    def pid(self) -> int:
        """Pid of the process that holds the namespaces, for nsenter."""
        return self._holder.pid

    @property
    def sshd_log(self) -> str:
        """What its sshd has written so far."""
        return (self.folder / "sshd.log").read_text(encoding="utf-8", errors="replace")

    # Life of the host

    def plug(self, bridge: network.Bridge, index: int) -> None:
        """Connect to `bridge` and set up everything inside. Called once, by the bed."""
        self.link = bridge.plug(index, self.pid, self.options.interface)
        settings = {
            "BED_HOSTNAME": self.hostname,
            "BED_ADDRESS": self.address,
            "BED_PREFIX": str(bridge.subnet.prefixlen),
            "BED_GATEWAY": bridge.address,
            "BED_INTERFACE": self.interface,
            "BED_SHM_SIZE": self.options.shm_size,
            "BED_FOLDER": str(self.folder),
            "BED_HOME": str(self.home),
            "BED_UID": "0" if self.user == "root" else "4242",
        }
        network.call("env", *(f"{key}={value}" for key, value in settings.items()), *self._enter(), "sh", "-euc", SETUP)
        if self.options.rate:
            self.link.limit(self.options.rate)
            network.call(*self._enter(), *network.tbf(self.interface, self.options.rate))

    def start_sshd(self) -> None:
        """Start the host's sshd; `wait_for_sshd` waits until it answers."""
        config = self.folder / "sshd_config"
        with (self.folder / "sshd.log").open("ab") as log:
            self._sshd = subprocess.Popen(
                # sshd wants its full path, to start itself again for each connection.
                [*self._enter(), *self._on_cores(), "/usr/sbin/sshd", "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment(),
            )

    def wait_for_sshd(self) -> None:
        """Wait until sshd listens; raises with its log when it ends instead."""
        sshd = self._sshd
        assert sshd is not None

        def listens() -> bool:
            if sshd.poll() is not None:
                raise RuntimeError(f"sshd of host {self.name} ended with {sshd.returncode}:\n{self.sshd_log}")
            return f"Server listening on 0.0.0.0 port {self.port}" in self.sshd_log

        wait_for(listens, f"sshd of host {self.name}")

    def stop_sshd(self) -> None:
        """End the sshd that listens; the sessions that are open live on."""
        assert self._sshd is not None
        self._sshd.terminate()
        self._sshd.wait(START_TIMEOUT_S)

    def kill_sshd(self) -> None:
        """SIGKILL the sshd that listens."""
        assert self._sshd is not None
        self._sshd.kill()
        self._sshd.wait(START_TIMEOUT_S)

    def revive(self) -> None:
        """Undo `kill_sshd`, and `crash`: the host is back, with nothing running on it."""
        self.link.up()
        (self.folder / "sshd.log").rename(self.folder / "sshd.old.log")
        self.start_sshd()
        self.wait_for_sshd()

    def restart_sshd(self) -> None:
        """Let sshd read its configuration again: a new one, in the place of the old."""
        self.stop_sshd()
        (self.folder / "sshd.log").rename(self.folder / "sshd.old.log")
        self.start_sshd()
        self.wait_for_sshd()

    def crash(self) -> None:
        """The power goes: no packet leaves any more, and nothing on the host runs any more."""
        self.link.drop()
        self.kill_processes()
        if self._sshd is not None:
            self._sshd.kill()
            self._sshd.wait()

    def kill_processes(self) -> None:
        """SIGKILL everything on the host but its sshd."""

        def killed() -> bool:
            victims = self.processes()
            for victim in victims:
                try:
                    os.kill(victim.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            return not victims

        wait_for(killed, f"the end of the processes on {self.name}")

    def reap(self) -> None:
        """Fetch the exit status of what was started here, once the bed has killed it."""
        for process in (self._holder, self._sshd, *self._started):
            if process is not None:
                process.wait(START_TIMEOUT_S)

    # What a test does on it

    def run(
        self, argv: Sequence[str], *, check: bool = True, timeout: float = 60, cwd: Path | str = "/", stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` as root inside the host, without SSH, and return its output as text."""
        return subprocess.run(
            self._command(argv, cwd),
            check=check,
            timeout=timeout,
            input=stdin,
            capture_output=True,
            text=True,
            env=self._environment(),
        )

    def python(self, code: str, *arguments: str, timeout: float = 60) -> str:
        """Run Python `code` inside the host, with the Python of the tests; returns what it printed, stripped."""
        return self.run([sys.executable, "-c", code, *arguments], timeout=timeout).stdout.strip()

    def popen(
        self, argv: Sequence[str], *, cwd: Path | str = "/", stdout: int | IO[Any] | None = None, stderr: Any = None
    ) -> subprocess.Popen[bytes]:
        """Start `argv` as root inside the host, without SSH. The Popen's pid is that of `argv` itself.

        It need not be waited for: the bed ends it.
        """
        process = subprocess.Popen(
            self._command(argv, cwd),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            env=self._environment(),
        )
        self._started.append(process)
        # Before it is inside, nobody would count it, or kill it, as a process of this host.
        wait_for(lambda: process.poll() is not None or self._is_inside(process.pid), f"{argv[0]} on {self.name}")
        return process

    # What a test sees of it

    def processes(self) -> list[Process]:
        """What runs on the host now, without the bed's own sshd (its sessions count)."""
        own = {self.pid, self._sshd.pid if self._sshd else self.pid}
        return [process for process in processes.in_mount_namespace(self.mount_namespace) if process.pid not in own]

    def wait_quiet(self, timeout: float = 10) -> list[Process]:
        """Wait until nothing runs on the host; returns what still runs when `timeout` seconds are over."""
        deadline = time.monotonic() + timeout
        while (running := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return running

    def cpu_seconds(self) -> float:
        """CPU time of everything that runs on the host now, and of its children that have ended."""
        return sum(process.cpu_seconds for process in self.processes())

    def path(self, path: Path | str) -> Path:
        """Where this process finds the host's own `path`, for the folders that are private (/tmp, /dev/shm, ...)."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def shm(self) -> list[str]:
        """Names in the host's /dev/shm."""
        return sorted(entry.name for entry in self.path("/dev/shm").iterdir())

    def tmp(self) -> list[str]:
        """Names in the host's /tmp."""
        return sorted(entry.name for entry in self.path("/tmp").iterdir())

    def bytes_sent(self) -> int:
        """Bytes that the host has sent over its link, with all headers."""
        return self.link.bytes_sent()

    def bytes_received(self) -> int:
        """Bytes that the host has received over its link, with all headers."""
        return self.link.bytes_received()

    # Details

    def _holder_name(self) -> str:
        return Path(f"/proc/{self.pid}/comm").read_text(encoding="utf-8").strip()

    def _is_inside(self, pid: int) -> bool:
        try:
            return str(Path(f"/proc/{pid}/ns/mnt").readlink()) == self.mount_namespace
        except OSError:
            return False

    def inside(self, cwd: Path | str) -> list[str]:
        """What a command line begins with that shall run on this host, in `cwd`; its pid is that of the command."""
        return [*self._enter(), "env", f"--chdir={cwd}"]

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--ipc", "--"]

    def _on_cores(self) -> list[str]:
        return ["taskset", "--cpu-list", ",".join(map(str, self.cores))]

    def _command(self, argv: Sequence[str], cwd: Path | str) -> list[str]:
        # The current folder is lost on the way in, as it belongs to the other mount namespace.
        return [*self._enter(), "env", f"--chdir={cwd}", *self._on_cores(), *argv]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "HOME": str(self.home), "USER": self.user, "TMPDIR": "/tmp", **self.options.env}

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.ssh}>"


def wait_for(condition: Callable[[], bool], what: str, timeout: float = START_TIMEOUT_S) -> None:
    """Wait until `condition()`; raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} after {timeout:.0f} s")
        time.sleep(0.005)
