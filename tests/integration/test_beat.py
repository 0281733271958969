"""The heartbeat between vLLM nodes over a real TCPStore: three processes, one of which falls silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpupp.plan.handoff import PeerReport, RankHandoff, decode_report
from tests.integration.agent_bench import wait_until

NODES = 3
SEEN_S = 9.0  # six seconds of silence, and what a loaded machine adds
RANK = """
import os, sys, time
import torch.distributed as dist
from cpupp.plan.handoff import RankHandoff
from cpupp.rank.beat import start_beat
handoff, port, rank = RankHandoff.decode(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + port, world_size=3, rank=rank)
start_beat(handoff, rank, 3)
print("beats", flush=True)
time.sleep(600)
"""


class Gang:
    """Three vLLM nodes of one rank each; node 0 has the store."""

    def __init__(self, folder: Path, port: int) -> None:
        self.files = [folder / f"reports-{node}.ndjson" for node in range(NODES)]
        self.ranks = [self._rank(node, port) for node in range(NODES)]

    def _rank(self, node: int, port: int) -> subprocess.Popen[str]:
        handoff = RankHandoff(
            run="r",
            attempt=1,
            node_rank=node,
            mode="links",
            backend="auto",
            reports=str(self.files[node]),
            host="a",
            no_shm=False,
            num_nodes=NODES,
        )
        argv = [sys.executable, "-c", RANK, handoff.encode(), str(port), str(node)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)

    def lost(self, node: int) -> list[PeerReport]:
        """What the node reported."""
        path = self.files[node]
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [report for report in map(decode_report, lines) if isinstance(report, PeerReport)]

    def named_by(self, node: int, lost: int) -> bool:
        """Whether the node reported that loss."""
        return any(report.node_rank == lost for report in self.lost(node))

    def end(self) -> None:
        """KILL all."""
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture
def gang(tmp_path: Path, unused_port: int) -> Iterator[Gang]:
    made = Gang(tmp_path, unused_port)
    try:
        for rank in made.ranks:
            assert rank.stdout
            assert any(line == "beats\n" for line in rank.stdout)
        time.sleep(2.0)
        yield made
    finally:
        made.end()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_who_falls_silent_is_reported_by_those_that_are_left(gang: Gang) -> None:
    assert [gang.lost(node) for node in range(NODES)] == [[], [], []]
    began = time.monotonic()
    gang.ranks[0].send_signal(signal.SIGSTOP)  # its callers are blocked now, and must notice all the same
    wait_until(lambda: gang.named_by(1, -1) and gang.named_by(2, -1), "nodes 1 and 2 miss the store", SEEN_S)
    assert time.monotonic() - began > 3.0, "not before it was silent for long"
    gang.ranks[0].send_signal(signal.SIGCONT)
    time.sleep(2.0)
    assert not any(gang.named_by(*pair) for pair in ((0, 1), (0, 2), (1, 2), (2, 1)))
    gang.ranks[2].send_signal(signal.SIGSTOP)
    wait_until(lambda: gang.named_by(0, 2) and gang.named_by(1, 2), "nodes 0 and 1 miss node 2", SEEN_S)
    told = len(gang.lost(1))
    gang.ranks[0].kill()
    wait_until(lambda: any(r.node_rank == -1 for r in gang.lost(1)[told:]), "node 1 misses the dead store", SEEN_S)
