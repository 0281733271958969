"""The test bed itself: hosts that differ in what they should, share what they should, and go away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from tests.testbed import leaks, processes, sweep
from tests.testbed.bed import Bed, Host, HostOptions, hosts
from tests.testbed.host import wait_for
from tests.testbed.processes import OrphanWatch

ROOT = Path(__file__).resolve().parents[2]
SHM_DEVICE = "import os; print(os.stat('/dev/shm').st_dev)"
BOOT_ID = "print(open('/proc/sys/kernel/random/boot_id').read())"


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with hosts(HostOptions(), HostOptions(port=2222, user="me", shm_size="8m", env={"GREETING": "a 'b' c"})) as bed:
        yield bed


def ssh(host: Host, *command: str) -> str:
    done = subprocess.run(host.bed.ssh_argv(host, *command), capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def test_openssh_reaches_each_host_as_its_user(bed: Bed) -> None:
    assert [ssh(host, "hostname; id -un; pwd").split() for host in bed] == [
        ["host-a", "root", "/home/root"],
        ["host-b", "me", "/home/me"],
    ]


def test_paramiko_checks_the_host_key_and_gets_in(bed: Bed) -> None:
    host = bed[1]
    with paramiko.SSHClient() as client:
        client.load_host_keys(str(bed.known_hosts))
        client.connect(
            host.address, host.port, host.user, key_filename=str(bed.key), allow_agent=False, look_for_keys=False
        )
        _, stdout, _ = client.exec_command("hostname")
        assert stdout.read() == b"host-b\n"


def test_a_host_is_refused_by_a_client_that_knows_another_key(bed: Bed) -> None:
    known = bed.folder / "wrong_known_hosts"
    right = bed.known_hosts.read_text(encoding="ascii").splitlines()
    known.write_text(f"{bed[0].address} {right[1].split(' ', 1)[1]}\n", encoding="ascii")
    argv = ["ssh", "-o", f"UserKnownHostsFile={known}", *bed.ssh_argv(bed[0], "true")[1:]]
    assert "Host key verification failed" in subprocess.run(argv, capture_output=True, text=True, check=False).stderr


def test_the_environment_of_a_host_reaches_ssh_sessions_and_runs(bed: Bed) -> None:
    assert ssh(bed[1], 'printf %s "$GREETING"') == "a 'b' c"
    assert bed[1].run(["printenv", "GREETING"]).stdout == "a 'b' c\n"


def test_shared_memory_differs_though_the_boot_id_is_equal(bed: Bed) -> None:
    a, b = bed
    assert a.python(BOOT_ID) == b.python(BOOT_ID)
    here = str(Path("/dev/shm").stat().st_dev)
    assert len({a.python(SHM_DEVICE), b.python(SHM_DEVICE), here}) == 3
    a.run(["touch", "/dev/shm/only-a"])
    assert (a.shm(), b.shm()) == (["only-a"], [])
    assert not Path("/dev/shm/only-a").exists()
    a.run(["rm", "/dev/shm/only-a"])


def test_shared_memory_has_the_size_asked_for(bed: Bed) -> None:
    size = bed[1].python("import os; s = os.statvfs('/dev/shm'); print(s.f_frsize * s.f_blocks)")
    assert int(size) == 8 << 20


def test_the_interface_of_a_host_is_the_one_in_its_sysfs(bed: Bed) -> None:
    assert sorted(bed[0].run(["ls", "/sys/class/net"]).stdout.split()) == ["eth0", "lo"]
    outside = Path("/sys/fs/cgroup")
    expected = sorted(entry.name for entry in outside.iterdir()) if outside.is_dir() else []
    assert bed[0].run(["ls", "/sys/fs/cgroup"]).stdout.split() == expected


def test_each_host_has_its_core(bed: Bed) -> None:
    available = sorted(os.sched_getaffinity(0))
    for index, host in enumerate(bed):
        cores = "import os; print(sorted(os.sched_getaffinity(0)))"
        assert host.python(cores) == str([available[index % len(available)]])
        assert ssh(host, f'python3 -c "{cores}"') == host.python(cores)


def test_files_in_the_tmp_of_a_host_are_its_own_and_tmp_path_is_shared(bed: Bed, tmp_path: Path) -> None:
    bed[0].run(["touch", "/tmp/mine", str(tmp_path / "ours")])
    assert (bed[0].tmp(), bed[1].tmp()) == (["mine"], [])
    assert (tmp_path / "ours").exists()
    assert bed[0].path("/tmp/mine").exists()


def test_bytes_between_two_hosts_are_counted(bed: Bed) -> None:
    a, b = bed
    before = a.bytes_sent(), b.bytes_received()
    transfer(a, b, 4 << 20)
    for count in (a.bytes_sent() - before[0], b.bytes_received() - before[1]):
        assert 4 << 20 <= count <= 5 << 20


def test_processes_are_seen_with_their_cpu_time_and_killed_by_namespace(bed: Bed) -> None:
    a, b = bed
    # A new session and an orphan: neither parent nor group would find it.
    a.run(["sh", "-c", "setsid sh -c 'while :; do :; done' >/dev/null 2>&1 & exit 0"])
    (busy,) = a.processes()
    assert b.processes() == []
    wait_for(lambda: a.cpu_seconds() > 0.1, "CPU time", 30)
    a.kill_processes()
    assert a.processes() == []
    assert not processes.alive(busy.pid)


def test_names_and_resolution_can_be_set() -> None:
    with hosts(2, every=HostOptions(hostname="same", etc_hosts=["192.0.2.9 same other"], interface="lan7")) as [a, b]:
        for host in (a, b):
            assert host.run(["hostname"]).stdout == "same\n"
            assert host.python("import socket; print(socket.gethostbyname('other'))") == "192.0.2.9"
            assert "lan7" in host.run(["ip", "-brief", "address"]).stdout


def test_the_rate_of_a_link_holds_both_ways() -> None:
    with hosts(HostOptions(rate="80mbit"), HostOptions()) as [slow, fast]:
        for sender, receiver in ((slow, fast), (fast, slow)):
            assert 3e6 < transfer(sender, receiver, 5_000_000) < 11e6  # 80 Mbit/s are 10e6, and cores are shared


def test_sshd_settings_of_the_test_win() -> None:
    with hosts(1, every=HostOptions(sshd_config=["PermitRootLogin no"])) as [host]:
        refused = subprocess.run(host.bed.ssh_argv(host, "true"), capture_output=True, text=True, check=False)
        assert refused.returncode == 255
        assert "Permission denied" in refused.stderr
        assert "ROOT LOGIN REFUSED" in host.sshd_log


def test_a_link_can_be_pulled_silenced_and_restored(bed: Bed) -> None:
    a = bed[0]
    carrier = "print(open('/sys/class/net/eth0/carrier').read())"
    assert answers(a)
    a.link.drop()
    assert (answers(a), a.python(carrier)) == (False, "1")
    a.link.down()
    assert (answers(a), a.python(carrier)) == (False, "0")
    a.link.up()
    wait_for(lambda: answers(a), "answer")


def test_a_crash_leaves_nothing_running_and_nothing_reachable() -> None:
    with hosts(1) as [host]:
        host.popen(["sleep", "1000"])
        host.crash()
        assert host.processes() == []
        assert not answers(host)


def test_everything_is_gone_after_a_failure() -> None:
    with pytest.raises(KeyboardInterrupt), hosts(2) as bed:  # noqa: PT012 (the way out of a full bed is the test)
        bed[0].popen(["sleep", "1000"])
        client = subprocess.Popen(bed.ssh_argv(bed[1], "sleep 1000"), stderr=subprocess.DEVNULL)
        wait_for(lambda: any("sleep" in process.command for process in bed[1].processes()), "sleep")
        pids = [process.pid for host in bed for process in host.processes()] + [host.pid for host in bed]
        raise KeyboardInterrupt
    assert client.wait(10) == 255
    assert bed.leftovers() == []
    assert not any(processes.alive(pid) for pid in pids)


def test_everything_is_gone_after_the_test_run_was_killed() -> None:
    program = (
        "import time\nfrom tests.testbed.bed import hosts\n"
        "with hosts(2) as bed:\n    bed[0].popen(['sleep', '1000'])\n    print(bed.id, flush=True)\n"
        "    time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        bed_id = run.stdout.readline().strip()
        assert len([line for line in sweep.leftovers(bed_id) if "process" in line]) == 5
        run.send_signal(signal.SIGKILL)
    wait_for(lambda: sweep.leftovers(bed_id) == [], "end of the bed")


def test_a_bed_without_a_janitor_is_found_and_swept() -> None:
    with hosts(1) as bed:
        assert bed.id not in sweep.dead_beds()
        (bed.folder / sweep.OWNER_FILE).write_text(f"{os.getpid()} 1\n", encoding="ascii")  # of another process
        assert bed.id in sweep.dead_beds()
        sweep.sweep(bed.id)
        assert bed.leftovers() == []


def test_an_orphan_is_known_as_one_and_fetched_when_it_ends(orphan_watch: OrphanWatch) -> None:
    # The parent waits until the watch has seen its child, then ends and leaves it.
    script = ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!; read line"]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(lambda: orphan_watch.knows(pid), "sight of the child")
    assert [process.pid for process in orphan_watch.orphans()] == [pid]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: processes.look(pid) is None, "end of the zombie")
    assert leaks.end_orphans(orphan_watch) == []


def transfer(sender: Host, receiver: Host, size: int) -> float:
    """Send `size` bytes over one TCP connection; returns bytes per second."""
    serve = (
        "import socket, sys\n"
        "server = socket.create_server((sys.argv[1], 5001)); print('ready', flush=True)\n"
        "peer, _ = server.accept()\nwhile peer.recv(1 << 16): pass"
    )
    send = "import socket, sys\nsocket.create_connection((sys.argv[1], 5001)).sendall(bytes(int(sys.argv[2])))"
    with receiver.popen([sys.executable, "-c", serve, receiver.address], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        with sender.popen([sys.executable, "-c", send, receiver.address, str(size)]) as client:
            # The clock starts with the first bytes on the wire, not with the start of Python.
            start_bytes = sender.bytes_sent()
            wait_for(lambda: sender.bytes_sent() - start_bytes > 100_000, "bytes")
            start = time.monotonic()
            assert client.wait(30) == 0
        assert server.wait(30) == 0
    return size / (time.monotonic() - start)


def answers(host: Host) -> bool:
    """Whether the host accepts a TCP connection at once."""
    try:
        with socket.create_connection((host.address, host.port), timeout=0.3):
            return True
    except OSError:
        return False
