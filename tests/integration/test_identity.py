"""Who shares memory: the proof, on real hosts (mount namespaces) and with one folder for each simulated host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cpupp.rank.identity import BOOT_ID, SHM_DIR, Obstacle, Verdict, _subsets, exchange_over, prove
from tests.integration.gang import Gang


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang([4]) as ranks:
        yield ranks


def verdict(rank: int, folders: list[str], boot_ids: list[str] | None = None, obstacle: int = 0) -> Verdict:
    """Run on the ranks."""
    return prove(
        exchange_over(dist.group.WORLD),
        rank,
        prefix="cpupp-test-1",
        shm_dir=Path(folders[rank]),
        boot_id_file=Path(boot_ids[rank]) if boot_ids else BOOT_ID,
        obstacle=Obstacle(obstacle) if rank == 1 else Obstacle.NONE,
        demanded=rank == 2,
        threads=rank + 1,
    )


def equal_names(rank: int) -> Verdict:
    """Run on the ranks: everything that is a name says the same on all of them (vllm #46716)."""
    os.environ["VLLM_DIST_IDENT"] = "same"
    return prove(exchange_over(dist.group.WORLD), rank, prefix="cpupp-test-1")


def listing(rank: int) -> list[str]:
    """Run on the ranks: what is in /dev/shm there."""
    return [path.name for path in SHM_DIR.glob("cpupp-test-1*")]


def test_one_machine_is_one_subset_and_leaves_no_file(gang: Gang) -> None:
    first, *others = gang.run(verdict, [str(SHM_DIR)] * 4)
    assert first.subsets == ((0, 1, 2, 3),)
    assert all(other == first for other in others)
    assert [i.threads for i in first.identities] == [1, 2, 3, 4]
    assert [i.demanded for i in first.identities] == [False, False, True, False]
    assert not list(SHM_DIR.glob("cpupp-test-1*"))


def test_each_exchange_has_a_tag_of_its_own(gang: Gang) -> None:
    tags = [{v.tag for v in gang.run(verdict, [str(SHM_DIR)] * 2, ranks=2)} for _ in range(2)]
    assert [len(t) for t in tags] == [1, 1]
    assert tags[0] != tags[1]


def test_folders_of_their_own_are_hosts_of_their_own(gang: Gang, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert {v.subsets for v in gang.run(verdict, [a, b, a, b])} == {((0, 2), (1, 3))}
    assert {v.subsets for v in gang.run(verdict, [a, b], ranks=2)} == {((0,), (1,))}
    assert not list(tmp_path.glob("*/*"))


def test_another_kernel_is_another_host_whatever_the_folder(gang: Gang, tmp_path: Path) -> None:
    other = tmp_path / "boot_id"
    other.write_text("00000000-0000-4000-8000-000000000001\n")
    boot_ids = [str(BOOT_ID), str(other), str(BOOT_ID), str(tmp_path / "none")]
    assert {v.subsets for v in gang.run(verdict, [str(tmp_path)] * 4, boot_ids)} == {((0, 2), (1,), (3,))}


def test_a_rank_without_a_folder_stays_in_the_exchange(gang: Gang, tmp_path: Path) -> None:
    verdicts = gang.run(verdict, [str(tmp_path), str(tmp_path / "none"), str(tmp_path)], ranks=3)
    assert {v.subsets for v in verdicts} == {((0, 2), (1,))}
    assert {v.identities[1].obstacle for v in verdicts} == {Obstacle.NO_FOLDER}


def test_an_obstacle_known_beforehand_reaches_all(gang: Gang, tmp_path: Path) -> None:
    verdicts = gang.run(verdict, [str(tmp_path)] * 3, None, int(Obstacle.ARCHITECTURE), ranks=3)
    assert all([i.obstacle for i in v.identities] == [0, Obstacle.ARCHITECTURE, 0] for v in verdicts)


def test_names_prove_nothing() -> None:
    """One kernel, one hostname, one VLLM_DIST_IDENT, two /dev/shm: two hosts (vllm #46716, ROCm/mori #74)."""
    with Gang([1, 2]) as gang:
        verdicts = gang.run(equal_names)
        left = gang.run(listing)
    assert {v.subsets for v in verdicts} == {((0,), (1, 2))}
    assert len({i.boot_id for v in verdicts for i in v.identities}) == 1
    assert left == [[], [], []]


@settings(deadline=None)
@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=n, max_size=n)))
def test_subsets_are_a_partition_in_which_everybody_saw_everybody(rows: list[bytes]) -> None:
    matrix = [bytes(i == j or bool(seen & 1) for j, seen in enumerate(row)) for i, row in enumerate(rows)]
    subsets = _subsets(matrix)
    assert sorted(i for s in subsets for i in s) == list(range(len(rows)))
    assert all(matrix[i][j] and matrix[j][i] for s in subsets for i in s for j in s)
