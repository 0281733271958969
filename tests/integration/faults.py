"""One fault at a time: launch the scripted vLLM on two test hosts as a user does, break something, see how all ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.runs import Run, launch, ssh_hosts, write_cluster
from tests.testbed import network, processes
from tests.testbed.fake_engine import fake, make_engine, make_model
from tests.testbed.host import Host
from tests.testbed.models import ROOT

READY_S = 60.0
DOWN_S = 10.0
"""The promise: from the fault until nothing of the run is left on any host."""
LEASH_S = 30.0
"""The same for what only silence can tell: a link that is cut, a launcher that is stopped."""
MENDED_S = 60.0
KEPT = "ended"  # where a host keeps what it knows of a detached run that ended
COMM = 15  # characters that the kernel keeps of a process's name


@dataclass(frozen=True, slots=True)
class Lane:
    """Two hosts for one run at a time (head first), the engine and the model."""

    hosts: Sequence[Host]
    python: str
    model: Path
    port: int = 8000


Strike = Callable[[Run, Lane], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done, when, and what must come of it.

    strike(run, lane): break something; return the (monotonic) time from which to count, None for that of the call.
    at: `spawned`, `starting` (all processes are there, the weights are being loaded), `serving`, or `detached`
    (serving, and the launcher has left). scripts: FAKE_VLLM of each host.
    host, code, ranks: of the first failure (None: any, or no failure); code may list several: `A|B`.
    """

    name: str
    strike: Strike
    at: str = "serving"
    scripts: Sequence[dict[str, Any]] = ({}, {})
    options: Sequence[str] = ()
    exit_code: int = 1
    host: int | None = None
    code: str | None = None
    ranks: Sequence[int] | None = None
    words: str = ""
    bound_s: float = DOWN_S
    repair: Strike | None = None  # undo it once the hosts are quiet: what cuts launcher and hosts
    state_size: str = ""  # the launcher's record is on a file system of that size
    recorded: str = ""  # the state that the record says in the end
    launcher_host: bool = False  # the launcher is on the last host of the bed, which is in no lane


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a fault. down_s: until launcher and hosts were quiet, in seconds; wrong: what should not be."""

    exit_code: int | None = None
    first: dict[str, Any] = field(default_factory=dict)
    end_s: float = 0.0
    down_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def make_lanes(folder: Path, hosts: Sequence[Host], layers: int = 8) -> list[Lane]:
    """Pairs of hosts that share one engine and one model."""
    python, model = make_engine(folder / "engine"), make_model(folder / "model", layers)
    return [Lane(hosts[i : i + 2], python, model) for i in range(0, len(hosts) - 1, 2)]


def start(
    folder: Path,
    lane: Lane,
    scripts: Sequence[dict[str, Any]],
    *options: str,
    state_size: str = "",
    launcher: Host | None = None,
    **changes: Any,
) -> Run:
    """Launch the lane's run; every host follows its own script. state_size: see Fault; launcher: where it runs."""
    hosts = [
        {**entry, "engine": {"env": fake(**script)}}
        for entry, script in zip(ssh_hosts(lane.hosts), scripts, strict=True)
    ]
    folder.mkdir(parents=True)
    if state_size:
        (folder / "state").mkdir()
        network.call("mount", "-t", "tmpfs", "-o", f"size={state_size}", "tests", str(folder / "state"))
    engine = {"python": lane.python}
    serve = {"port": lane.port}
    cluster = write_cluster(folder / "cluster.yaml", lane.model, hosts, engine=engine, serve=serve, **changes)
    inside = [] if launcher is None else launcher.inside(ROOT)
    return launch(folder, lane.hosts[0].bed, cluster, *options, inside=inside)


