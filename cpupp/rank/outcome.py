"""What a group does with the proof: which ranks talk by shared memory, the backend's name, and the reason in words.

Pure: every rank feeds in the same rows and gets the same outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpupp.rank.identity import Obstacle, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """subsets: positions that talk by shared memory, each position once; backend: `shm`, `gloo` or `mixed`."""

    subsets: tuple[tuple[int, ...], ...]
    backend: str
    reason: str

    def transport(self, source: int, target: int) -> str:
        """`shm` or `gloo`, of the link between two positions."""
        return "shm" if any(source in s and target in s for s in self.subsets) else "gloo"


def hindered(verdict: Verdict, failures: list[Obstacle], *, per_link: bool) -> bool:
    """Whether nobody in the group may use shared memory.

    A failure of one rank that shares memory with another takes the whole group to gloo: one way for all, no surprises.
    """
    sharing = [s for s in verdict.subsets if len(s) > 1]
    if not sharing or (not per_link and len(verdict.subsets) > 1):
        return True
    return Obstacle.FORCED in failures or any(failures[i] for s in sharing for i in s)


def decide(ranks: list[int], verdict: Verdict, failures: list[Obstacle], *, per_link: bool) -> Outcome:
    """The outcome for the group of these global ranks; failures: one per position, known or met while settling."""
    if hindered(verdict, failures, per_link=per_link):
        alone = tuple((i,) for i in range(len(ranks)))
        return Outcome(subsets=alone, backend="gloo", reason=_why_not(ranks, verdict, failures))
    shared = [[ranks[i] for i in s] for s in verdict.subsets if len(s) > 1]
    if len(verdict.subsets) == 1:
        reason = "all ranks share memory: same kernel, same /dev/shm, each read what the others wrote there"
        return Outcome(subsets=verdict.subsets, backend="shm", reason=reason)
    reason = f"ranks {' and '.join(map(str, shared))} share memory, the other links cross hosts"
    return Outcome(subsets=verdict.subsets, backend="mixed", reason=reason)


def _why_not(ranks: list[int], verdict: Verdict, failures: list[Obstacle]) -> str:
    if Obstacle.FORCED in failures:
        return "the cluster file forces gloo"
    sharing = {i for s in verdict.subsets if len(s) > 1 for i in s}
    for i, failure in enumerate(failures):
        if failure and (i in sharing or not sharing):
            return f"rank {ranks[i]} cannot use shared memory: {failure.text}"
    if sharing:
        return "not all ranks share memory, and mode fallback gives the whole group one transport"
    first, *others = verdict.identities
    for other, rank in zip(others, ranks[1:], strict=True):
        who = f"rank {ranks[0]} and rank {rank}"
        if other.boot_id != first.boot_id:
            return f"no two ranks share memory: {who} run on different machines (their boot ids differ)"
        if (other.device, other.inode) != (first.device, first.inode):
            return f"no two ranks share memory: {who} have different /dev/shm on one kernel"
    return "no two ranks share memory: none could read what another wrote to its /dev/shm"
