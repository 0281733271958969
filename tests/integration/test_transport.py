"""The way to a host, against real OpenSSH: keys, known hosts, jumps, shells, and connections that break."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import paramiko
import pytest

from cpupp.errors import CpuppError
from cpupp.launch.ssh import SshConnection, SshTransport
from cpupp.launch.ssh_network import Lease
from cpupp.launch.transport import ConnectionLostError, LocalTransport
from tests.integration.agent_bench import GONE_S, Bench, wait_until
from tests.integration.ssh_bench import answers, client_config, known_hosts_of, refused
from tests.testbed.bed import Bed, Host, HostOptions, hosts


class BrokenChannel:
    """A channel whose connection breaks while it sends, as paramiko has it then."""

    def fileno(self) -> int:
        return 0

    def sendall(self, data: bytes) -> None:
        raise EOFError


def test_a_connection_that_breaks_while_it_sends_is_lost() -> None:
    connection = SshConnection(cast("Lease", None), cast("paramiko.Channel", BrokenChannel()))
    with pytest.raises(ConnectionLostError, match="EOFError"):
        connection.send(b"x")


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with hosts(HostOptions(port=2222, user="rank"), HostOptions()) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_ssh_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def config(bed: Bed, tmp_path: Path) -> Path:
    """A copy of the bed's SSH config and known hosts, for a test to change."""
    return client_config(bed, tmp_path)


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_alias_and_an_address_reach_the_host(bed: Bed, config: Path, name: str) -> None:
    host = next(host for host in bed if host.name == name)
    answers(name, config, host.hostname)
    answers(host.ssh, config, host.hostname)


@pytest.mark.parametrize("index", [0, 1], ids=["as a user", "as root"])
def test_a_run_over_ssh_leaves_nothing(bed: Bed, config: Path, index: int) -> None:
    host = bed[index]
    odd = {"ODD": "a'; echo $HOME | x\n"}
    with Bench(SshTransport(host.name, config=config)) as bench:
        code = "print(os.environ['ODD'], flush=True); held = segment('left'); ignore_term(); time.sleep(600)"
        bench.start(code, python="/usr/bin/python3", env=odd)
        wait_until(lambda: bench.output() == "a'; echo $HOME | x\n\n", "output")
        assert bench.site.is_relative_to(host.home)
        assert len(host.processes()) >= 4
    assert host.wait_quiet() == []
    assert host.shm() == []
    assert list(host.path(host.home / ".cache").iterdir()) == []


def test_an_unknown_key_is_refused_with_the_line_to_add(bed: Bed, config: Path) -> None:
    known = known_hosts_of(config)
    known.write_text("", encoding="ascii")
    error = refused("a", config)
    assert error.code == "SSH-HOST-KEY"
    public = bed[0].folder / "host_key.pub"
    printed = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout
    assert printed.split()[1] in error.message
    line = error.hint.rpartition(": ")[2]
    assert line.startswith(f"[{bed[0].address}]:2222 ssh-ed25519 ")
    assert known.read_text(encoding="ascii") == ""
    known.write_text(line + "\n", encoding="ascii")
    answers("a", config, bed[0].hostname)


def test_a_changed_key_stops_and_names_file_and_line(bed: Bed, config: Path) -> None:
    known = known_hosts_of(config)
    first, second = known.read_text(encoding="ascii").splitlines()
    swapped = f"# a comment\n{first.split()[0]} {second.partition(' ')[2]}\n"
    known.write_text(swapped, encoding="ascii")
    error = refused("a", config)
    assert error.code == "SSH-HOST-KEY-CHANGED"
    assert f"{known} line 2 has SHA256:" in error.message
    assert known.read_text(encoding="ascii") == swapped


def test_a_revoked_key_stops(bed: Bed, config: Path) -> None:
    known = known_hosts_of(config)
    text = known.read_text(encoding="ascii")
    known.write_text(text + "@revoked * " + text.splitlines()[0].partition(" ")[2] + "\n", encoding="ascii")
    assert "revoked" in refused("a", config).message
    answers("b", config, bed[1].hostname)


def test_hashed_known_hosts(bed: Bed, config: Path) -> None:
    known = known_hosts_of(config)
    subprocess.run(["ssh-keygen", "-H", "-f", known], check=True, capture_output=True)
    assert "|1|" in known.read_text(encoding="ascii")
    answers("a", config, bed[0].hostname)
    answers("b", config, bed[1].hostname)


