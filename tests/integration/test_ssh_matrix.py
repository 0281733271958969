"""SSH as it is in the field, against real OpenSSH: shells, homes, jumps, and servers that start again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from cpupp.launch.session import run_all
from cpupp.launch.ssh import SshTransport
from cpupp.launch.ssh_config import resolve
from cpupp.launch.ssh_network import SshNetwork
from tests.integration.agent_bench import Bench, wait_until
from tests.integration.ssh_bench import (
    answers,
    client_config,
    keygen,
    known_hosts_of,
    log_in,
    no_login,
    openssh,
    public,
    put_first,
)
from tests.testbed.bed import Bed, Host, HostOptions, hosts
from tests.testbed.need import need_tool


@pytest.fixture(scope="module")
def rsa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rsa") / "key"
    keygen("-t", "rsa", "-N", "", "-f", path)
    return path


@pytest.fixture(scope="module")
def bed(rsa: Path) -> Iterator[Bed]:
    """a: a user's login on another port; b: no SHA-1 anywhere, RSA alone; c: plain."""
    modern = [
        f"HostKey {rsa}",
        "HostKeyAlgorithms rsa-sha2-512,rsa-sha2-256",
        "PubkeyAcceptedAlgorithms rsa-sha2-512,rsa-sha2-256",
    ]
    with hosts(HostOptions(port=2222, user="rank"), HostOptions(sshd_config=modern), HostOptions()) as made:
        (made[1].path(made[1].home / ".ssh/authorized_keys")).write_text(f"{public(rsa)}\n", encoding="ascii")
        yield made


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def config(bed: Bed, rsa: Path, tmp_path: Path) -> Path:
    path = client_config(bed, tmp_path)
    known = known_hosts_of(path)
    lines = [line for line in known.read_text(encoding="ascii").splitlines() if not line.startswith(bed[1].address)]
    known.write_text("\n".join([*lines, f"{bed[1].address} {public(rsa)}"]) + "\n", encoding="ascii")
    put_first(path, f"Host b\n  IdentityFile {rsa}\n")
    return path


NOISE = "echo noise on stdout; echo noise on stderr >&2\n"
RC_FILES = {
    "bash": ".bashrc",
    "dash": ".profile",
    "zsh": ".zshenv",
    "fish": ".config/fish/config.fish",
    "csh": ".cshrc",
    "tcsh": ".tcshrc",
}


@pytest.mark.parametrize("shell", RC_FILES)
def test_a_login_shell_that_nobody_chose(bed: Bed, config: Path, shell: str) -> None:
    need_tool(shell)
    host = bed[0]
    rc = host.path(host.home / RC_FILES[shell])
    passwd = host.folder / "etc" / "passwd"
    before = passwd.read_text(encoding="utf-8")
    rc.parent.mkdir(parents=True, exist_ok=True)
    # csh has no way to write on stderr alone.
    rc.write_text("echo noise on stdout\n" if "csh" in shell else NOISE, encoding="utf-8")
    passwd.write_text(before.replace(f"{host.home}:/bin/bash", f"{host.home}:/usr/bin/{shell}"), encoding="utf-8")
    try:
        assert host.run(["getent", "passwd", host.user]).stdout.strip().endswith(f"/{shell}")
        with Bench(SshTransport("a", config=config)) as bench:
            bench.start(
                "print(os.environ['ODD'], flush=True)", python="/usr/bin/python3", env={"ODD": "'$HOME' !! `x`"}
            )
            wait_until(lambda: bench.output() == "'$HOME' !! `x`\n", "output")
        assert host.wait_quiet() == []
    finally:
        passwd.write_text(before, encoding="utf-8")
        rc.unlink()


def test_tmp_noexec_and_a_home_that_is_read_only(bed: Bed, config: Path) -> None:
    host = bed[2]
    host.run(["mount", "-o", "remount,noexec", "/tmp"])
    host.run(["mount", "-o", "remount,ro", "/home"])
    try:
        with Bench(SshTransport("c", config=config)) as bench:
            bench.start("say('main'); time.sleep(600)", python="/usr/bin/python3")
            bench.pid_of("main")
            assert not bench.site.is_relative_to("/home")
            site = bench.site
        assert host.wait_quiet() == []
        assert not host.path(site).exists()
    finally:
        host.run(["mount", "-o", "remount,rw", "/home"])
        host.run(["mount", "-o", "remount,exec", "/tmp"])


