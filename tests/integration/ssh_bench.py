"""Helpers of the SSH tests: a client's config to change, and what comes of a connection."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.ssh import SshTransport
from cpupp.launch.ssh_network import SshNetwork
from tests.integration.agent_bench import Bench, wait_until
from tests.testbed.bed import Bed


def client_config(bed: Bed, folder: Path) -> Path:
    """A copy of the bed's SSH config and known hosts in `folder`, for a test to change."""
    known = folder / "known_hosts"
    known.write_text(bed.known_hosts.read_text(encoding="ascii"), encoding="ascii")
    path = folder / "config"
    text = bed.ssh_config.read_text(encoding="utf-8").replace(str(bed.known_hosts), str(known))
    path.write_text(text, encoding="utf-8")
    return path


def known_hosts_of(config: Path) -> Path:
    """The known hosts that belong to that copy."""
    return config.parent / "known_hosts"


def put_first(config: Path, text: str) -> None:
    """Put lines in front of all others, so that they win."""
    config.write_text(text + "\n" + config.read_text(encoding="utf-8"), encoding="utf-8")


def answers(target: str, config: Path, hostname: str) -> None:
    """Open a session, ask the host who it is, close."""
    with Bench(SshTransport(target, config=config)) as bench:
        facts = bench.session.request("probe", name="a", engine_python="python3", model_path="/nonexistent")
        assert facts["hostname"] == hostname


def refused(target: str, config: Path, **options: Any) -> CpuppError:
    """Fail to open a session; return the error, which has the right exit code and names the host."""
    with pytest.raises(CpuppError) as caught, Bench(SshTransport(target, config=config, **options)):
        pass
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    assert caught.value.where == "a"
    assert caught.value.hint
    return caught.value


def log_in(config: Path, target: str, **options: Any) -> None:
    """Log in and hang up. Raises CpuppError."""
    SshNetwork(config=config).reach(target, **options).release()


def no_login(config: Path, target: str, **options: Any) -> CpuppError:
    """Fail to log in; return the error."""
    with pytest.raises(CpuppError) as caught:
        log_in(config, target, **options)
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    assert caught.value.hint
    return caught.value


def openssh(config: Path, target: str) -> bool:
    """Whether OpenSSH's own client gets in by that config."""
    argv = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", target, "true"]
    return subprocess.run(argv, capture_output=True, check=False, timeout=30).returncode == 0


def keygen(*arguments: str | Path) -> str:
    """Run ssh-keygen quietly; return what it printed."""
    return subprocess.run(["ssh-keygen", "-q", *arguments], check=True, capture_output=True, text=True).stdout


def new_key(path: Path, *options: str, passphrase: str = "") -> Path:
    """Make a key pair."""
    keygen("-t", "ed25519", "-N", passphrase, "-f", path, *options)
    return path


def public(path: Path) -> str:
    """Kind and blob of a public key."""
    return " ".join(path.with_name(path.name + ".pub").read_text(encoding="ascii").split()[:2])


@contextlib.contextmanager
def ssh_agent(socket: Path, *keys: Path) -> Iterator[None]:
    """An agent that holds the keys."""
    server = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket.exists, "ssh-agent")
        env = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
        subprocess.run(["ssh-add", "-q", *keys], check=True, stderr=subprocess.DEVNULL, env=env)
        yield
    finally:
        server.terminate()
        server.wait()
