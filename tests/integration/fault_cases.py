"""What can break, and what must come of it: the short part of the matrix (all of it: `python -m tests.reliability`)."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import replace

from tests.e2e.runs import Run, greedy
from tests.integration.faults import DOWN_S, LEASH_S, READY_S, Fault, Lane, Strike, send, signal_launcher, start


def resume(run: Run, lane: Lane) -> None:
    """Let a stopped launcher go on."""
    run.process.send_signal(signal.SIGCONT)


def cut(index: int) -> Strike:
    """The cable of one host is pulled."""
    return lambda run, lane: lane.hosts[index].link.down()


def drop(index: int) -> Strike:
    """Every packet of one host is lost, and its interface stays up."""
    return lambda run, lane: lane.hosts[index].link.drop()


def mend(run: Run, lane: Lane) -> None:
    """All links work again."""
    for host in lane.hosts:
        host.link.up()


def wait_for_exit(run: Run, lane: Lane) -> None:
    """Nothing is done to the run: it fails by its own script."""


def count_burst(run: Run, lane: Lane) -> None:
    """Every line of the burst is in the logs of both hosts."""
    for name, text in run.logs().items():
        assert text.count("x" * 99 + "\n") == 100_000, name
    run.process.send_signal(signal.SIGINT)


def fill_disk(run: Run, lane: Lane) -> None:
    """The record cannot grow any more; the run serves on, and stops as it should."""
    with contextlib.suppress(OSError), (run.state / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    for _ in range(5):
        time.sleep(0.3)
        greedy(lane.hosts[0].address, "Hello", num_tokens=2)
    run.process.send_signal(signal.SIGINT)


def num_processes(lane: Lane) -> list[int]:
    """How many processes run on each host."""
    return [len(host.processes()) for host in lane.hosts]


def stop_another(run: Run, lane: Lane) -> None:
    """Another run on the same hosts comes and goes, one is killed; this one serves on."""
    for number, signum in enumerate((signal.SIGTERM, KILL)):
        before = num_processes(lane)
        other = start(run.folder / f"other-{number}", replace(lane, port=lane.port + 1), [{}, {}])
        try:
            other.wait_for("ready", READY_S)
            assert other.stop(signum) == (143 if signum == signal.SIGTERM else -signum)
        finally:
            other.stop(KILL)
        deadline = time.monotonic() + DOWN_S
        while num_processes(lane) != before:
            assert time.monotonic() < deadline, f"the other run left something: {num_processes(lane)}, not {before}"
            time.sleep(0.1)
        greedy(lane.hosts[0].address, "Hello", num_tokens=2)
    run.process.send_signal(signal.SIGINT)


KILL, STOP, SEGV = signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV

FAULTS = [
    # Killed
    Fault(name="kill-launcher", strike=signal_launcher(KILL), exit_code=-KILL),
    Fault(
        name="kill-agent-follower",
        strike=send("agent", 1, KILL),
        host=1,
        code="HOST-LOST",
        ranks=[1],
        words="the agent was killed by SIGKILL",
    ),
    Fault(name="kill-keeper-follower", strike=send("keeper", 1, KILL), host=1, code="KEEPER-LOST", ranks=[1]),
    Fault(
        name="kill-main-head", strike=send("main", 0, KILL), host=0, code="RANK-SIGNAL", words="probably out of memory"
    ),
    Fault(name="kill-core-starting", at="starting", strike=send("core", 0, KILL), host=0, code="RANK-EXIT"),
    Fault(name="kill-worker-follower", strike=send("worker", 1, KILL), host=1, code="RANK-DIED|RANK-EXIT", ranks=[1]),
    Fault(
        name="kill-worker-head-starting",
        at="starting",
        strike=send("worker", 0, KILL),
        host=0,
        code="RANK-DIED|RANK-EXIT",
        ranks=[0],
        words="killed by SIGKILL",
    ),
    Fault(name="kill-ssh-session", strike=send("session", 1, KILL), host=1, code="HOST-LOST"),
    # Faulted
    Fault(
        name="segv-worker-head", strike=send("worker", 0, SEGV), host=0, code="RANK-DIED", words="segmentation fault"
    ),
    # Stopped
    Fault(name="stop-launcher", strike=signal_launcher(STOP), bound_s=LEASH_S, repair=resume, code="LAUNCHER-STOPPED"),
    Fault(name="stop-agent-follower", strike=send("agent", 1, STOP), host=1, code="HOST-LOST"),
    Fault(name="stop-keeper-head", strike=send("keeper", 0, STOP), host=0, code="KEEPER-LOST"),
    Fault(name="stop-worker-follower", strike=send("worker", 1, STOP), host=1, code="RANK-HALTED", ranks=[1]),
    Fault(name="stop-core", strike=send("core", 0, STOP), host=0, code="RANK-HALTED", words="VLLM::EngineCor"),
    # Cut
    Fault(name="link-down-follower", strike=cut(1), repair=mend, bound_s=LEASH_S, host=1, code="HOST-LOST", ranks=[1]),
    Fault(name="packets-dropped-head", strike=drop(0), repair=mend, bound_s=LEASH_S, host=0, code="HOST-LOST"),
    # What ranks do by themselves
    Fault(
        name="term-ignored",
        scripts=[{"ignore_term": True}] * 2,
        options=("--grace", "2"),
        strike=signal_launcher(signal.SIGINT),
        exit_code=130,
    ),
    Fault(
        name="grandchild-keeps-stdout",
        at="spawned",
        scripts=[{}, {"grandchild": True, "exit": {"phase": "load", "code": 3, "words": "ImportError: no scripted"}}],
        strike=wait_for_exit,
        host=1,
        code="RANK-DIED|RANK-EXIT",
        words="ImportError: no scripted",
        bound_s=30,
    ),
    Fault(
        name="shm-full",
        at="spawned",
        scripts=[{}, {"shm_bytes": 32 << 20}],
        strike=wait_for_exit,
        host=1,
        code="RANK-DIED|RANK-EXIT",
        words="bus error: /dev/shm is probably full",
        bound_s=30,
    ),
    Fault(name="burst", scripts=[{"burst_mb": 10}] * 2, strike=count_burst, exit_code=130),
    Fault(
        name="disk-full",
        state_size="200k",
        scripts=[{"lines_per_s": 20}] * 2,
        strike=fill_disk,
        exit_code=130,
        recorded="stopped",
    ),
    Fault(name="two-runs", strike=stop_another, exit_code=130, bound_s=30),
]