def test_a_home_that_all_hosts_share(bed: Bed, config: Path) -> None:
    one, other = bed[0], bed[2]
    shared = bed.folder / "shared"
    home = shared / "rank"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    (home / ".ssh/authorized_keys").write_bytes(bed.key.with_suffix(".pub").read_bytes())
    for path in (shared, home, home / ".ssh", home / ".ssh/authorized_keys"):
        os.chown(path, 4242, 4242)
    line = next(x for x in (one.folder / "etc/passwd").read_text().splitlines() if x.startswith("rank:"))
    for file, text in (("passwd", line), ("shadow", "rank:*:19000:0:99999:7:::")):
        path = other.folder / "etc" / file
        path.write_text(f"{path.read_text(encoding='utf-8')}{text}\n", encoding="utf-8")
    for host in (one, other):
        host.run(["mount", "--bind", str(shared), "/home"])
    try:
        with Bench(SshTransport("a", config=config)) as first:
            first.start("say('main'); time.sleep(600)", python="/usr/bin/python3")
            with Bench(SshTransport("rank@c", config=config)) as second:
                second.start("say('main'); time.sleep(600)", python="/usr/bin/python3")
                second.pid_of("main")
                assert second.site.is_relative_to("/home")
                assert first.site.parent == second.site.parent
                assert first.site != second.site
            assert other.wait_quiet() == []
            assert first.site.name in [path.name for path in (home / ".cache/cpupp").iterdir()]
            first.pid_of("main")
            assert first.session.alive
        assert one.wait_quiet() == []
        assert list((home / ".cache").glob("*/*")) == []
    finally:
        for host in (one, other):
            host.run(["umount", "/home"])


def test_a_server_without_sha1(config: Path) -> None:
    log_in(config, "b")


def test_hosts_behind_a_jump_share_its_connection(bed: Bed, config: Path, rsa: Path) -> None:
    a, b, c = bed
    jumps = [f"Host far-{name}\n  HostName {host.address}\n  User root" for name, host in (("b", b), ("c", c))]
    put_first(
        config,
        f"{jumps[0]}\n  ProxyJump {a.user}@{a.address}:{a.port}\n  IdentityFile {rsa}\n"
        f"{jumps[1]}\n  ProxyJump {a.user}@{a.address}:{a.port}\n"
        # Two hops; the second has a user and a port of its own.
        f"Host farther\n  HostName {b.address}\n  User root\n  IdentityFile {rsa}\n"
        f"  ProxyJump c,rank@{a.address}:2222\n",
    )
    accepted = {host.name: host.sshd_log.count("Accepted publickey") for host in bed}
    network = SshNetwork(config=config)
    targets = ["far-b", "far-c", "far-c", "far-b", "far-c"]
    leases, errors = run_all({f"{number}": partial(network.reach, name) for number, name in enumerate(targets)})
    assert [error.message for error in errors] == []
    new = {host.name: host.sshd_log.count("Accepted publickey") - accepted[host.name] for host in bed}
    assert new == {"a": 1, "b": 1, "c": 1}
    threads = threading.active_count()
    for lease in leases.values():
        lease.release()
    wait_until(lambda: threading.active_count() == threads - 3, "end of the connections")
    answers("farther", config, b.hostname)


def test_a_jump_that_fails_is_tried_once_for_all(bed: Bed, config: Path) -> None:
    put_first(config, f"Host far-*\n  HostName {bed[2].address}\n  ProxyJump nosuchuser@{bed[0].address}:2222\n")
    before = bed[0].sshd_log.count("Invalid user nosuchuser from")
    network = SshNetwork(config=config)
    _, errors = run_all({name: partial(network.reach, name) for name in ("far-1", "far-2", "far-3")})
    assert [error.where for error in errors] == ["far-1", "far-2", "far-3"]
    assert {error.code for error in errors} == {"SSH-AUTH"}
    # Whoever comes after the failure tries again: on a slow machine the last may.
    assert bed[0].sshd_log.count("Invalid user nosuchuser from") - before in (1, 2)


