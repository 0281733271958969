"""One rank of `cpupp bench comm`: joins the others, measures what the order says, reports times, leaves.

Started by the agent as a vLLM node is. All ranks go through all targets and sizes in one order; those that are not in a
target sleep in a barrier meanwhile, so they burn no core. The target's first rank leads: it says how often, takes the
times and reports them. The paths take turns in short rounds, so that what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cpupp.plan.bench_order import BENCH_ENV, HOP, BenchDone, BenchOrder, BenchTarget, BenchTimes
from cpupp.plan.handoff import HANDOFF_ENV, RankHandoff
from cpupp.rank.announce import append_error, append_line, append_report
from cpupp.rank.bench_paths import Path, Vllm, Ways, together
from cpupp.rank.communicator import Communicator

TAG = 0x6274
LARGE_BYTES = 8 << 20
TELLING_BYTES = 1 << 20
"""From this size on the time grows with the bytes, so that it tells how long the next size will take."""
MAX_BATCH = 40
LEAVE_S = 0.2
SKIP_FACTOR = 10
"""A size is left out when it would take more than so many times the seconds that a block should take."""


def main() -> int:
    """Measure, as `CPUPP_HANDOFF` and `CPUPP_BENCH` say. What goes wrong is reported, then raised."""
    handoff = RankHandoff.decode(os.environ[HANDOFF_ENV])
    try:
        _measure(handoff, BenchOrder.decode(os.environ[BENCH_ENV]))
    except BaseException as error:
        append_error(handoff.reports, "bench comm", error)
        raise
    return 0


def _measure(handoff: RankHandoff, order: BenchOrder) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    vllm = Vllm()
    limit = timedelta(seconds=order.timeout_s)
    lead = order.rank == 0
    store = dist.TCPStore(order.master_addr, order.master_port, order.world_size, is_master=lead, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=order.rank, world_size=order.world_size, timeout=limit)
    communicators = _communicators(handoff, order, limit)
    ways = _ways(handoff, order, vllm, communicators, store)
    for number, target in enumerate(order.targets):
        inside = order.rank in target.ranks
        paths = ways.of(number, target) if inside else {}
        block = Block(target, paths, order, handoff.reports)
        if inside:
            block.miss(vllm_generic=bool(ways.coordinators), shm=ways.shm or not target.shared)
        for size in order.sizes[target.op]:
            if inside:
                block.run(size)
            dist.barrier()
    for communicator in communicators.values():
        communicator.close()
    append_line(handoff.reports, BenchDone(rank=order.rank).encode())
    together(store, "done", order.world_size)
    time.sleep(LEAVE_S)  # rank 0 keeps the store: the others must have read the last word
    dist.destroy_process_group()


def _communicators(handoff: RankHandoff, order: BenchOrder, limit: timedelta) -> dict[str, Communicator]:
    """Ours, of this rank's groups, announced as inside vLLM."""
    made = {}
    for group in order.groups:
        members = dist.new_group(list(group.ranks), timeout=limit, backend="gloo")
        if order.rank in group.ranks:
            name = f"{group.kind}:0"
            communicator = Communicator(name, members, handoff, timeout=order.timeout_s, address=order.address)
            append_report(handoff.reports, communicator.report())
            made[group.name] = communicator
    return made


def _ways(
    handoff: RankHandoff, order: BenchOrder, vllm: Vllm, communicators: dict[str, Communicator], store: dist.Store
) -> Ways:
    have = torch.tensor([int(vllm.group is not None), int(vllm.shm)])
    dist.all_reduce(have, op=dist.ReduceOp.MIN)
    coordinators: dict[str, Any] = {}
    for kind in ("tp", "pp"):
        groups = [group for group in order.groups if group.kind == kind]
        if groups and have[0]:
            made = vllm.coordinator(kind, [list(group.ranks) for group in groups])
            coordinators |= {group.name: made for group in groups if order.rank in group.ranks}
    return Ways(
        rank=order.rank,
        address=order.address,
        store=store,
        prefix=f"cpupp-{handoff.run}-{handoff.attempt}-bench",
        communicators=communicators,
        coordinators=coordinators,
        shm=bool(have[1]),
        timeout_s=order.timeout_s,
    )


class Block:
    """One target: its sizes one after the other, in each of them the paths in turns."""

    def __init__(self, target: BenchTarget, paths: dict[str, Path], order: BenchOrder, reports: str) -> None:
        self._target, self._paths, self._order, self._reports = target, paths, order, reports
        self._lead = target.ranks[0] == order.rank
        self._seconds_per_byte = 0.0

    def miss(self, *, vllm_generic: bool, shm: bool) -> None:
        """Say which paths cannot be had on all hosts."""
        if not vllm_generic:
            self._report(0, "vllm_generic", [], "without vllm_generic: vLLM cannot be imported on every host")
        if not shm:
            self._report(
                0, "shm", [], "without shm: not every host's vLLM has SHM operations (its AVX2 build has none)"
            )

    def run(self, size: int) -> None:
        """Measure one size, or leave it out when the sizes before show that it would take too long."""
        predicted = self._seconds_per_byte * size * (1 + self._order.rounds)
        (go,) = self._agree([int(predicted <= SKIP_FACTOR * self._order.block_s)], 1)
        if not go:
            for name in self._paths:
                self._report(size, name, [], f"left out: it would take about {predicted:.0f} s")
            return
        guesses = {name: self._warm_up(path, size) for name, path in self._paths.items()}
        if size >= TELLING_BYTES:
            self._seconds_per_byte = sum(guesses.values()) / size
        share = self._order.block_s / len(guesses) / self._order.rounds
        times: dict[str, list[int]] = {name: [] for name in self._paths}
        for _ in range(self._order.rounds):
            # Anew in each round: on a machine that is busy with other things the first guess can be far off.
            wanted = [min(MAX_BATCH, max(1, int(share / guess))) for guess in guesses.values()]
            for name, batch in zip(self._paths, self._agree(wanted, len(wanted)), strict=True):
                if size < LARGE_BYTES:
                    self._paths[name].turn()  # untimed: the others may still be on their way from the path before
                found = _timed(self._paths[name], batch)
                times[name] += found
                guesses[name] = sum(found) / len(found) / 1e9
        for name in self._paths:
            self._report(size, name, times[name])

    def _warm_up(self, path: Path, size: int) -> float:
        path.prepare(size)
        times = _timed(path, 1 if size >= LARGE_BYTES else 3)
        return sum(times) / len(times) / 1e9

    def _agree(self, values: list[int], num: int) -> list[int]:
        """The leader's values, on all ranks of the target."""
        tensor = torch.tensor(values if self._lead else [0] * num)
        for rank in self._target.ranks[1:]:
            if self._lead:
                dist.send(tensor, rank, tag=TAG)
            elif rank == self._order.rank:
                dist.recv(tensor, self._target.ranks[0], tag=TAG)
        found: list[int] = tensor.tolist()
        return found

    def _report(self, size: int, path: str, times: Sequence[int], note: str = "") -> None:
        if not self._lead:
            return
        target = self._target
        divisor = 2 if target.op == HOP else 1
        line = BenchTimes(
            op=target.op,
            group=target.group,
            ranks=target.ranks,
            bytes=size,
            path=path,
            nanoseconds=tuple(t // divisor for t in times),
            note=note,
        )
        append_line(self._reports, line.encode())


def _timed(path: Path, num: int) -> list[int]:
    times = []
    for _ in range(num):
        began = time.perf_counter_ns()
        path.turn()
        times.append(time.perf_counter_ns() - began)
    return times


if __name__ == "__main__":
    sys.exit(main())
