"""A forked process of a vLLM node: its threads, with Intel's OpenMP runtime; and the import's garbage collector."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpupp.rank import vllm_start

IOMP = Path(sys.prefix) / "lib" / "libiomp5.so"

# The parent has used threads of its own, as an API server may have; each child is told its cores as vLLM's executor
# tells a worker.
FORKED = """
import glob, json, multiprocessing, os, torch
from multiprocessing.util import register_after_fork
from cpupp.rank.vllm_start import begin_child

def child(send):
    here = sorted(os.sched_getaffinity(0))  # before any work
    a = torch.ones(600, 600)
    total = float((a @ a).sum())
    tasks = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
    for path in glob.glob(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_*"):  # forked processes end without clean-up
        os.unlink(path)
    send.send({"here": here, "threads": torch.get_num_threads(), "total": total, "tasks": sorted(tasks)})

torch.set_num_threads(2)
torch.ones(600, 600) @ torch.ones(600, 600)
register_after_fork(begin_child, lambda begin: begin())
fork = multiprocessing.get_context("fork")
found = []
for cores in json.loads(os.environ["CORES"]):
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]"
    receive, send = fork.Pipe()
    process = fork.Process(target=child, args=(send,))
    process.start()
    assert receive.poll(60), "the child hangs"
    found.append(receive.recv())
    process.join()
print(json.dumps(found))
"""


@pytest.mark.skipif(not IOMP.exists(), reason="Intel's OpenMP runtime is not installed here")
def test_a_forked_worker_has_its_own_threads_on_its_own_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    wanted = [[core] for core in cores] + [cores]
    env = {**os.environ, "LD_PRELOAD": str(IOMP), "CORES": json.dumps(wanted)}
    done = subprocess.run([sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for own, child in zip(wanted, json.loads(done.stdout), strict=True):
        assert child["here"] == [own[0]]
        assert child["threads"] == len(own)
        assert child["total"] == 600.0**3
        assert {tuple(task) for task in child["tasks"]} == {(core,) for core in own}


def test_the_collector_runs_as_before_after_the_import() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        vllm_start.relax_collector()
        assert gc.get_threshold() == vllm_start.RELAXED
        vllm_start.restore_collector()
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() > frozen
        vllm_start.restore_collector()  # again, as a plugin is loaded again
        assert gc.get_threshold() == before
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
