"""Faults that a run without a launcher must bear, and full disks on its hosts."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import replace

from tests.e2e.runs import Run, greedy
from tests.integration.fault_cases import KILL, num_processes
from tests.integration.faults import DOWN_S, READY_S, Fault, Lane, Strike, cpupp, send, start

BURST = "x" * 99 + "\n"
BURST_LINES = 100_000
BURST_AFTER_S = 15.0
HOME_SIZE = "4m"
STOP_S = 20.0
"""An orderly stop: five seconds of grace, and what the hosts kept is fetched."""


def stop(run: Run, lane: Lane) -> float:
    """End a run that has no launcher."""
    began = time.monotonic()
    stopped = cpupp(run, lane, "stop")
    assert stopped.returncode == 0, stopped.stderr
    return began


def count_burst(run: Run, lane: Lane) -> float:
    """Every line of the burst comes to who asks, and into the record once the run was stopped."""
    deadline = time.monotonic() + READY_S
    while cpupp(run, lane, "logs", "--grep", "burst of 10 MB written").stdout.count("written") < len(lane.hosts):
        assert time.monotonic() < deadline, "the ranks have not written their burst"
        time.sleep(2.0)
    shown = cpupp(run, lane, "logs").stdout
    assert shown.count(BURST) == len(lane.hosts) * BURST_LINES, shown.count(BURST)
    began = stop(run, lane)
    for name, text in run.logs().items():
        assert text.count(BURST) == BURST_LINES, f"{name}: {text.count(BURST)}"
    return began


def stop_other(run: Run, lane: Lane) -> float:
    """Another detached run on the same hosts is stopped; this one serves on until it is stopped, too."""
    before = num_processes(lane)
    other = start(run.folder / "other", replace(lane, port=lane.port + 1), [{}, {}], "--detach")
    assert other.wait(READY_S) == 0, other.stderr
    stop(other, lane)
    deadline = time.monotonic() + DOWN_S
    while num_processes(lane) != before:
        assert time.monotonic() < deadline, f"the other run left something: {num_processes(lane)}, not {before}"
        time.sleep(0.1)
    greedy(lane.hosts[0].address, "Hello", num_tokens=2)
    return stop(run, lane)


def fill_home(index: int, *, detached: bool) -> Strike:
    """The disk of a host's site folder is full: the run serves on, and stops as it should."""

    def strike(run: Run, lane: Lane) -> float:
        host = lane.hosts[index]
        host.run(["mount", "-o", f"remount,size={HOME_SIZE}", "/home"])
        try:
            with contextlib.suppress(OSError), host.path("/home/filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1024))
            for _ in range(5):
                time.sleep(1.0)
                greedy(lane.hosts[0].address, "Hello", num_tokens=2)
            if detached:
                return stop(run, lane)
            began = time.monotonic()
            run.process.send_signal(signal.SIGINT)
            run.wait(DOWN_S)
            return began
        finally:
            host.path("/home/filler").unlink()
            host.run(["mount", "-o", "remount,size=50%", "/home"])

    return strike


TALK = [{"lines_per_s": 50}] * 2

ALONE = [
    Fault(
        name="detached: burst of 10 MB",
        at="detached",
        scripts=[{"burst_mb": 10, "burst_after_s": BURST_AFTER_S}] * 2,
        strike=count_burst,
        exit_code=0,
        bound_s=STOP_S,
    ),
    Fault(name="detached: two runs, one stopped", at="detached", strike=stop_other, exit_code=0, bound_s=STOP_S),
    Fault(
        name="detached: SIGKILL of main on follower, a grandchild keeps stdout",
        at="detached",
        scripts=[{"grandchild": True}] * 2,
        strike=send("main", 1, KILL),
        host=1,
        code="RANK-SIGNAL|PEER-LOST",
        exit_code=0,
    ),
    Fault(
        name="detached: SIGTERM ignored by all, then stop",
        at="detached",
        scripts=[{"ignore_term": True}] * 2,
        strike=stop,
        exit_code=0,
        bound_s=STOP_S,
    ),
    *(
        Fault(
            name=f"{when}: disk of the site folder full on {host}",
            at=when,
            scripts=TALK,
            strike=fill_home(index, detached=when == "detached"),
            exit_code=0 if when == "detached" else 130,
            bound_s=STOP_S,
        )
        for when in ("serving", "detached")
        for index, host in enumerate(("head", "follower"))
    ),
]
