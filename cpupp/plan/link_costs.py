"""What a hop and an all-reduce cost by each path, in words: the medians of docs/benchmarks.md, microseconds.

Orders of magnitude of one machine, to weigh a choice by; `cpupp bench comm` measures those of a cluster.
"""

from __future__ import annotations

HOP_SHM = "30 to 33"
"""A hop of 16 KiB in shared memory by this communicator."""
HOP_SHM_STOCK = "2,400 to 6,600"
"""The same by vLLM's generic path, which stock takes in a gloo group, on one machine."""
HOP_GLOO = "62 to 76"
"""A hop of 16 KiB over two hosts by this communicator."""
HOP_GLOO_STOCK = "2,336 to 2,818"
"""The same by vLLM's generic path."""
REDUCE_GLOO = "221"
"""An all-reduce of 8 KiB of two ranks on two hosts by this communicator."""
REDUCE_GLOO_STOCK = "2,533"
"""The same by vLLM's generic path."""


def stock_cost(kind: str, *, shared: bool) -> str:
    """What gloo costs in a group of this kind (tp or pp), by vLLM and by cpupp. shared: some ranks share memory."""
    if kind == "tp":
        return f"an all-reduce of 8 KiB over hosts: stock {REDUCE_GLOO_STOCK} us, cpupp {REDUCE_GLOO} us"
    if shared:
        return f"a hop of 16 KiB inside a machine: stock's gloo {HOP_SHM_STOCK} us, cpupp's shm {HOP_SHM} us"
    return f"a hop of 16 KiB over hosts: stock {HOP_GLOO_STOCK} us, cpupp {HOP_GLOO} us"
