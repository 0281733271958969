"""Stopping runs by their hosts: what is left in the record, with hosts that are down, twice, and without a record."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch import run_stop
from cpupp.launch.run_collect import LOCK, one_at_a_time
from cpupp.launch.run_find import find
from cpupp.launch.run_hosts import RunHosts, spec_of
from cpupp.launch.run_look import look_at_all
from cpupp.launch.run_stop import StopResult, end_launcher, is_over, stop_run
from cpupp.launch.runs import all_runs, launcher_alive, run_in, start_ticks
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.runs import LauncherRef, Run, choose
from cpupp.plan.runstate import RunState
from cpupp.plan.status import Recorded, run_status
from cpupp.render_runs import stop_exit, stop_page
from tests.unit.hosts_of_runs import RUN, ScriptedHost, open_hosts

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
HOSTNAME = Path("/proc/sys/kernel/hostname").read_text().strip()


def launcher(pid: int, start: int | None = None, boot: str = BOOT, hostname: str = HOSTNAME) -> dict[str, Any]:
    ticks = start_ticks(pid) if start is None else start
    return {"pid": pid, "start": ticks, "boot_id": boot, "hostname": hostname, "user": "me"}


def write(root: Path, run: str = RUN, **values: Any) -> Path:
    folder = root / f"pair-{run}"
    (folder / "logs").mkdir(parents=True)
    record = {
        "run": run,
        "name": "pair",
        "file": "/x/pair.yaml",
        "started": 1000.0,
        "launcher": launcher(1, start=-1),
        "detached": True,
        "hosts": [{"name": "a", "ssh": "a", "local": False}, {"name": "b", "ssh": "b", "local": False}],
        "attempt": 1,
        "status": "ready",
        "url": "http://a:8000/v1",
        "served_name": "m",
        **values,
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def stop(root: Path, *hosts: ScriptedHost, run: Run | None = None) -> StopResult:
    found = run or choose(all_runs(root), None)
    return stop_run(found, lambda: open_hosts(*hosts), root, grace=0.0, tell=lambda text: None)


def pair() -> tuple[ScriptedHost, ScriptedHost]:
    return ScriptedHost("a", 0, log=b"a one\na two\n"), ScriptedHost("b", 1, log=b"b one\n")


def test_a_detached_run_is_stopped_and_its_logs_are_fetched(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "logs" / "node-0-a.log").write_bytes(b"a one\n")
    hosts = pair()
    result = stop(tmp_path, *hosts)
    assert (result.run.state, result.by, result.missing, result.stuck) == (RunState.STOPPED, "hosts", (), ())
    assert [host.found for host in result.hosts] == [1, 1]
    assert (folder / "logs" / "node-0-a.log").read_bytes() == hosts[0].log
    assert (folder / "logs" / "node-1-b.log").read_bytes() == hosts[1].log
    assert [host.site for host in hosts] == [None, None]
    assert json.loads((folder / "result.json").read_text())["outcome"] == "stopped"
    assert stop_exit([result]) == 0


def test_a_record_that_hides_secrets_is_shorter_than_what_was_written(tmp_path: Path) -> None:
    folder = write(tmp_path, log_shifts={"0": 2})
    a, b = pair()
    a.log = b"a s3cr3tpass\na two\n"
    (folder / "logs" / "node-0-a.log").write_bytes(b"a <secret>\n")
    stop(tmp_path, a, b)
    assert (folder / "logs" / "node-0-a.log").read_bytes() == b"a <secret>\na two\n"


def test_stopping_again_asks_nobody(tmp_path: Path) -> None:
    write(tmp_path)
    hosts = pair()
    stop(tmp_path, *hosts)
    for host in hosts:
        host.orders.clear()
    again = stop(tmp_path, *hosts)
    assert (again.by, again.run.state, [host.orders for host in hosts]) == ("nobody", RunState.STOPPED, [[], []])


def test_what_another_stop_has_fetched_meanwhile_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path)
    hosts = pair()
    alone = one_at_a_time

    @contextmanager
    def behind_another(folder: Path) -> Iterator[None]:
        monkeypatch.setattr(run_stop, "one_at_a_time", alone)
        assert stop_exit([stop(tmp_path, *hosts)]) == 0
        with alone(folder):
            yield

    monkeypatch.setattr(run_stop, "one_at_a_time", behind_another)
    result = stop(tmp_path, *hosts)
    assert (result.run.state, result.missing, result.stuck) == (RunState.STOPPED, (), ())
    assert (folder / "logs" / "node-0-a.log").read_bytes() == hosts[0].log
    assert stop_exit([result]) == 0


def test_the_one_that_waits_keeps_the_next_out(tmp_path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()

    def second() -> None:
        with one_at_a_time(tmp_path):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=second)
    with one_at_a_time(tmp_path):
        thread.start()
        time.sleep(0.05)  # it waits for the lock; when it does not yet, the test shows less and still holds
    assert inside.wait(30)
    with (tmp_path / LOCK).open() as third, pytest.raises(BlockingIOError):
        fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
    leave.set()
    thread.join()


def test_a_record_that_cannot_be_written_keeps_what_the_hosts_have(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "run.json.new").mkdir()  # as a full disk: nothing can be written there
    hosts = pair()
    result = stop(tmp_path, *hosts)
    assert [host.found for host in result.hosts] == [1, 1]
    assert result.record_error is not None
    assert (result.record_error.code, result.run.state, stop_exit([result])) == ("STATE-FOLDER", RunState.STOPPED, 1)
    assert "not recorded: " in stop_page(result, 100).text()
    assert [host.site is None for host in hosts] == [False, False], "nobody was told to forget it"
    (folder / "run.json.new").rmdir()
    again = stop(tmp_path, *hosts)
    assert (again.record_error, stop_exit([again]), is_over(again.run)) == (None, 0, True)
    assert [host.site for host in hosts] == [None, None]
    assert (folder / "logs" / "node-0-a.log").read_bytes() == hosts[0].log


def test_a_host_that_is_down_is_named_and_finished_later(tmp_path: Path) -> None:
    folder = write(tmp_path)
    a, b = pair()
    b.down = True
    first = stop(tmp_path, a, b)
    assert (first.run.state, [host.host for host in first.missing]) == (RunState.STOPPING, ["b"])
    assert stop_exit([first]) == 5
    assert (folder / "logs" / "node-0-a.log").read_bytes() == a.log
    b.down = False
    # Without its peer it has failed meanwhile: that follows from the stop.
    b.end({"code": "PEER-LOST", "message": "rank 0 is silent", "node": 1, "time": 9.0, "last_lines": []})
    second = stop(tmp_path, a, b)
    assert (second.run.state, second.missing) == (RunState.STOPPED, ())
    assert (folder / "logs" / "node-1-b.log").read_bytes() == b.log
    assert stop_exit([second]) == 0


def test_a_run_that_failed_by_itself_stays_failed(tmp_path: Path) -> None:
    folder = write(tmp_path)
    a, b = pair()
    a.end({"code": "PEER-LOST", "message": "rank 1 is silent", "node": 0, "time": 3.0, "last_lines": []})
    b.end({"code": "RANK-SIGNAL", "message": "killed by SIGKILL", "node": 1, "time": 4.0, "last_lines": ["x"]})
    result = stop(tmp_path, a, b)
    assert result.run.state is RunState.FAILED
    first = json.loads((folder / "result.json").read_text())["first_failure"]
    assert (first["host"], first["message"], first["last_lines"]) == ("b", "killed by SIGKILL", ["x"])
    assert stop_exit([result]) == 0


def test_a_lost_record_is_made_anew(tmp_path: Path) -> None:
    lost = Run(run=RUN, name="pair", state=RunState.STARTING, detached=True)
    hosts = pair()
    result = stop(tmp_path, *hosts, run=lost)
    assert result.run.state is RunState.STOPPED
    assert (tmp_path / f"pair-{RUN}" / "logs" / "node-0-a.log").read_bytes() == hosts[0].log
    (found,) = all_runs(tmp_path)
    assert (found.run, found.state, is_over(found)) == (RUN, RunState.STOPPED, True)


def test_a_log_that_cannot_be_fetched_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    a, b = pair()

    def broken(**_: Any) -> None:
        raise CpuppError("AGENT-FAILED", "Input/output error")

    monkeypatch.setattr(b, "_run_log", broken)
    result = stop(tmp_path, a, b)
    assert [host.host for host in result.stuck] == ["b"]
    assert result.run.state is RunState.STOPPING
    assert a.site is not None
    assert b.site is not None
    assert stop_exit([result]) == 1


def test_another_run_on_the_same_hosts_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path)
    others = ScriptedHost("a", 0, run="1130-999999-ffff"), ScriptedHost("b", 1, run="1130-999999-ffff")
    stop(tmp_path, *others)
    assert all(host.site is not None and host.site["held"] for host in others)


# The launcher ---------------------------------------------------------------------------------------------------------


def test_a_launcher_is_known_by_its_start_not_by_its_pid_alone() -> None:
    me = os.getpid()
    mine = LauncherRef(**launcher(me))
    assert launcher_alive(mine) is True
    assert launcher_alive(LauncherRef(**launcher(me, start=mine.start + 1))) is False
    assert launcher_alive(LauncherRef(**launcher(me, boot="other"))) is False
    assert launcher_alive(LauncherRef(**launcher(me, boot="other", hostname="elsewhere"))) is None


def test_a_run_without_its_launcher_is_crashed_unless_it_is_detached(tmp_path: Path) -> None:
    write(tmp_path, detached=False)
    write(tmp_path, run="1130-000000-0000", detached=True)
    states = {run.run: run.state for run in all_runs(tmp_path)}
    assert states == {RUN: RunState.CRASHED, "1130-000000-0000": RunState.READY}


@pytest.mark.parametrize("damaged", ["", "[]", '{"run": "1130-00'])
def test_a_run_whose_record_is_damaged_may_live_and_is_still_listed(tmp_path: Path, damaged: str) -> None:
    folder = write(tmp_path)
    (folder / "run.json").write_text(damaged)
    assert all_runs(tmp_path) == []  # nothing tells where its hosts are
    (folder / "spec.yaml").write_text("name: pair\n")
    found = choose(all_runs(tmp_path), RUN)
    assert (found.name, found.detached, found.live) == ("pair", True, True)
    (folder / "result.json").write_text('{"outcome": "failed"}')
    assert not choose(all_runs(tmp_path), RUN).live


def test_a_launcher_that_was_killed_is_the_failure_of_its_run(tmp_path: Path) -> None:
    run = run_in(write(tmp_path, detached=False))
    assert run is not None
    first = run_status(run, Recorded(), {}, {}, now=2000.0).first_failure
    assert first is not None
    assert first.code == "LAUNCHER-LOST"
    result = stop(tmp_path, *pair())
    assert stop_exit([result]) == ExitCode.OK
    assert (
        json.loads((tmp_path / f"pair-{RUN}" / "result.json").read_text())["first_failure"]["code"] == "LAUNCHER-LOST"
    )


def test_broken_records_are_passed_over(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text('{"run": "x", ')
    (tmp_path / "bench-1").mkdir()
    assert [run.run for run in all_runs(tmp_path)] == [RUN]
    assert all_runs(tmp_path / "none") == []
    assert run_in(folder / "logs") is None


@pytest.mark.parametrize("ignores", [1, 0])
def test_a_launcher_is_asked_once_and_then_urged(ignores: int) -> None:
    # It ends at the SIGTERM after those that it ignores, as `cpupp launch` does when its ranks are slow.
    code = (
        "import signal, sys\n"
        "left = [int(sys.argv[1])]\n"
        "def handle(*_):\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0: sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, handle)\n"
        "print(flush=True)\n"
        "while True: signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(ignores)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert end_launcher(LauncherRef(**launcher(process.pid)), grace=-9.5) is True
        assert process.wait(10) == 0


def test_a_pid_that_now_belongs_to_another_process_is_not_signalled() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ref = LauncherRef(**launcher(process.pid, start=1))
        assert end_launcher(ref, grace=0.0) is True
        assert process.poll() is None
        process.kill()


# Records that are out of date -----------------------------------------------------------------------------------------


def test_a_detached_run_that_ended_by_itself_no_longer_counts_as_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, run="1130-000000-0000", started=900.0)
    write(tmp_path)
    hosts = pair()  # they know the second run alone
    monkeypatch.setattr("cpupp.launch.run_look.hosts_of", lambda spec: open_hosts(*hosts))
    monkeypatch.setattr("cpupp.launch.run_find.hosts_of", lambda spec: open_hosts(*hosts))
    assert find(tmp_path, None, None).run.run == RUN
    states = {run.run: run.state for run in all_runs(tmp_path)}
    assert states == {RUN: RunState.READY, "1130-000000-0000": RunState.CRASHED}


def test_many_runs_on_the_same_hosts_are_looked_at_by_one_way_to_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        write(tmp_path, run=f"1130-000000-{number:04x}")
    hosts = pair()
    made: list[None] = []

    def hosts_of(spec: ClusterSpec) -> RunHosts:
        made.append(None)
        return open_hosts(*hosts)

    monkeypatch.setattr("cpupp.launch.run_look.hosts_of", hosts_of)
    assert len(look_at_all(all_runs(tmp_path))) == 40
    assert len(made) == 1


def test_live_runs_stay_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, run="1130-000000-0000")
    write(tmp_path)
    hosts = pair()
    hosts[1].down = True  # it might have the other run
    monkeypatch.setattr("cpupp.launch.run_look.hosts_of", lambda spec: open_hosts(*hosts))
    with pytest.raises(CpuppError) as caught:
        find(tmp_path, "pair", None)
    assert caught.value.code == "RUN-AMBIGUOUS"


@pytest.mark.parametrize(
    "damage",
    [
        {"attempt": float("inf")},
        {"started": float("nan")},
        {"launcher": {"pid": 10**400, "start": 0}},
        {"log_shifts": {"\u00b2": 1}},
        {"hosts": [{"name": None, "ssh": 5}]},
        {"hosts": [{"name": "a", "ssh": "::@@ x"}]},
        {"name": "../../x"},
    ],
)
def test_a_damaged_record_hides_no_other_run(tmp_path: Path, damage: dict[str, Any]) -> None:
    write(tmp_path)
    write(tmp_path, "1130-000000-dead", **damage)
    write(tmp_path, "1130-000000-deep").joinpath("run.json").write_text("[" * 100_000)
    found = {run.run: run for run in all_runs(tmp_path)}
    assert set(found) == {RUN, "1130-000000-dead"}
    with suppress(CpuppError):  # and no other error
        spec_of(found["1130-000000-dead"])
