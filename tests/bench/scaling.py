"""A pipeline of many stages, each on a simulated host, with a tiny random model: start, serving, launcher, stop.

    python -m tests.bench.scaling [2 4 8 16]

All stages share this machine's cores, so a token's time here is what all stages compute one after the other and what
each hop adds; it is not what as many real hosts would need. docs/scaling.md says what follows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.e2e.runs import launched, ssh_hosts, write_cluster
from tests.testbed.bed import HostOptions, hosts
from tests.testbed.host import Host
from tests.testbed.models import ROOT, LlamaShape, random_llama

SHAPE = LlamaShape(layers=16, hidden=256, intermediate=512, heads=4, kv_heads=4)
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure each number of stages."""
    for num in map(int, sys.argv[1:] or ["2", "4", "8", "16"]):
        with tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as folder:
            measure(Path(folder), num)


def measure(folder: Path, num: int) -> None:
    """One number of stages."""
    num_cores = os.cpu_count() or 1
    with hosts(*[HostOptions(cores=[i % num_cores]) for i in range(num)]) as bed:
        for host in bed:
            _be_a_machine(host)
        args = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_batched_tokens": 2048}
        engine = {"args": args, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
        cluster = write_cluster(folder / "c.yaml", random_llama(SHAPE), ssh_hosts(bed), engine=engine)
        with launched(folder / "run", bed, cluster) as run:
            ready = run.wait_for("ready", 900)
            launcher = of_process(run.process.pid)
            print(f"== {num} stages: ready after {ready['seconds']:.1f} s; launcher {launcher}")
            print("start:", "  ".join(f"{s['milestone']} {s['seconds']:.1f}" for s in ready["start"]), flush=True)
            argv = [sys.executable, "-m", "cpupp", "bench", "serve", "--client", "plain", "--concurrency", "1,8"]
            argv += ["--output-tokens", "48", "--turns", "3"]
            subprocess.run(argv, cwd=ROOT, env={**bed.env, "XDG_STATE_HOME": str(run.state)}, check=False)
            began = time.monotonic()
            run.stop()
            print(f"stopped in {time.monotonic() - began:.1f} s", flush=True)


def _be_a_machine(host: Host) -> None:
    """Give the host a boot id of its own: the plan would have all stages share this machine's memory, and refuse 16."""
    own = host.folder / "boot_id"
    own.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
    host.run(["mount", "--bind", str(own), "/proc/sys/kernel/random/boot_id"])


def of_process(pid: int) -> str:
    """CPU time, memory and threads of a process, in words."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines())
    cpu = (int(fields[11]) + int(fields[12])) / TICKS
    return f"{cpu:.1f} s CPU, {int(status['VmRSS'].split()[0]) // 1024} MiB, {status['Threads'].strip()} threads"


if __name__ == "__main__":
    main()
