"""What an all-reduce of two ranks on each of two hosts carries over the wire between them, against gloo's ring."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.testbed.bed import hosts
from tests.testbed.models import ROOT

PORT = 29400
WAIT_S = 120
SIZES = (8 << 10, 1 << 20)  # bytes of the tensor


def test_two_ranks_a_host_send_less_than_a_ring() -> None:
    """A ring of four carries 1.5 times the tensor over each of its links; two slices of half of it are one tensor."""
    with hosts(2) as bed:
        argv = [sys.executable, "-m", "tests.integration.test_two_level", bed[0].address]
        ranks = [
            bed[rank // 2].popen(
                ["env", f"GLOO_SOCKET_IFNAME={bed[rank // 2].interface}", f"PYTHONPATH={ROOT}", *argv, str(rank)],
                stdout=subprocess.PIPE,
            )
            for rank in range(4)
        ]
        answers = [json.loads(rank.communicate(timeout=WAIT_S)[0]) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * 4
    for num_bytes, (ours, ring) in zip(SIZES, answers[0], strict=True):
        assert ours <= 0.7 * ring, f"{num_bytes} bytes: {ours} bytes, gloo's ring {ring}"


def main(address: str, rank: int) -> None:
    """One rank: for each size, print the bytes that this host sent for ten all-reduces of ours, and of gloo's."""
    import torch
    import torch.distributed as dist

    from cpupp.plan.handoff import RankHandoff
    from cpupp.rank.communicator import Communicator

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=4)
    handoff = RankHandoff(
        run="t", attempt=1, node_rank=rank, mode="links", backend="auto", reports="", host="a", no_shm=False
    )
    links = Communicator("tp:0", dist.new_group(), handoff)
    assert links.outcome.backend == "mixed"
    counts = []
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)
        counts.append([count(partial(reduce, tensor)) for reduce in (links.all_reduce, dist.all_reduce)])
    print(json.dumps(counts), flush=True)
    links.close()
    dist.destroy_process_group()


def count(reduce: Callable[[], object]) -> int:
    """Bytes that this host sends for ten calls, after a first one."""
    import torch.distributed as dist

    reduce()
    dist.barrier()
    before = bytes_sent()
    for _ in range(10):
        reduce()
    sent = bytes_sent() - before
    dist.barrier()
    return sent


def bytes_sent() -> int:
    """Bytes that this host's interfaces but the loopback have sent."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