def pid_of(run: Run, node_rank: int, role: str) -> int:
    """Pid of a process of a vLLM node (or of what holds it) in the latest attempt, found from its main process on."""
    spawned = [e["data"] for e in run.events() if e["event"] == "Spawned"]
    main = next(int(s["pid"]) for s in reversed(spawned) if s["node_rank"] == node_rank)
    if role == "main":
        return main
    keeper = _parent(main)
    if role in ("keeper", "agent", "session"):
        above = {"keeper": keeper, "agent": _parent(keeper)}
        return above[role] if role != "session" else _parent(above["agent"])
    names = {"core": "VLLM::EngineCore"[:COMM], "worker": "VLLM::Worker-0"}
    return next(pid for pid in processes.descendants(main) if comm(pid) == names[role])


def comm(pid: int) -> str:
    """The name that a process gave itself, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    process = processes.look(pid)
    assert process is not None, f"process {pid} is gone"
    return process.parent


def send(role: str, node_rank: int, number: int) -> Strike:
    """A strike: signal one process."""
    return lambda run, lane: os.kill(pid_of(run, node_rank, role), number)


def signal_launcher(number: int) -> Strike:
    """A strike: signal the launcher."""
    return lambda run, lane: run.process.send_signal(number)


def wait_joined(run: Run) -> None:
    """Wait until every rank has announced its group."""

    def joined() -> bool:
        reports = [e["data"]["report"] for e in run.events() if e["event"] == "Reported"]
        return len({r["rank"] for r in reports if "rank" in r}) == 2

    deadline = time.monotonic() + READY_S
    while not joined():
        assert run.process.poll() is None, run.stderr[-3000:]
        assert time.monotonic() < deadline, run.stderr[-3000:]
        time.sleep(0.05)


def play(fault: Fault, lane: Lane, folder: Path) -> Outcome:
    """Launch, strike, wait for the end, and compare it with what the fault says."""
    outcome = Outcome()
    loading = {"hang": "load"} if fault.at == "starting" else {}
    options = [*fault.options, *(["--detach"] if fault.at == "detached" else [])]
    scripts = [{**loading, **script} for script in fault.scripts]
    launcher = lane.hosts[0].bed[-1] if fault.launcher_host else None
    run = start(folder, lane, scripts, *options, state_size=fault.state_size, launcher=launcher)
    try:
        if fault.at == "starting":
            wait_joined(run)
        elif fault.at == "serving":
            run.wait_for("ready", READY_S)
        elif fault.at == "detached":
            assert run.wait(READY_S) == 0, run.stderr[-3000:]
        struck = time.monotonic()
        struck = fault.strike(run, lane) or struck
        if fault.repair is not None:
            outcome.wrong += left_on(lane.hosts, fault.bound_s, besides="sshd:")  # which waits for its client
            outcome.down_s = time.monotonic() - struck
            fault.repair(run, lane)
        outcome.exit_code = run.wait(fault.bound_s + 15)
        outcome.end_s = time.monotonic() - struck
        # Once it is mended, only sessions of sshd can be left, until their last packets are sent again.
        rest_s = MENDED_S if fault.repair is not None else max(1.0, fault.bound_s - outcome.end_s)
        outcome.wrong += left_on(lane.hosts, rest_s)
        outcome.down_s = outcome.down_s or time.monotonic() - struck
        if fault.at == "detached":
            outcome.first = first_of_detached(run, lane)
        else:
            outcome.first = result_of(run).get("first_failure") or {}
        _judge(fault, lane, run, outcome)
    except Exception as error:
        outcome.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGCONT)
            run.stop(signal.SIGINT)
        if fault.at == "detached" and outcome.wrong:
            cpupp(run, lane, "stop")  # or the lane's next run meets it
        if fault.state_size:
            network.call("umount", str(run.state))
    if outcome.wrong:
        outcome.wrong.append(run.stderr[-3000:])
    return outcome


def play_all(
    faults: Sequence[Fault], lanes: Sequence[Lane], folder: Path, tell: Callable[[Fault, Outcome], None] | None = None
) -> dict[str, Outcome]:
    """Play every fault, as many at a time as there are lanes, the slowest first; return the outcomes by name.

    tell: called with each outcome as it comes.
    """
    free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for lane in lanes:
        free.put(lane)

    one_launcher = threading.Lock()

    def one(fault: Fault) -> Outcome:
        with one_launcher if fault.launcher_host else contextlib.nullcontext():
            return on_free_lane(fault)

    def on_free_lane(fault: Fault) -> Outcome:
        lane = free.get()
        try:
            outcome = play(fault, lane, folder / fault.name)
        finally:
            free.put(lane)
        if tell is not None:
            tell(fault, outcome)
        return outcome

    order = sorted(faults, key=lambda fault: -fault.bound_s)
    with ThreadPoolExecutor(len(lanes)) as pool:
        return dict(zip([fault.name for fault in order], pool.map(one, order), strict=True))


def left_on(hosts: Sequence[Host], timeout_s: float, besides: str = "\0") -> list[str]:
    """What is left on these hosts after at most that time: processes, segments, files of /tmp, site folders.

    besides: processes whose command begins so do not count.
    """
    deadline = time.monotonic() + timeout_s
    while left := [line for host in hosts for line in _left_on(host, besides)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def _left_on(host: Host, besides: str) -> list[str]:
    running = [process for process in host.processes() if not process.command.startswith(besides)]
    lines = [f"process on {host.name}: {process}" for process in running]
    lines += [f"/dev/shm of {host.name}: {name}" for name in host.shm()]
    lines += [f"/tmp of {host.name}: {name}" for name in host.tmp()]
    cache = host.path(host.home / ".cache" / "cpupp")
    sites = [path for path in (cache.iterdir() if cache.exists() else ()) if path.name != KEPT]
    return lines + [f"site on {host.name}: {path}" for path in sites]


def result_of(run: Run) -> dict[str, Any]:
    """The run's result as recorded; empty when there is none."""
    for path in run.state.glob("cpupp/runs/*/result.json"):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return {}


