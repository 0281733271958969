"""Weights and KV cache of each stage: what the plan says against what vLLM allocates.

    python -m tests.bench.memory [smollm2 gqa moe mla untied]

Two stages on this machine, eager. Nothing is computed: the workers load, allocate, write down what they have, and end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.runs import write_site
from tests.testbed.models import random_llama, random_model, smollm2

KINDS = ("smollm2", "gqa", "moe", "mla", "untied")
MIB = 1 << 20
FOLDER_ENV = "MEASURED_FOLDER"


def main() -> None:
    """Measure every kind and print a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _load(options.child)
        return
    print("| model | stage | layers | weights: plan, vLLM | KV cache: plan, vLLM | process grew by |", flush=True)
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as name:
            _measure(kind, _folder(kind), Path(name))


def _folder(kind: str) -> Path:
    if kind == "smollm2":
        return smollm2()
    return random_llama() if kind == "untied" else random_model(kind)


def _measure(kind: str, model: Path, folder: Path) -> None:
    plan = _plan(model, folder)
    (command,) = plan["commands"]
    site = folder / "site"
    write_site(site)
    env = {**os.environ, **command["env"], "PYTHONPATH": f"{site}:{Path.cwd()}", FOLDER_ENV: str(folder)}
    with (folder / "log").open("wb") as log:
        child = [sys.executable, "-m", "tests.bench.memory", "--child", str(model)]
        code = subprocess.run(child, env=env, stdout=log, stderr=log, timeout=600, check=False).returncode
    if code:
        lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(line for line in lines if "Worker" in line and "ERROR" in line)[-3000:], flush=True)
        return
    for rank in plan["ranks"]:
        found = json.loads((folder / f"rank-{rank['rank']}.json").read_text(encoding="utf-8"))
        first, last = rank["layers"]
        weights = _compared(rank["weights_bytes"], found["parameters"])
        kv = _compared(rank["kv_used_bytes"], found["kv"])
        grown = f"{found['grown'] / MIB:.1f} MiB"
        print(f"| {kind} | {rank['stage']} | {first}-{last - 1} | {weights} | {kv} | {grown} |", flush=True)


def _compared(planned: int, measured: int) -> str:
    return f"{planned / MIB:.1f}, {measured / MIB:.1f} MiB ({planned / measured - 1:+.1%})"


def _plan(model: Path, folder: Path) -> dict[str, Any]:
    cluster = {
        "name": "bench",
        "model": {"path": str(model)},
        "parallel": {"pipeline": 2},
        "hosts": [{"name": "here", "local": True, "slots": 2}],
        "engine": {"python": sys.executable, "args": {"enforce_eager": True}},
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster), encoding="utf-8")
    answer = subprocess.run(
        [sys.executable, "-m", "cpupp", "plan", str(path), "--json"], stdout=subprocess.PIPE, check=False
    )
    envelope = json.loads(answer.stdout)
    assert envelope["ok"], envelope["errors"]
    data: dict[str, Any] = envelope["data"]
    return data


def _load(model: str) -> None:
    from vllm import LLM

    LLM(
        model=model,
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        enforce_eager=True,
        worker_cls="tests.bench.measuring_worker.MeasuringWorker",
    )


if __name__ == "__main__":
    main()