def test_wrong_user_and_wrong_key(bed: Bed, config: Path, tmp_path: Path) -> None:
    error = refused(f"nobody@{bed[1].address}", config)
    assert error.code == "SSH-AUTH"
    assert "no key was accepted for user nobody" in error.message
    assert str(bed.key) in error.message
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    config.write_text(config.read_text(encoding="utf-8").replace(str(bed.key), str(other)), encoding="utf-8")
    assert str(other) in refused("b", config).message


def test_a_locked_key_says_so(bed: Bed, config: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret words", "-f", locked], check=True)
    config.write_text(config.read_text(encoding="utf-8").replace(str(bed.key), str(locked)), encoding="utf-8")
    assert f"{locked} needs its passphrase: ssh-add it" in refused("b", config).message


def test_more_keys_than_the_server_takes_at_once(bed: Bed, config: Path, tmp_path: Path) -> None:
    text = config.read_text(encoding="utf-8")
    for number in range(8):
        key = tmp_path / f"key{number}"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        text = text.replace(f"  IdentityFile {bed.key}", f"  IdentityFile {key}\n  IdentityFile {bed.key}")
    config.write_text(text, encoding="utf-8")
    answers("b", config, bed[1].hostname)


def test_the_agent_of_the_user(bed: Bed, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    socket = tmp_path / "agent"
    server = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket.exists, "ssh-agent")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", "-q", bed.key], check=True, stderr=subprocess.DEVNULL)
        lines = config.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if "Identit" not in line]
        config.write_text("\n".join(kept) + "\n", encoding="utf-8")
        answers("b", config, bed[1].hostname)
    finally:
        server.terminate()
        server.wait()


def test_nobody_listens_and_no_such_name(bed: Bed, config: Path) -> None:
    error = refused(f"root@{bed[1].address}:1", config)
    assert error.code == "SSH-UNREACHABLE"
    assert "Connection refused" in error.message
    assert refused("root@no-such-host.invalid", config).code == "SSH-UNREACHABLE"


def test_a_host_that_swallows_packets_is_given_up(bed: Bed, config: Path) -> None:
    bed[1].link.drop()
    try:
        error = refused("b", config, connect_timeout_s=2.0)
        assert error.code == "SSH-UNREACHABLE"
        assert "timed out" in error.message
    finally:
        bed[1].link.up()


