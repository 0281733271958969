"""`cpupp bench serve --against by-hand` on two test hosts of one core each.

    python -m tests.bench.serve LAYOUT [OPTION ...]

Layouts: `pipeline` (SmolLM2-135M compiled, pipeline 2), `eager` (the same, eager: by hand dies at its first request),
and `tensor` (a random Llama of hidden 512 and 8 layers, eager, tensor 2). Options are those of the verb; without any it
is `--against by-hand --client plain`. Among them `--half` holds the second host to half a core, `--packed` sets
`packed_weights: auto`, and `--float32` the dtype on both sides.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.partition import held_to_half
from tests.e2e.runs import ssh_hosts, write_cluster
from tests.testbed.bed import HostOptions, hosts
from tests.testbed.models import ROOT, random_llama, smollm2

CONTEXT = 8192
"""Of SmolLM2: prompts of 4,000 tokens fit."""
PIECE = 512
"""max_num_batched_tokens: a compiled start ends with a step of this size, which is slow on one core."""


def main() -> None:
    """Make the hosts and the cluster file, and run the verb."""
    layout, *options = sys.argv[1:] or ["pipeline"]
    mine = {option: option in options for option in ("--half", "--packed", "--float32")}
    options = [option for option in options if option not in mine]
    tensor = layout == "tensor"
    cores = [HostOptions(cores=[i]) for i in range(2)]
    args: dict[str, Any] = {"enforce_eager": layout != "pipeline", "max_num_batched_tokens": PIECE}
    if not tensor:
        args["max_model_len"] = CONTEXT
    if mine["--float32"]:
        args["dtype"] = "float32"
    with (
        tempfile.TemporaryDirectory(prefix="cpupp-bench-", dir="/var/tmp") as folder,
        hosts(*cores) as bed,
        held_to_half(bed[1] if mine["--half"] else None),
    ):
        cluster = write_cluster(
            Path(folder) / "c.yaml",
            random_llama() if tensor else smollm2(),
            ssh_hosts(bed),
            engine={"args": args, "packed_weights": "auto" if mine["--packed"] else "off"},
            parallel={"pipeline": 1, "tensor": 2} if tensor else {"pipeline": 2},
        )
        argv = [sys.executable, "-m", "cpupp", "bench", "serve", str(cluster)]
        argv += options or ["--against", "by-hand", "--client", "plain"]
        state = os.environ.get("XDG_STATE_HOME", folder)
        done = subprocess.run(argv, cwd=ROOT, env={**bed.env, "XDG_STATE_HOME": state}, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
