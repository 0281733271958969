"""Whatever dies, stops or hangs: within ten seconds nothing that the agent started is left, and no other is hurt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpupp.errors import CpuppError
from cpupp.launch.session import AgentSession
from cpupp.launch.transport import LocalConnection, LocalTransport
from tests.integration.agent_bench import GONE_S, Bench, shm, tree, unique, wait_dead, wait_until
from tests.testbed import processes

# A node as unpleasant as they come: a worker, a process in a session of its own that ignores TERM and holds stdout, its
# orphaned grandchild, and a stopped one.
UNPLEASANT = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child("say('worker'); time.sleep(600)")
child("os.setsid(); ignore_term(); child(\\"os.setsid(); ignore_term(); say('grandchild'); time.sleep(600)\\"); "
      "say('session'); time.sleep(600)")
child("child(\\"say('orphan'); time.sleep(600)\\"); time.sleep(0.2)")
child("say('stopped'); time.sleep(600)")
say('main')
time.sleep(600)
"""
NAMES = ("worker", "session", "grandchild", "orphan", "stopped", "main")


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench() as made:
        yield made


def unpleasant(bench: Bench, node: int = 0) -> list[int]:
    """Start the unpleasant node; return the pids of its processes."""
    bench.start(UNPLEASANT, node=node)
    pids = [bench.pid_of(name, node) for name in NAMES]
    os.kill(pids[NAMES.index("stopped")], signal.SIGSTOP)
    return pids


def test_a_stop_order_ends_everything(bench: Bench) -> None:
    pids = unpleasant(bench)
    started = time.monotonic()
    assert bench.session.request("stop", grace=1) == {"stuck": [], "site_removed": True}
    assert time.monotonic() - started < GONE_S
    assert not any(map(processes.alive, pids))
    assert bench.wait_event("exited") == {"event": "exited", "node": 0, "code": -15, "stopped": True}
    assert not bench.site.exists()


def test_a_stop_without_grace_kills_at_once(bench: Bench) -> None:
    pids = unpleasant(bench)
    bench.session.request("stop", grace=0)
    assert not any(map(processes.alive, pids))


def test_a_second_stop_shortens_the_grace(bench: Bench) -> None:
    bench.start("ignore_term(); say('main'); time.sleep(600)")
    pid = bench.pid_of("main")
    started = time.monotonic()
    long = threading.Thread(target=bench.session.request, args=("stop",), kwargs={"grace": 60})
    long.start()
    time.sleep(0.5)
    bench.session.request("stop", grace=0)
    long.join()
    assert time.monotonic() - started < GONE_S
    assert not processes.alive(pid)


def test_a_stop_that_overtakes_a_start(bench: Bench) -> None:
    bench.prepare()
    failed: list[CpuppError] = []

    def start() -> None:
        try:
            bench.start("ignore_term(); say('main'); time.sleep(600)")
        except CpuppError as error:
            failed.append(error)

    for _ in range(5):
        thread = threading.Thread(target=start)
        thread.start()
        answer = bench.session.request("stop", grace=0)
        thread.join()
        # Either the start came first and its node is gone, or it was refused, or it found no site any more.
        assert answer["stuck"] == []
        bench.session.request("stop", grace=0)
        assert len(tree(bench.agent)) == 1
        assert not bench.site.exists()
        bench.prepare()
    assert {error.code for error in failed} <= {"AGENT-BUSY", "AGENT-REQUEST", "START-FAILED"}


def test_term_comes_first_and_the_grace_is_used(bench: Bench) -> None:
    bench.start("""
        def end(*_):
            time.sleep(0.5); print("ended well", flush=True); sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        say('main')
        time.sleep(600)
    """)
    bench.pid_of("main")
    bench.session.request("stop", grace=5)
    assert bench.output().endswith("ended well\n")
    assert bench.wait_event("exited")["code"] == 0


def test_workers_do_not_outlive_the_main_process(bench: Bench) -> None:
    bench.start("child(\"os.setsid(); say('worker'); time.sleep(600)\"); time.sleep(1); sys.exit(4)")
    worker = bench.pid_of("worker")
    exited = bench.wait_event("exited")
    assert exited == {"event": "exited", "node": 0, "code": 4, "stopped": False}
    bench.wait_event("gone")
    assert not processes.alive(worker)