def recorded(run: Run) -> str:
    """The state of the run in its record."""
    (path,) = run.state.glob("cpupp/runs/*/run.json")
    return str(json.loads(path.read_text(encoding="utf-8"))["status"])


def first_of_detached(run: Run, lane: Lane) -> dict[str, Any]:
    """The first failure of a run that has no launcher, as `cpupp status` puts it together; forgets the run then."""
    try:
        status = json.loads(cpupp(run, lane, "status", "--json").stdout)
        first: dict[str, Any] = status["data"].get("first_failure") or {}
        return first
    finally:
        cpupp(run, lane, "stop")


def cpupp(run: Run, lane: Lane, *argv: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run another verb where the run was launched from, or, with a `state` folder of its own, where nobody knows it."""
    env = {**lane.hosts[0].bed.env, "XDG_STATE_HOME": str(state or run.state)}
    command = [sys.executable, "-m", "cpupp", *argv]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def _judge(fault: Fault, lane: Lane, run: Run, outcome: Outcome) -> None:
    if outcome.exit_code != fault.exit_code:
        outcome.wrong.append(f"exit code {outcome.exit_code}, not {fault.exit_code}")
    if outcome.down_s > fault.bound_s:
        outcome.wrong.append(f"down after {outcome.down_s:.1f} s, not {fault.bound_s:g} s")
    wanted = {
        "host": None if fault.host is None else lane.hosts[fault.host].name,
        "code": fault.code,
        "ranks": None if fault.ranks is None else list(fault.ranks),
    }
    for name, value in wanted.items():
        found = outcome.first.get(name)
        if value is not None and found != value and not (isinstance(value, str) and found in value.split("|")):
            outcome.wrong.append(f"first failure: {name} is {outcome.first.get(name)!r}, not {value!r}")
    if fault.recorded and (state := recorded(run)) != fault.recorded:
        outcome.wrong.append(f"the record says {state!r}, not {fault.recorded!r}")
    if fault.words not in " ".join(run.stderr.split()):  # which is wrapped
        outcome.wrong.append(f"{fault.words!r} is not said")
