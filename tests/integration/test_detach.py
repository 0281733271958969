"""Runs that were left to their hosts: they live without a launcher, end as a whole, and leave a record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpupp.errors import CpuppError
from cpupp.launch.transport import LocalTransport
from cpupp.plan.handoff import PeerReport, encode_report
from tests.integration.agent_bench import GONE_S, Bench, shm, unique, wait_dead, wait_until
from tests.testbed import processes

LAUNCHER = """
import os, sys
from tests.integration.agent_bench import Bench
bench = Bench()
bench.session.open()
bench.prepare(sys.argv[1], record={"cluster": "pair"})
bench.start('''
    child("say('worker'); time.sleep(600)")
    say('main')
    while True: print('still', flush=True); time.sleep(0.05)
''')
worker, main = bench.pid_of("worker"), bench.pid_of("main")
bench.session.detach(record={"api": "http://a"})
print(bench.site, bench.agent, main, worker, flush=True)
input()
"""


@pytest.fixture
def other() -> Iterator[Bench]:
    """An agent that holds nothing, as another launcher meets it."""
    with Bench() as made:
        yield made


def run_of(bench: Bench, run: str) -> dict[str, Any]:
    """What an agent says about the run."""
    (found,) = (entry for entry in bench.session.request("runs") if entry["run"] == run)
    return dict(found)


def left_to_itself(run: str, text: str = "say('main'); time.sleep(600)") -> tuple[Bench, int]:
    """Start a node that runs `text` and detach it; return its bench and the main process."""
    bench = Bench()
    bench.session.open()
    bench.prepare(run)
    bench.start(text)
    pid = bench.pid_of("main")
    bench.session.detach(patterns=["WorkerProc (hit|failed)"])
    return bench, pid


def test_it_outlives_its_launcher_and_another_finds_reads_and_stops_it(other: Bench) -> None:
    run = unique("run")
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout
    site, *numbers = launcher.stdout.readline().split()
    agent, main, worker = map(int, numbers)
    launcher.kill()
    launcher.communicate()
    os.kill(agent, signal.SIGHUP)
    time.sleep(1.5)
    found = run_of(other, run)
    assert (found["held"], found["ended"], found["mine"], found["site"]) == (True, False, False, site)
    assert found["record"]["record"] == {"cluster": "pair", "api": "http://a"}
    (node,) = found["state"]["nodes"]
    assert found["state"]["detached"]
    assert (found["state"]["agent"], node["main_pid"], node["alive"]) == (agent, main, True)
    assert {process["pid"] for process in node["processes"]} == {main, worker}
    assert node["rss"] > 1 << 20
    first = other.session.request("run_log", run=run, node=0, size=20)
    assert first["data"].startswith(("worker=", "main="))
    assert other.session.request("run_log", run=run, node=0, offset=-6)["data"] == "still\n"
    assert other.session.request("run_stop", run=run, grace=3) == {"found": 1, "stuck": [], "remaining": []}
    assert not any(map(processes.alive, (agent, main, worker)))
    assert not Path(site).exists()
    found = run_of(other, run)
    assert (found["ended"], found["held"], found["result"]["outcome"]) == (True, False, "stopped")
    end = other.session.request("run_log", run=run, node=0, offset=first["offset"], size=1 << 20)
    assert end["ended"]
    lines = (first["data"] + end["data"]).splitlines(keepends=True)
    assert sum(map(len, lines)) == end["size"]
    assert sorted(set(lines)) == sorted({"still\n", f"main={main}\n", f"worker={worker}\n"})
    assert other.session.request("run_stop", run=run, grace=0)["found"] == 0
    assert len(other.session.request("run_forget", run=run)["forgotten"]) == 1
    assert not Path(found["site"]).exists()


def kill_main(bench: Bench, main: int) -> None:
    os.kill(main, signal.SIGKILL)


def stop_main(bench: Bench, main: int) -> None:
    os.kill(main, signal.SIGSTOP)


def kill_agent(bench: Bench, main: int) -> None:
    os.kill(bench.agent, signal.SIGKILL)


def stop_agent(bench: Bench, main: int) -> None:
    os.kill(bench.agent, signal.SIGSTOP)


def lose_peer(bench: Bench, main: int) -> None:
    report = PeerReport(pid=main, node_rank=1, silent_s=6.0, message="vLLM node 1 is silent")
    with (bench.site / "reports-0.ndjson").open("a", encoding="utf-8") as file:
        file.write(encode_report(report) + "\n")


FAULTS: list[tuple[Callable[[Bench, int], None], str]] = [
    (kill_main, "RANK-SIGNAL"),
    (stop_main, "RANK-HALTED"),
    (kill_agent, "AGENT-LOST"),
    (stop_agent, "AGENT-LOST"),
    (lose_peer, "PEER-LOST"),
]


def site_is_gone(bench: Bench) -> bool:
    """Whether the site was removed, which comes after its record was kept."""
    return not bench.site.exists()


def test_each_failure_ends_the_run_in_time_and_leaves_its_record(other: Bench) -> None:
    """All at once: each is a run of its own, and most of the time is waiting."""
    benches = [(unique(f"run-{fault.__name__}"), fault, code) for fault, code in FAULTS]
    made = [left_to_itself(run) for run, _, _ in benches]
    time.sleep(1.5)
    began = time.monotonic()
    for (_, fault, _), (bench, main) in zip(benches, made, strict=True):
        fault(bench, main)
    wait_dead(*(pid for bench, main in made for pid in (bench.agent, main)))
    assert time.monotonic() - began < GONE_S
    for (run, _, code), (bench, main) in zip(benches, made, strict=True):
        wait_until(partial(site_is_gone, bench), f"the site of {run}")
        result = run_of(other, run)["result"]
        assert (result["outcome"], result["failure"]["code"]) == ("failed", code)
        if code.startswith("RANK"):
            assert result["failure"]["last_lines"] == [f"main={main}"]
        assert other.session.request("run_log", run=run, node=0)["data"] == f"main={main}\n"
        other.session.request("run_forget", run=run)


def test_a_worker_that_only_says_so_is_a_failure_once_detached(other: Bench) -> None:
    run = unique("run")
    text = "say('main'); time.sleep(2); print('WorkerProc hit an exception.', flush=True); time.sleep(600)"
    bench, main = left_to_itself(run, text)
    wait_dead(bench.agent, main)
    wait_until(lambda: not bench.site.exists(), "the site")
    failure = run_of(other, run)["result"]["failure"]
    assert (failure["code"], failure["last_lines"][-1]) == ("RANK-EXCEPTION", "WorkerProc hit an exception.")
    other.session.request("run_forget", run=run)


def test_only_what_runs_well_can_be_detached() -> None:
    with Bench() as bench:
        bench.prepare()
        with pytest.raises(CpuppError, match="cannot detach: no vLLM node runs"):
            bench.session.detach()
        bench.start("sys.exit(3)")
        bench.wait_event("gone")
        with pytest.raises(CpuppError, match="cannot detach: vLLM node 0 has ended") as caught:
            bench.session.detach()
        assert caught.value.code == "AGENT-REQUEST"
        wait_until(lambda: failure_in(bench.site) == "exited with code 3", "the state names the failure")


def failure_in(site: Path) -> str:
    """The message of the failure that the site's state has, else empty."""
    failure = json.loads((site / "state.json").read_text(encoding="utf-8"))["failure"]
    return failure["message"] if failure else ""