def test_something_that_is_no_ssh_server(config: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        error = refused(f"root@127.0.0.1:{server.getsockname()[1]}", config, connect_timeout_s=2.0)
    assert error.code == "SSH-UNREACHABLE"
    assert "says nothing that an SSH server says" in error.message


def test_jumps_with_user_and_port(bed: Bed, config: Path) -> None:
    a, b = bed
    text = config.read_text(encoding="utf-8")
    jump = f"Host behind\n  HostName {b.address}\n  User root\n  ProxyJump {a.user}@{a.address}:{a.port}\n\n"
    jump += f"Host far\n  HostName {b.address}\n  User root\n  ProxyJump a,b\n\n"
    config.write_text(jump + text, encoding="utf-8")
    answers("behind", config, b.hostname)
    answers("far", config, b.hostname)


def test_an_error_at_a_jump_names_the_jump(bed: Bed, config: Path) -> None:
    text = f"Host behind\n  HostName {bed[1].address}\n  ProxyJump root@{bed[0].address}:1\n\n"
    config.write_text(text + config.read_text(encoding="utf-8"), encoding="utf-8")
    assert f"cannot connect to root@{bed[0].address}:1" in refused("behind", config).message


def test_a_proxy_command(bed: Bed, config: Path) -> None:
    code = "import socket,sys,os,threading as t; s=socket.create_connection((sys.argv[1],int(sys.argv[2])));"
    code += "t.Thread(target=lambda:[s.sendall(d) for d in iter(lambda:os.read(0,65536),b'')],daemon=True).start();"
    code += "[os.write(1,d) for d in iter(lambda:s.recv(65536),b'')]"
    text = f'Host piped\n  HostName {bed[1].address}\n  User root\n  ProxyCommand python3 -c "{code}" %h %p\n\n'
    config.write_text(text + config.read_text(encoding="utf-8"), encoding="utf-8")
    answers("piped", config, bed[1].hostname)


def test_include_and_match_are_left_to_openssh(bed: Bed, config: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text(f"Host included\n  HostName {bed[0].address}\n  User rank\n", encoding="utf-8")
    head = f'Include {more}\nMatch host {bed[0].address} exec "true"\n  Port 2222\n\n'
    config.write_text(head + config.read_text(encoding="utf-8"), encoding="utf-8")
    answers("included", config, bed[0].hostname)


def test_a_config_that_is_missing(bed: Bed, tmp_path: Path) -> None:
    error = refused("a", tmp_path / "none")
    assert error.code == "SSH-CONFIG"


@pytest.fixture
def odd_host(tmp_path: Path) -> Iterator[Host]:
    """A host whose PATH has nothing, and whose shell prints before everything."""
    banner = tmp_path / "banner"
    banner.write_text("*** authorised use only ***\n", encoding="utf-8")
    with hosts(HostOptions(sshd_config=[f"Banner {banner}"])) as bed:
        yield bed[0]


def test_noise_before_the_agent_is_ignored(odd_host: Host) -> None:
    rc = odd_host.path(odd_host.home / ".bashrc")
    rc.write_text("echo hello from bashrc\nfor i in $(seq 2000); do echo noise $i; done\necho err >&2\nprintf half\n")
    answers("a", odd_host.bed.ssh_config, odd_host.hostname)


def test_a_host_without_python_says_so_in_its_own_words(odd_host: Host) -> None:
    odd_host.path(odd_host.home / ".bashrc").write_text("PATH=/nowhere\necho noise\n")
    error = refused("a", odd_host.bed.ssh_config)
    assert error.code == "SSH-NO-PYTHON"
    assert "exit status 127" in error.message
    assert "exec: python3: not found" in error.message


def test_an_account_that_may_run_nothing(odd_host: Host) -> None:
    odd_host.path(odd_host.home / ".bashrc").write_text("echo this account is closed >&2; exit 1\n")
    error = refused("a", odd_host.bed.ssh_config)
    assert error.code == "AGENT-START"
    assert "exit status 1" in error.message
    assert "this account is closed" in error.message


def test_a_cut_link_is_noticed_on_both_sides() -> None:
    with hosts(1) as bed:
        host = bed[0]
        with Bench(SshTransport("a", config=bed.ssh_config), leash_s=3.0, heartbeat_s=0.5, grace_s=1.0) as bench:
            bench.start("ignore_term(); say('main'); time.sleep(600)")
            bench.pid_of("main")
            host.link.drop()
            assert "no sign of life for 3 s" in bench.wait_event("lost")["reason"]
            agents = [process for process in host.processes() if "sshd" not in process.command]
            wait_until(
                lambda: not any("python" in process.command for process in host.processes()), f"end of {agents}", GONE_S
            )
            host.link.up()
        site = host.path(host.home / ".cache")
        assert list(site.iterdir()) == []


def test_a_killed_sshd_ends_the_run() -> None:
    with hosts(1) as bed:
        host = bed[0]
        with Bench(SshTransport("a", config=bed.ssh_config)) as bench:
            main = bench.start("say('main'); time.sleep(600)")
            bench.pid_of("main")
            for process in host.processes():
                if process.command.startswith("sshd"):
                    os.kill(process.pid, 9)
            bench.wait_event("lost")
            with pytest.raises(CpuppError) as caught:
                bench.session.request("ping")
            assert caught.value.code == "HOST-LOST"
            del main
            assert host.wait_quiet() == []


def test_many_sessions_at_once_within_max_startups() -> None:
    from concurrent.futures import ThreadPoolExecutor

    # Each with connections of its own, as launchers that know nothing of each other.
    with hosts(HostOptions(sshd_config=["MaxStartups 3"])) as bed:
        benches = [Bench(SshTransport("a", config=bed.ssh_config)) for _ in range(12)]
        with ThreadPoolExecutor(12) as pool:
            for _ in pool.map(lambda bench: bench.session.open(), benches):
                pass
            list(pool.map(lambda bench: bench.session.close(), benches))
        assert bed[0].wait_quiet() == []


@pytest.mark.parametrize("way", ["local", "ssh"])
def test_sessions_leave_no_descriptor_and_no_thread(bed: Bed, config: Path, way: str) -> None:
    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def cycle() -> None:
        with Bench(SshTransport("b", config=config) if way == "ssh" else LocalTransport()) as bench:
            bench.start("time.sleep(600)")

    cycle()
    before = num_descriptors(), threading.active_count()
    for _ in range(5):
        cycle()
    # paramiko's thread closes its socket a moment later.
    wait_until(lambda: num_descriptors() <= before[0], f"return to {before[0]} descriptors")
    wait_until(lambda: threading.active_count() <= before[1], "the end of all threads")


def test_paramiko_prints_nothing(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refused("root@127.0.0.1:1", config)
    known_hosts_of(config).write_text("", encoding="ascii")
    refused("a", config)
    assert capfd.readouterr() == ("", "")