def test_eleven_sessions_on_one_host_take_two_connections(bed: Bed, config: Path) -> None:
    # One carries ten sessions (MaxSessions), and each one more has its own.
    before = bed[2].sshd_log.count("Accepted publickey")
    network = SshNetwork(config=config)
    benches = [Bench(SshTransport("c", network=network)) for _ in range(11)]
    with ThreadPoolExecutor(11) as pool:
        list(pool.map(lambda bench: bench.session.open(), benches))
        assert bed[2].sshd_log.count("Accepted publickey") == before + 2
        list(pool.map(lambda bench: bench.session.close(), benches))
    assert bed[2].wait_quiet() == []


def test_sshd_starts_again_while_a_session_is_open(bed: Bed, config: Path) -> None:
    host = bed[2]
    with Bench(SshTransport("c", config=config)) as bench:
        host.stop_sshd()
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(log_in, config, "c")
            time.sleep(0.1)
            host.start_sshd()
            later.result()
        bench.session.request("ping")
        assert bench.session.alive


def test_tokens_in_the_config(bed: Bed, config: Path, tmp_path: Path) -> None:
    key = tmp_path / f"c-root-22-100%-{os.uname().nodename}"
    key.write_bytes(bed.key.read_bytes())
    key.chmod(0o600)
    said = tmp_path / "said"
    proxy = f"echo '%n %r %p %% %h' >{said}; exec ssh -F {config} -W %h:%p a"
    head = f'Host c\n  IdentityFile %d/%n-%r-%p-100%%-%l\n  ProxyCommand sh -c "{proxy}"\n'
    text = config.read_text(encoding="utf-8")
    config.write_text(head + text.replace(f"  IdentityFile {bed.key}\n", ""), encoding="utf-8")
    put_first(config, f"Host a\n  IdentityFile {bed.key}\n")
    log_in(config, "c")
    assert said.read_text(encoding="utf-8") == f"c root 22 % {bed[2].address}\n"
    put_first(config, "Host c\n  ProxyCommand echo no way >&2; false\n")
    assert "its ProxyCommand says: no way" in no_login(config, "c").message


def test_what_else_the_config_says(bed: Bed, config: Path) -> None:
    put_first(config, "Host c\n  ServerAliveInterval 3\n  ConnectTimeout 1\n  AddressFamily inet6\n")
    target = resolve("c", config)
    assert (target.alive_interval_s, target.connect_timeout_s) == (3, 1.0)
    assert no_login(config, "c").code == "SSH-UNREACHABLE"
    put_first(
        config, "Host c\n  AddressFamily inet\n  HostKeyAlias machine\n  ConnectTimeout 15\n  BindAddress 127.0.0.9\n"
    )
    assert no_login(config, "c").code == "SSH-UNREACHABLE"  # no way from there
    put_first(config, "Host c\n  BindAddress 0.0.0.0\n")
    assert "is not in" in no_login(config, "c").message
    with known_hosts_of(config).open("a", encoding="ascii") as file:
        file.write(f"machine {public(bed[2].folder / 'host_key')}\n")
    log_in(config, "c")


def test_a_config_timeout_counts(bed: Bed, config: Path) -> None:
    put_first(config, "Host c\n  ConnectTimeout 1\n")
    bed[2].link.drop()
    try:
        started = time.monotonic()
        assert "timed out" in no_login(config, "c").message
        assert time.monotonic() - started < 4
    finally:
        bed[2].link.up()


def test_a_host_that_vanishes_behind_a_jump(bed: Bed, config: Path) -> None:
    c: Host = bed[2]
    put_first(config, f"Host far\n  HostName {c.address}\n  User root\n  ProxyJump a\n")
    with Bench(SshTransport("far", config=config), leash_s=2.0, heartbeat_s=0.5, grace_s=0.5) as bench:
        c.link.drop()
        try:
            assert "no sign of life for 2 s" in bench.wait_event("lost")["reason"]
            wait_until(lambda: not any("python" in process.command for process in c.processes()), "end of the agent")
        finally:
            c.link.up()


def test_a_user_that_openssh_matches(bed: Bed, config: Path) -> None:
    put_first(config, f'Match host c user other exec "test %n = c"\n  User root\n  HostName {bed[2].address}\n')
    assert openssh(config, "c")
    log_in(config, "c")
