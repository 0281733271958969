"""What a rank has of cpupp: it announces its groups, beats, counts its steps. Imported where cpupp started this vLLM.

From the site folder that the agent made, as in a real rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpupp.plan.handoff import GroupReport, RankHandoff
from cpupp.rank.announce import append_report
from cpupp.rank.beat import Beat
from cpupp.rank.step_clock import CLOCK

from .gang import Store


@contextmanager
def counting() -> Iterator[None]:
    """One step of one token, as the worker's clock counts it."""
    CLOCK.step(1, 1)
    yield
    CLOCK.pause()


def join(
    handoff: RankHandoff, rank: int, groups: list[tuple[str, list[int]]], table: list[list[Any]], store: Any
) -> None:
    """Announce the groups of a rank and begin to count and to beat. store: the address of the gang's, None: no beat."""
    CLOCK.open(str(Path(handoff.reports).parent), rank)
    for kind, ranks in groups:
        append_report(handoff.reports, announcement(rank, kind, ranks, table, handoff))
    if store is not None:
        Beat(handoff, lambda: Store(store, 6.0), lambda report: append_report(handoff.reports, report)).start()


def announcement(rank: int, kind: str, ranks: list[int], table: list[list[Any]], handoff: RankHandoff) -> GroupReport:
    """What the communicator would announce: memory is shared where boot id and /dev/shm are the same."""
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    no_shm = handoff.no_shm or handoff.backend == "gloo"
    shared = {pair: table[pair[0]] == table[pair[1]] and not no_shm for pair in pairs}
    if handoff.mode != "links" and not all(shared.values()):
        shared = dict.fromkeys(pairs, False)
    transports = {True: "shm", False: "gloo"}
    kinds = {transports[value] for value in shared.values()}
    return GroupReport(
        rank=rank,
        pid=os.getpid(),
        kind=kind,
        ranks=ranks,
        backend="mixed" if len(kinds) > 1 else kinds.pop(),
        links=[[a, b, transports[shared[(a, b)]]] for a, b in pairs],
        reason="scripted",
    )