def test_two_runs_do_not_touch_each_other_and_an_attached_one_can_be_stopped_from_elsewhere(other: Bench) -> None:
    ours, theirs = unique("run-a"), unique("run-b")
    with Bench() as attached, Bench() as neighbour:
        for bench, run in ((attached, ours), (neighbour, theirs)):
            bench.prepare(run)
            bench.start("ignore_term(); say('main'); time.sleep(600)")
            shm(f"cpupp-{run}-x").touch()
        pid, spared = attached.pid_of("main"), neighbour.pid_of("main")
        answers: list[Any] = []
        # Two terminals at the same time.
        threads = [
            threading.Thread(
                target=lambda: answers.append(other.session.request("run_stop", run=ours, grace=0.5)["remaining"])
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [[], []]
        assert not processes.alive(pid)
        assert not shm(f"cpupp-{ours}-x").exists()
        assert attached.wait_event("lost")
        assert processes.alive(spared)
        assert shm(f"cpupp-{theirs}-x").exists()
        assert run_of(other, theirs)["held"]
        with pytest.raises(CpuppError, match="no output of vLLM node 0"):
            other.session.request("run_log", run=ours, node=0)


def test_an_agent_that_is_stopped_is_killed_by_a_stop_order(other: Bench) -> None:
    bench, main = left_to_itself(unique("run"))
    run = json.loads((bench.site / "site.json").read_text(encoding="utf-8"))["run"]
    os.kill(bench.agent, signal.SIGSTOP)
    answer = other.session.request("run_stop", run=run, grace=0)
    assert answer == {"found": 1, "stuck": [], "remaining": []}
    assert not processes.alive(main)
    assert run_of(other, run)["result"]["outcome"] == "stopped"
    other.session.request("run_forget", run=run)


def test_the_place_is_empty_when_the_last_record_is_forgotten() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:  # short enough for sockets in it
        with Bench(LocalTransport(env={**os.environ, "HOME": home})) as bench:
            assert bench.prepare("r").is_relative_to(home)
            bench.start("say('main'); time.sleep(600)")
            bench.pid_of("main")
            bench.session.request("detach")
            assert [entry["mine"] for entry in bench.session.request("runs") if entry["run"] == "r"] == [True]
            assert bench.session.request("stop", grace=0) == {"stuck": [], "site_removed": True}
            assert [entry["ended"] for entry in bench.session.request("runs") if entry["run"] == "r"] == [True]
            bench.session.request("run_forget", run="r")
        assert not (Path(home) / ".cache" / "cpupp").exists()