def test_the_exit_is_noticed_though_a_grandchild_keeps_stdout(bench: Bench) -> None:
    bench.start("child(\"os.setsid(); ignore_term(); say('worker'); time.sleep(600)\"); time.sleep(0.5); sys.exit(0)")
    bench.pid_of("worker")
    bench.wait_event("exited", timeout=GONE_S)
    bench.wait_event("gone", timeout=GONE_S)


def _close_pipe(bench: Bench, victim: list[int]) -> None:
    connection = bench.session._connection
    assert isinstance(connection, LocalConnection)
    connection.send_end()


def _signal_agent(number: int) -> Callable[[Bench, list[int]], None]:
    return lambda bench, victim: os.kill(bench.agent, number)


ENDINGS: dict[str, Callable[[Bench, list[int]], None]] = {
    "launcher closes the pipe": _close_pipe,
    "agent gets TERM": _signal_agent(signal.SIGTERM),
    "agent gets HUP": _signal_agent(signal.SIGHUP),
    "agent gets INT": _signal_agent(signal.SIGINT),
    "agent is killed": _signal_agent(signal.SIGKILL),
    "agent crashes": _signal_agent(signal.SIGSEGV),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_when_launcher_or_agent_go_two_nodes_go_too(ending: Callable[[Bench, list[int]], None]) -> None:
    with Bench() as bench:
        pids = unpleasant(bench) + unpleasant(bench, node=1)
        everything = tree(bench.agent)
        assert set(pids) < set(everything)
        ending(bench, everything)
        wait_dead(*everything)
        wait_until(lambda: not bench.site.exists(), "the site folder is removed")
        bench.wait_event("lost")


def test_when_only_the_keeper_dies_the_agent_ends_the_node(bench: Bench) -> None:
    pids = unpleasant(bench)
    other = bench.start("say('other'); time.sleep(600)", node=1)
    os.kill(bench.keeper(pids[-1]), signal.SIGKILL)
    wait_dead(*pids)
    bench.wait_event("gone", node=0)
    news = ("spawned", "keeper_lost", "exited", "gone")
    kinds = [event["event"] for event in bench.events if event.get("node") == 0 and event["event"] in news]
    assert kinds == ["spawned", "keeper_lost", "exited", "gone"]
    assert "ended with -9" in bench.wait_event("keeper_lost")["message"]
    assert bench.wait_event("exited", node=0)["code"] == -9
    assert processes.alive(other)
    assert bench.session.request("stop") == {"stuck": [], "site_removed": True}


def test_a_stopped_keeper_does_not_hold_up_the_stop(bench: Bench) -> None:
    pids = unpleasant(bench)
    keeper = bench.keeper(pids[-1])
    os.kill(keeper, signal.SIGSTOP)
    started = time.monotonic()
    bench.session.request("stop", grace=1)
    assert time.monotonic() - started < GONE_S
    assert not any(map(processes.alive, [*pids, keeper]))
    assert not bench.site.exists()


def test_a_stopped_agent_is_ended_by_its_keeper() -> None:
    with Bench(leash_s=3.0, grace_s=1.0, heartbeat_s=0.5) as bench:
        pids = unpleasant(bench)
        everything = tree(bench.agent)
        os.kill(bench.agent, signal.SIGSTOP)
        wait_dead(*everything, *pids, timeout=3.0 + GONE_S)
        wait_until(lambda: not bench.site.exists(), "the site folder is removed")
        bench.wait_event("lost", timeout=30)


def test_a_keeper_that_stays_silent_is_replaced_by_the_agent() -> None:
    with Bench(leash_s=3.0, heartbeat_s=0.5) as bench:
        pids = unpleasant(bench)
        os.kill(bench.keeper(pids[-1]), signal.SIGSTOP)
        wait_dead(*pids, timeout=3.0 + GONE_S)
        bench.wait_event("keeper_lost")


def test_a_silent_launcher_loses_its_ranks() -> None:
    with Bench(leash_s=3.0, heartbeat_s=0.5, grace_s=1.0) as bench:
        pids = unpleasant(bench)
        bench.session.heartbeat_s = 600.0  # after the next one, which may be on its way
        wait_dead(bench.agent, *pids, timeout=3.5 + GONE_S)
        # Both ends wait as long, so on a busy machine the launcher's end may be the one that speaks.
        reasons = ("no line from the launcher for 3 s", "no sign of life for 3 s")
        assert any(reason in bench.wait_event("lost")["reason"] for reason in reasons)
        wait_until(lambda: not bench.site.exists(), "the site folder is removed")


def test_a_killed_launcher_loses_its_ranks(tmp_path: Path) -> None:
    code = """
import sys, time
from tests.integration.agent_bench import Bench
bench = Bench()
bench.session.open()
bench.prepare()
bench.start("say('main'); ignore_term(); time.sleep(600)")
print(bench.agent, bench.pid_of("main"), bench.site, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout
    agent, main, site = launcher.stdout.readline().split()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_dead(int(agent), int(main))
    assert not Path(site).exists()


def test_nothing_of_another_run_is_touched() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with Bench() as one, Bench() as two:
            mine, others = unpleasant(one), unpleasant(two)
            one.session.close()
            assert not any(map(processes.alive, mine))
            assert all(map(processes.alive, others))
            assert two.session.request("ping") == {}
            assert two.site.exists()
        assert processes.alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


SEGMENTS = """
held = segment({kept!r})
child("held = segment(os.environ['SEGMENT']); say('worker'); time.sleep(600)")
theirs = open('/dev/shm/' + os.environ['THEIRS'], 'rb')
view = mmap.mmap(theirs.fileno(), 0, prot=mmap.PROT_READ)
say('main')
time.sleep(600)
"""


@pytest.fixture
def foreign() -> Iterator[str]:
    """A segment that was there before the node, which the node maps too."""
    name = unique("foreign")
    shm(name).write_bytes(b"x" * 4096)
    yield name
    shm(name).unlink()


@pytest.mark.parametrize("how", ["stop", "kill main", "kill keeper", "kill agent"])
def test_segments_of_killed_children_go_and_those_of_others_stay(how: str, foreign: str) -> None:
    mine, worker_s, ours = unique("psm"), unique("sem"), "cpupp-run77-ring"
    with Bench() as bench:
        bench.prepare(run="run77")
        env = {"SEGMENT": worker_s, "THEIRS": foreign}
        main = bench.start(SEGMENTS.format(kept=mine), env=env)
        worker = bench.pid_of("worker")
        bench.pid_of("main")
        shm(ours).write_bytes(b"segment of our communicator")
        time.sleep(1.5)  # the keeper looks every second
        assert shm(mine).exists()
        assert shm(worker_s).exists()
        if how == "stop":
            bench.session.request("stop", grace=0)
        elif how == "kill main":
            os.kill(main, signal.SIGKILL)
            bench.wait_event("gone")
            assert set(bench.wait_event("gone")["segments"]) == {mine, worker_s, ours}
        elif how == "kill keeper":
            os.kill(bench.keeper(main), signal.SIGKILL)
            bench.wait_event("gone")
        else:
            os.kill(bench.agent, signal.SIGKILL)
        wait_dead(main, worker)
        wait_until(lambda: not any(shm(name).exists() for name in (mine, worker_s, ours)), "segments are removed")
        assert shm(foreign).exists()


def test_a_segment_that_another_process_maps_stays() -> None:
    name = unique("shared")
    code = f"import mmap,sys\nwhile True:\n try: f=open('/dev/shm/{name}','rb'); break\n except OSError: pass\n"
    code += (
        "import time; time.sleep(0.2); m=mmap.mmap(f.fileno(), 0, prot=1); print('mapped', flush=True); time.sleep(600)"
    )
    with Bench() as bench:
        main = bench.start(f"held = segment({name!r}); say('main'); time.sleep(600)")
        bench.pid_of("main")
        reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            assert reader.stdout
            assert reader.stdout.readline() == "mapped\n"
            time.sleep(1.5)
            os.kill(main, signal.SIGKILL)
            assert bench.wait_event("gone")["segments"] == []
            assert shm(name).exists()
        finally:
            reader.kill()
            reader.communicate()
            shm(name).unlink()


def test_close_returns_in_time_though_the_agent_is_stopped() -> None:
    session = AgentSession("a", LocalTransport(), leash_s=2.0)
    session.open()
    agent = session.hello["pid"]
    os.kill(agent, signal.SIGSTOP)
    started = time.monotonic()
    session.close(timeout_s=2.0)
    assert time.monotonic() - started < GONE_S
    os.kill(agent, signal.SIGCONT)
    wait_dead(agent)
