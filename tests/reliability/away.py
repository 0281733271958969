"""Hosts that were away for a minute and came back, sshd killed, and the launcher's whole machine lost."""

from __future__ import annotations

import json
import signal
import time

from cpupp.errors import ExitCode
from tests.e2e.runs import Run, greedy
from tests.integration.fault_cases import cut
from tests.integration.faults import DOWN_S, KEPT, LEASH_S, Fault, Lane, Strike, cpupp, left_on

AWAY_S = 60.0


def back_after(index: int, *, detached: bool) -> Strike:
    """The host comes back a minute later: nothing of the run is left there, and `stop` finishes what it could not."""

    def back(run: Run, lane: Lane) -> None:
        until = time.monotonic() + AWAY_S
        if detached:
            unreached = cpupp(run, lane, "stop")
            assert unreached.returncode == ExitCode.UNREACHABLE, unreached.stderr
        time.sleep(max(0.0, until - time.monotonic()))
        lane.hosts[index].link.up()
        left = left_on(lane.hosts, DOWN_S)
        assert left == [], left
        for _ in range(2):
            finished = cpupp(run, lane, "stop")
            assert finished.returncode == 0, finished.stderr
        _nothing_kept(lane)

    return back


def _nothing_kept(lane: Lane) -> None:
    for host in lane.hosts:
        kept = host.path(host.home / ".cache" / "cpupp" / KEPT)
        assert not kept.exists(), f"{host.name}: {kept}"


def lose_sshd(index: int) -> Strike:
    """The sshd that listens is killed: sessions live on, and so does the run, which stops as it should."""

    def strike(run: Run, lane: Lane) -> None:
        lane.hosts[index].kill_sshd()
        time.sleep(3)
        greedy(lane.hosts[0].address, "Hello", num_tokens=2)
        run.process.send_signal(signal.SIGINT)

    return strike


def lose_sshd_detached(index: int) -> Strike:
    """Without sshd, `stop` says which host it cannot reach, and ends the others; with it, it ends all."""

    def strike(run: Run, lane: Lane) -> None:
        lane.hosts[index].kill_sshd()
        time.sleep(3)
        greedy(lane.hosts[0].address, "Hello", num_tokens=2)
        assert (stopped := cpupp(run, lane, "stop")).returncode == ExitCode.UNREACHABLE, stopped.stderr
        assert lane.hosts[index].name in stopped.stdout + stopped.stderr

    return strike


def revive(index: int) -> Strike:
    """The host's sshd is there again, and `stop` ends what was left."""

    def repair(run: Run, lane: Lane) -> None:
        lane.hosts[index].revive()
        if run.process.poll() is None:
            run.wait(DOWN_S)
            return
        assert (stopped := cpupp(run, lane, "stop")).returncode == 0, stopped.stderr
        _nothing_kept(lane)

    return repair


def lose_launcher(run: Run, lane: Lane) -> None:
    """The launcher's machine loses its power."""
    lane.hosts[0].bed[-1].crash()


def rule_from_elsewhere(run: Run, lane: Lane) -> None:
    """The launcher's machine is gone, with its record: another one sees the run, and stops it, by the cluster file."""
    lose_launcher(run, lane)
    time.sleep(5)
    file, elsewhere = str(run.folder / "cluster.yaml"), run.folder / "elsewhere"
    greedy(lane.hosts[0].address, "Hello", num_tokens=2)
    status = cpupp(run, lane, "status", file, "--json", state=elsewhere)
    assert status.returncode == 0, status.stdout + status.stderr
    data = json.loads(status.stdout)["data"]
    assert (data["state"], [rank["alive"] for rank in data["ranks"]]) == ("ready", [True, True]), data
    assert (stopped := cpupp(run, lane, "stop", file, state=elsewhere)).returncode == 0, stopped.stderr
    _nothing_kept(lane)


def nothing_elsewhere(run: Run, lane: Lane) -> None:
    """The launcher's machine comes back; from elsewhere there is nothing to stop any more."""
    again = cpupp(run, lane, "stop", str(run.folder / "cluster.yaml"), state=run.folder / "elsewhere")
    assert again.returncode == 0, again.stderr
    lane.hosts[0].bed[-1].revive()
    # A session of sshd, which is not ours, ends when its last packet is sent again: the pauses double up to then.
    left = left_on(lane.hosts, AWAY_S)
    assert left == [], left


AWAY = [
    *(
        Fault(
            name=f"serving: {host} away for {AWAY_S:g} s, then back",
            strike=cut(index),
            repair=back_after(index, detached=False),
            bound_s=LEASH_S,
            host=index,
            code="HOST-LOST",
        )
        for index, host in enumerate(("head", "follower"))
    ),
    *(
        Fault(
            name=f"detached: {host} away for {AWAY_S:g} s, then back",
            at="detached",
            strike=cut(index),
            repair=back_after(index, detached=True),
            bound_s=LEASH_S,
            exit_code=0,
        )
        for index, host in enumerate(("head", "follower"))
    ),
    Fault(name="serving: SIGKILL of sshd on follower, then stop", strike=lose_sshd(1), repair=revive(1), exit_code=130),
    Fault(
        name="detached: SIGKILL of sshd on follower, then stop",
        at="detached",
        strike=lose_sshd_detached(1),
        repair=revive(1),
        exit_code=0,
        bound_s=LEASH_S,
    ),
    Fault(
        name="serving: launcher's machine gone",
        strike=lose_launcher,
        repair=nothing_elsewhere,
        launcher_host=True,
        exit_code=-signal.SIGKILL,
        bound_s=LEASH_S,
    ),
    Fault(
        name="detached: launcher's machine gone, status and stop from another",
        at="detached",
        strike=rule_from_elsewhere,
        repair=nothing_elsewhere,
        launcher_host=True,
        exit_code=0,
        bound_s=LEASH_S,
    ),
]
