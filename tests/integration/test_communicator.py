"""The communicator over real gloo groups: transports, point to point, collectives, failures."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpupp.errors import CpuppError
from cpupp.plan.handoff import GroupReport, RankHandoff
from cpupp.rank import board, communicator
from cpupp.rank.agent_probe import Nonces, read_nonces, shm_facts
from cpupp.rank.communicator import Communicator
from cpupp.rank.frames import FrameCodec, FrameError
from cpupp.rank.gloo_link import INLINE_BYTES, MAX_IN_FLIGHT, TAG, GlooLink
from cpupp.rank.gloo_loop import THREAD_NAME
from cpupp.rank.ring import PeerLostError, Ring, span
from cpupp.rank.shm_link import ShmLink
from tests.integration.gang import Gang, RankError

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]
LARGE = 3 << 20  # more than a ring of a distant pair holds, more than a slot of a board, and detached over gloo
STREAMS = "streams"
"""In the path of the folders: the ranks have an address, so neighbours get a connection of their own."""


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang([4]) as ranks:
        yield ranks


@pytest.fixture(params=["shm", "gloo", "mixed", "uneven", "streams", "mixed streams"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """For each of four ranks the folder that stands for its host's /dev/shm."""
    kind, _, _ = request.param.partition(" streams")
    layout = {"shm": "aaaa", "gloo": "abcd", "mixed": "aabb", "uneven": "abbb", "streams": "abcd"}[kind]
    return places(tmp_path, layout, streams="streams" in request.param)


def places(tmp_path: Path, layout: str, *, streams: bool = False) -> list[str]:
    """streams: neighbours on different hosts get a connection of their own."""
    top = tmp_path / STREAMS if streams else tmp_path
    for name in set(layout):
        (top / name).mkdir(exist_ok=True, parents=True)
    return [str(top / name) for name in layout]


def make(
    rank: int, folders: list[str], name: str = "pp:0", backend: str = "auto", no_shm: bool = False, **options: Any
) -> Communicator:
    handoff = RankHandoff(
        run="r 1", attempt=2, node_rank=0, mode="links", backend=backend, reports="", host="a", no_shm=no_shm
    )
    options = {"address": "127.0.0.1" if STREAMS in Path(folders[rank]).parts else "", "timeout": 60.0, **options}
    return Communicator(name, dist.group.WORLD, handoff, shm_dir=Path(folders[rank]), **options)


def pattern(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that is different on each rank and that each rank can compute for all."""
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


# Which transport


def report(rank: int, *args: Any, **options: Any) -> GroupReport:
    with_links = make(rank, *args, **options)
    result = with_links.report()
    with_links.close()
    return result


@pytest.mark.parametrize("name", ["pp:0", "tp:0"])
@pytest.mark.parametrize(
    ("layout", "backend", "reason"),
    [
        ("aaaa", "shm", "all ranks share memory: same kernel, same /dev/shm, each read what the others wrote there"),
        ("abcd", "gloo", "no two ranks share memory: rank 0 and rank 1 have different /dev/shm on one kernel"),
        ("aabb", "mixed", "ranks [0, 1] and [2, 3] share memory, the other links cross hosts"),
        ("abba", "mixed", "ranks [0, 3] and [1, 2] share memory, the other links cross hosts"),
    ],
)
def test_a_transport_for_every_link(
    gang: Gang, tmp_path: Path, name: str, layout: str, backend: str, reason: str
) -> None:
    reports = gang.run(report, places(tmp_path, layout), name)
    assert [r.rank for r in reports] == [0, 1, 2, 3]
    for found in reports:
        assert (found.kind, found.ranks, found.backend, found.reason) == (name[:2], [0, 1, 2, 3], backend, reason)
        assert found.links == [
            [a, b, "shm" if layout[a] == layout[b] else "gloo"] for a in range(4) for b in range(4) if a != b
        ]
    assert not list(tmp_path.glob("*/*"))


def test_gloo_can_be_forced(gang: Gang, tmp_path: Path) -> None:
    reports = gang.run(report, places(tmp_path, "aaaa"), "pp:0", "gloo")
    assert {(r.backend, r.reason) for r in reports} == {("gloo", "the cluster file forces gloo")}


def test_a_demand_that_cannot_be_met_stops_every_rank(gang: Gang, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        gang.run(report, places(tmp_path, "aab"), "pp:0", "shm", ranks=3)
    text = "group pp:0 of ranks [0, 1, 2]: backend shm is demanded, but ranks [0, 1] share memory"
    assert str(caught.value).count(f"cpupp.errors.CpuppError: {text}") == 3


def whole(rank: int, folders: list[str]) -> GroupReport:
    return report(rank, folders, per_link=False)


def test_one_transport_for_the_whole_group(gang: Gang, tmp_path: Path) -> None:
    assert {r.backend for r in gang.run(whole, places(tmp_path, "aaaa"))} == {"shm"}
    reports = gang.run(whole, places(tmp_path, "aabb"))
    assert {r.backend for r in reports} == {"gloo"}
    assert {t for r in reports for _, _, t in r.links} == {"gloo"}


def last_may_not(rank: int, folders: list[str], name: str) -> GroupReport:
    """As `report`, and the plan found no room on the host of rank 3."""
    return report(rank, folders, name, no_shm=rank == 3)


@pytest.mark.parametrize("name", ["pp:0", "tp:0"])
@pytest.mark.parametrize("layout", ["aaaa", "aabb"])
def test_a_rank_that_the_plan_gives_no_room_takes_all_to_gloo(
    gang: Gang, tmp_path: Path, name: str, layout: str
) -> None:
    reports = gang.run(last_may_not, places(tmp_path, layout), name)
    reason = "rank 3 cannot use shared memory: there is no room in its /dev/shm"
    assert {(r.backend, r.reason) for r in reports} == {("gloo", reason)}
    assert not list(tmp_path.glob("*/*"))


def test_a_rank_without_room_that_shares_with_nobody_hinders_nobody(gang: Gang, tmp_path: Path) -> None:
    reports = gang.run(last_may_not, places(tmp_path, "aaab"), "pp:0")
    assert {(r.backend, r.reason) for r in reports} == {
        ("mixed", "ranks [0, 1, 2] share memory, the other links cross hosts")
    }


def test_a_rank_without_room_takes_all_to_gloo_together() -> None:
    """No room for the segments, then not even one page for a nonce (the plan says gloo to both)."""
    with Gang([2, 2], shm_size="1m") as gang:
        reason = "rank 2 cannot use shared memory: there is no room in its /dev/shm"
        for step in ("free", "full"):
            for name in ("pp:0", "tp:0"):
                reports = gang.run(report, ["/dev/shm"] * 4, name)
                assert {(r.backend, r.reason) for r in reports} == {("gloo", reason)}, step
            assert gang.run(names_left)[2:] == [[]] * 2  # the first host is this machine, where other tests may run
            assert gang.run(seen_by_the_plan) == [["here"]] * 4
            gang.run(fill)


def fill(rank: int) -> None:
    """Leave no page in the small /dev/shm."""
    if rank == 2:
        with suppress(OSError), Path("/dev/shm/full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert shm_facts()["free"] == 0
    dist.barrier()


def seen_by_the_plan(rank: int) -> list[str]:
    """The hosts whose nonce the agent of this one would read: itself."""
    nonces, name, value = Nonces(), f"cpupp-nonce-{secrets.token_hex(16)}", "0" * 64
    nonces.write(name, value)
    seen = read_nonces({"here": name, "elsewhere": "cpupp-nonce-9"}, {"here": value, "elsewhere": value})
    nonces.clear()
    return seen


def names_left(rank: int) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("cpupp-r_1-*")]


def two_groups(rank: int, folders: list[str]) -> list[list[str]]:
    """The names that the segments of two groups of the same ranks had (vllm #18536)."""
    made = [make(rank, folders, name) for name in ("tp:0", "pp:0")]
    return [[segment.path.name for segment in m._segments] for m in made]


def test_groups_of_equal_ranks_have_names_of_their_own(gang: Gang, tmp_path: Path) -> None:
    for of_tp, of_pp in gang.run(two_groups, places(tmp_path, "aaaa")):
        assert len(of_tp) == 4
        assert len(of_pp) == 6
        assert not set(of_tp) & set(of_pp)
        assert all(name.startswith("cpupp-r_1-2-") and len(name) < 100 for name in of_tp + of_pp)


# Point to point


def travellers() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(3, 64).bfloat16(),
        "residual": torch.randn(64, 3).t(),
        "no rows": torch.empty(0, 8, dtype=torch.float16),
        "scalar": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "large": torch.arange(LARGE, dtype=torch.int64).to(torch.uint8),
        "step": 2**80,
        "none": None,
        "yes": True,
        "ratio": 0.1,
        "ids": ["a", 1, None, [True, 2.5]],
        **{f"key {i}": torch.full((1,), i) for i in range(200)},
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(
        torch.equal(v, b[k]) and v.dtype == b[k].dtype if isinstance(v, torch.Tensor) else v == b[k]
        for k, v in a.items()
    )


def everybody_to_everybody(rank: int, folders: list[str]) -> bool:
    torch.manual_seed(1)
    links, items = make(rank, folders), travellers()
    others = [r for r in range(4) if r != rank]
    for other in others:
        links.send_tensor_dict({"from": rank, **items}, other)
    good = all(same(links.recv_tensor_dict(other), {"from": other, **items}) for other in others)
    links.close()
    return good


def test_all_send_to_all_before_anyone_receives(gang: Gang, folders: list[str]) -> None:
    """Each rank sends more than a ring holds before it receives (vllm #49274)."""
    assert gang.run(everybody_to_everybody, folders) == [True] * 4


def in_order(rank: int, folders: list[str]) -> list[int]:
    links = make(rank, folders)
    got: list[int] = []
    for i in range(40):
        size = INLINE_BYTES if i % 3 else 4
        if rank == 0:
            links.send_tensor_dict({"i": i, "x": torch.full((size,), i % 100, dtype=torch.uint8)}, 2)
        elif rank == 2:
            items = links.recv_tensor_dict(0)
            assert bool((items["x"] == i % 100).all())
            got.append(items["i"])
    links.close()
    return got


def test_the_order_is_kept(gang: Gang, folders: list[str]) -> None:
    assert gang.run(in_order, folders)[2] == list(range(40))


def after_the_peer_has_left(rank: int, folders: list[str]) -> list[int]:
    links = make(rank, folders)
    if rank == 0:
        for i in range(2):
            links.send_tensor_dict({"i": i}, 1)
        links.close()
        return []
    got = [links.recv_tensor_dict(0)["i"]]
    link = links._link(0)
    assert isinstance(link, GlooLink)
    with suppress(PeerLostError):
        while True:  # until gloo has noticed that the peer is gone
            link._irecv(torch.empty(1), TAG + 0x100)
            time.sleep(0.01)
    return [*got, links.recv_tensor_dict(0)["i"]]


def test_the_last_dict_of_a_peer_that_has_left_is_received(gang: Gang, tmp_path: Path) -> None:
    """The receive after it cannot be posted any more, which is no error yet."""
    assert gang.run(after_the_peer_has_left, places(tmp_path, "ab"), ranks=2)[1] == [0, 1]


def reuse(rank: int, folders: list[str], size: int) -> bool:
    """The sender overwrites its buffer as soon as the send has returned: vLLM takes our send for a finished one."""
    links = make(rank, folders)
    buffer = torch.zeros(size, dtype=torch.uint8)
    good = True
    for i in range(MAX_IN_FLIGHT - 1):
        if rank == 0:
            buffer.fill_(i)
            links.send_tensor_dict({"x": buffer[:-1], "y": buffer[:8]}, 3)
            buffer.fill_(99)
    dist.barrier()
    for i in range(MAX_IN_FLIGHT - 1):
        if rank == 3:
            items = links.recv_tensor_dict(0)
            good = good and bool((items["x"] == i).all()) and bool((items["y"] == i).all())
    links.close()
    return good


SIZES = (1000, 100_000, LARGE)
"""Over gloo a payload that is copied out of its message, one that stays there, and one behind it."""


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_buffer_may_be_reused_and_the_sender_does_not_wait(
    gang: Gang, tmp_path: Path, size: int, streams: bool
) -> None:
    """The barrier lies between the last send and the first receive."""
    assert gang.run(reuse, places(tmp_path, "abcd", streams=streams), size) == [True] * 4


def without_references(rank: int, folders: list[str]) -> bool:
    links = make(rank, folders)
    if rank == 0:
        for i in range(4):
            links.send_tensor_dict({"x": torch.full((LARGE,), i, dtype=torch.uint8)}, 1)
            torch.full((LARGE,), 77, dtype=torch.uint8)  # would get the freed memory
    dist.barrier()
    good = rank != 1 or all(bool((links.recv_tensor_dict(0)["x"] == i).all()) for i in range(4))
    dist.barrier()
    links.close()
    return good


@pytest.mark.parametrize("streams", [False, True])
def test_a_buffer_lives_until_it_has_been_sent(gang: Gang, tmp_path: Path, streams: bool) -> None:
    assert gang.run(without_references, places(tmp_path, "ab", streams=streams), ranks=2) == [True] * 2


def kept_apart(rank: int, folders: list[str], size: int) -> bool:
    """What was received stays as it is while anyone holds it, in whatever way, though later dicts reuse memory."""
    links = make(rank, folders)
    held: list[Any] = []
    for i in range(12):
        if rank == 0:
            links.send_tensor_dict({"x": torch.full((size,), i, dtype=torch.uint8)}, 1)
        elif rank == 1:
            x = links.recv_tensor_dict(0)["x"]
            held.append([x, x[5:], x.numpy(), x.view(2, -1), None][i % 5])
        dist.barrier()
    good = all(h is None or bool((torch.as_tensor(h) == i).all()) for i, h in enumerate(held))
    links.close()
    return good


@pytest.mark.parametrize("size", SIZES)
def test_memory_is_not_reused_while_someone_holds_it(gang: Gang, folders: list[str], size: int) -> None:
    assert gang.run(kept_apart, folders, size) == [True] * 4


def test_a_frame_that_arrives_in_parts_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """A header in two parts, then a part of a frame like it, while tensors are ready for one that is smaller."""
    capacity = 1 << 20
    out = Ring.create(tmp_path / "ab", "rank 0 -> rank 1", capacity)
    back = Ring.create(tmp_path / "ba", "rank 1 -> rank 0", capacity)
    into = Ring.attach(tmp_path / "ab", "rank 0 -> rank 1", capacity)
    reader = ShmLink(back, into, timeout=20.0)
    codec = FrameCodec("rank 0 -> rank 1")

    def put(items: dict[str, Any], start: int, end: int | None = None) -> None:
        if start == 0:
            header, tensors, _ = codec.encode(items, 0)
            frame[:] = [header + b"".join(t.numpy().tobytes() for t in tensors)]
        piece = torch.frombuffer(bytearray(frame[0][start:end]), dtype=torch.uint8)
        assert out.put(*span(piece)) == piece.nbytes

    frame = [b""]
    small, large = {"x": torch.ones(500, dtype=torch.uint8)}, {"x": torch.full((2000,), 7, dtype=torch.uint8)}
    for _ in range(2):
        put(small, 0)
        assert same(reader.recv(), small)
    put(large, 0, 50)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(reader.recv)
        time.sleep(0.3)  # it has nothing to do, and makes ready
        put(large, 50)
        assert same(received.result(20), large)
        put(large, 0, 900)
        received = pool.submit(reader.recv)
        time.sleep(0.3)
        assert not received.done()
        put(large, 900)
        assert same(received.result(20), large)
    reader.close()
    out.segment.close()


def refused(rank: int, folders: list[str]) -> str:
    links = make(rank, folders)
    text = ""
    if rank == 0:
        try:
            links.send_tensor_dict({"good": 1, "bad": object()}, 1)
        except FrameError as error:
            text = str(error)
        links.send_tensor_dict({"good": 2}, 1)
    elif rank == 1:
        assert links.recv_tensor_dict(0) == {"good": 2}
    links.close()
    return text


def test_what_cannot_travel_is_refused_and_the_link_goes_on(gang: Gang, folders: list[str]) -> None:
    text = gang.run(refused, folders)[0]
    assert text.startswith("rank 0 -> rank 1: value of key 'bad' is a builtins.object, which cannot travel")


def garbage(rank: int, folders: list[str], kind: str) -> str:
    links = make(rank, folders)
    if rank == 0:
        sender = links._link(1)
        header, parts, _ = sender._encoder.encode({"x": torch.zeros(100)}, INLINE_BYTES)
        data = header + parts[0].numpy().tobytes() + (1).to_bytes(8, "little")
        data = {
            "garbage": bytes(range(200)),
            "version": data[:4] + b"\7\0" + data[6:],
            "cut": data[:-20],
            "short": data[:50],
            "empty": b"\0",
        }[kind]
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 1, tag=TAG)
    else:
        try:
            links.recv_tensor_dict(0)
        except FrameError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("garbage", "not a cpupp frame"),
        ("version", "frame of version 7, this rank speaks version 1"),
        ("cut", "truncated frame"),
        ("short", "corrupt or truncated frame"),
        ("empty", "not a cpupp frame"),
    ],
)
def test_what_is_no_frame_is_an_error_that_names_both_ranks(gang: Gang, tmp_path: Path, kind: str, text: str) -> None:
    assert gang.run(garbage, places(tmp_path, "ab"), kind, ranks=2)[1].startswith(f"rank 0 -> rank 1: {text}")


# Collectives


def gathered(rank: int, folders: list[str], size: int) -> list[str]:
    links = make(rank, folders, "tp:0")
    bad: list[str] = []
    for dtype in DTYPES:
        for shape in ((size, 4, 6), (0, 3), (5,), (1, 300_000) if size == 2 else (1,)):
            for dim in range(len(shape)):
                parts = [pattern(r, shape, dtype) for r in range(4)]
                strided = parts[rank].transpose(0, -1).contiguous().transpose(0, -1)
                found = links.all_gather(strided, dim)
                expected = torch.cat(parts, dim)
                at_two = links.gather(strided, 2, dim)
                if not torch.equal(found, expected) or found.dtype != dtype:
                    bad.append(f"all_gather {dtype} {shape} {dim}")
                if (at_two is None) != (rank != 2) or (at_two is not None and not torch.equal(at_two, expected)):
                    bad.append(f"gather {dtype} {shape} {dim}")
    links.close()
    return bad


def test_gathering_equals_torch_cat_for_every_dim_and_dtype(gang: Gang, folders: list[str]) -> None:
    assert gang.run(gathered, folders, 2) == [[]] * 4


def only_giving(rank: int, folders: list[str]) -> bool:
    """Ranks that only give must not run ahead of the one that takes."""
    links = make(rank, folders, "tp:0")
    good = True
    for i in range(60):
        found = links.gather(torch.full((50_000,), i * 4 + rank), 1, 0)
        if found is not None:
            good = good and torch.equal(found, torch.arange(i * 4, i * 4 + 4).repeat_interleave(50_000))
    links.close()
    return good


def test_gather_many_times_in_a_row(gang: Gang, folders: list[str]) -> None:
    assert gang.run(only_giving, folders) == [True] * 4


def reduced(rank: int, folders: list[str], size: int) -> list[tuple[str, bytes]]:
    links = make(rank, folders, "tp:0")
    results: list[tuple[str, bytes]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
        for shape in ((3, 5), (), (0, 4), (2, 700_001)):
            torch.manual_seed(7)
            parts = [(torch.randn(shape) * 10).to(dtype) for _ in range(size)]
            mine = parts[rank].clone() if len(shape) != 2 else parts[rank].t().contiguous().t()
            links.all_reduce(mine)
            exact = sum(p.double() for p in parts)
            error = (mine.double() - exact).abs().max().item() if mine.numel() else 0.0
            bound = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-18, torch.int64: 0}[dtype]
            assert error <= bound * size * 40, f"{dtype} {shape}: {error}"
            results.append((f"{dtype} {shape}", mine.contiguous().view(-1).view(torch.uint8).numpy().tobytes()))
    links.close()
    return results


@pytest.mark.parametrize("layout", ["aa", "ab", "aab", "abc", "aaaa", "aabb", "abab", "aaab", "aabc", "abcd"])
def test_all_reduce_sums_and_is_equal_on_all_ranks(gang: Gang, tmp_path: Path, layout: str) -> None:
    first, *others = gang.run(reduced, places(tmp_path, layout), len(layout), ranks=len(layout))
    for other in others:
        assert [name for (name, a), (_, b) in zip(first, other, strict=True) if a != b] == []


def unequal(rank: int, folders: list[str]) -> list[str]:
    """What rank 0 and 1 hear of a sum of two lengths; before it one that leaves the longer's bytes behind."""
    links = make(rank, folders, "tp:0")
    found = []
    for count in (60, 40 + 10 * rank):
        try:
            links.all_reduce(torch.ones(count))
        except FrameError as error:
            found.append(str(error))
    dist.barrier()
    return found


def test_a_sum_of_two_lengths_is_an_error_that_names_both_ranks(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(unequal, places(tmp_path, "ab"), ranks=2) == [
        ["rank 1 -> rank 0: 200 bytes arrived in a collective, 160 were due"],
        ["rank 0 -> rank 1: 160 bytes arrived in a collective, 200 were due"],
    ]


@pytest.fixture(scope="module")
def eight() -> Iterator[Gang]:
    with Gang([8]) as ranks:
        yield ranks


def everything(rank: int, folders: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """All collectives, and a dict to every other rank, against what plain torch computes from all parts."""
    bad: list[str] = []
    size = len(folders)
    parts = [pattern(r, shape, dtype) for r in range(size)]
    tensors = make(rank, folders, "tp:0")
    summed = parts[rank].clone()
    tensors.all_reduce(summed)
    exact = sum(part.double() for part in parts)
    assert isinstance(exact, torch.Tensor)
    wanted = exact.to(dtype) if dtype.is_floating_point else exact.long().to(dtype)  # integers wrap
    if not torch.allclose(summed.double(), wanted.double(), rtol=2**-7 if dtype.is_floating_point else 0):
        bad.append("all_reduce")
    for dim in range(len(shape)):
        if not torch.equal(tensors.all_gather(parts[rank], dim), torch.cat(parts, dim)):
            bad.append(f"all_gather {dim}")
        found = tensors.gather(parts[rank], size - 1, dim)
        if found is not None and not torch.equal(found, torch.cat(parts, dim)):
            bad.append(f"gather {dim}")
    tensors.close()
    stages = make(rank, folders, "pp:0")
    for step in range(2):  # the second finds everything ready for a dict like the first
        for other in range(size):
            if other != rank:
                stages.send_tensor_dict({"x": parts[rank], "step": step}, other)
        for other in range(size):
            if other != rank and not same(stages.recv_tensor_dict(other), {"x": parts[other], "step": step}):
                bad.append(f"dict of rank {other}")
    dist.barrier()
    stages.close()
    return bad


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.text("abcd", min_size=2, max_size=8),
    shape=st.lists(st.sampled_from([0, 1, 3, 64, 1100]), min_size=0, max_size=3).filter(lambda s: prod(s) < 2_000_000),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8]),
)
def test_any_group_on_any_hosts(
    eight: Gang, tmp_path_factory: pytest.TempPathFactory, layout: str, shape: list[int], dtype: torch.dtype
) -> None:
    folders = places(tmp_path_factory.mktemp("hosts"), layout)
    assert eight.run(everything, folders, tuple(shape), dtype, ranks=len(layout)) == [[]] * len(layout)


# Pipeline and tensor parallel together


def size_of(tensor: torch.Tensor) -> int:
    return int(tensor.nbytes)


def hop_of_two_stages(rank: int, folders: list[str]) -> tuple[bool, list[int], int]:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second."""
    groups = {name: dist.new_group(ranks) for name, ranks in GRID.items()}
    mine = {kind: next(g for n, g in groups.items() if n.startswith(kind) and rank in GRID[n]) for kind in ("tp", "pp")}
    handoff = RankHandoff(
        run="r", attempt=1, node_rank=0, mode="links", backend="auto", reports="", host="a", no_shm=False
    )
    options: dict[str, Any] = {"shm_dir": Path(folders[rank]), "timeout": 60.0}
    address = "127.0.0.1" if STREAMS in Path(folders[rank]).parts else ""
    tensor = Communicator("tp:0", mine["tp"], handoff, **options)
    links = Communicator("pp:0", mine["pp"], handoff, tensor_group=tensor, address=address, **options)
    torch.manual_seed(3)
    items = {
        "hidden_states": torch.randn(64, 4096).bfloat16(),
        "residual": torch.randn(4096, 64).t(),
        "odd": torch.arange(100_001),
        "small": torch.arange(10),
        "step": 4,
    }
    good, sent = True, 0
    for _ in range(3):
        if rank < 2:
            links.send_tensor_dict(items, 1)
            link = links._link(1)
            # A connection of its own has nothing in flight that the kernel has taken.
            sent = (
                -1 if isinstance(link, ShmLink) or not link._in_flight else sum(map(size_of, link._in_flight[-1][-1]))
            )
        else:
            good = good and same({**links.recv_tensor_dict(0)}, items)
    assert links._slicer is not None
    links.close()
    tensor.close()
    return good, sorted(links._slicer.sliced), sent


GRID = {"tp a": [0, 1], "tp b": [2, 3], "pp a": [0, 2], "pp b": [1, 3]}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("layout", "sliced"), [("aabb", True), ("abab", False), ("aaaa", False), ("abcd", False), ("aabc", False)]
)
def test_equal_tensors_cross_hosts_in_slices(
    gang: Gang, tmp_path: Path, layout: str, sliced: bool, streams: bool
) -> None:
    answers = gang.run(hop_of_two_stages, places(tmp_path, layout, streams=streams))
    assert [good for good, _, _ in answers] == [True] * 4
    assert [s for _, s, _ in answers] == ([[1], [1], [0], [0]] if sliced else [[]] * 4)
    whole = 64 * 4096 * (2 + 4)
    if layout != "aaaa" and layout != "abab" and not (streams and sliced):
        assert answers[0][2] == 100_001 * 8 + 80 + (whole // 2 if sliced else whole)


# Peers that die


def wait_for_a_peer(rank: int, folders: list[str], what: str) -> str:
    links = make(rank, folders, "tp:0" if what == "all_reduce" else "pp:0")
    dist.barrier()
    if rank == 1:
        if what == "send":  # the first dict has begun to arrive
            link = links._link(0)
            assert isinstance(link, ShmLink)
            link._in.wait_for_data(time.monotonic() + 60)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if what == "recv":
            links.recv_tensor_dict(1)
        elif what == "send":
            for _ in range(10):
                links.send_tensor_dict({"x": torch.zeros(communicator.NEIGHBOUR_RING_BYTES)}, 1)
        else:
            for _ in range(3):
                links.all_reduce(torch.ones(board.SLOT_BYTES))
    except PeerLostError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("what", ["recv", "send", "all_reduce"])
def test_a_dead_peer_is_noticed_and_named(tmp_path: Path, what: str) -> None:
    with Gang([2]) as gang:
        gang.start(wait_for_a_peer, places(tmp_path, "aa"), what)
        found = gang.answer(0)
    assert "rank 1" in found
    assert "gone" in found
    assert not list(tmp_path.glob("*/*"))


def wait_over_gloo(rank: int, folders: list[str]) -> str:
    links = make(rank, folders)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        links.recv_tensor_dict(1)
    except PeerLostError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("streams", [False, True])
def test_a_dead_peer_is_noticed_over_gloo(tmp_path: Path, streams: bool) -> None:
    with Gang([2]) as gang:
        gang.start(wait_over_gloo, places(tmp_path, "ab", streams=streams))
        assert gang.answer(0).startswith("rank 1 -> rank 0: ")


def policies(rank: int, folders: list[str]) -> list[int]:
    """The scheduling policies of this process's gloo event loops, once a communicator has been made."""
    make(rank, folders).close()
    tasks = [t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text().strip() == THREAD_NAME]
    return [os.sched_getscheduler(int(t.name)) for t in tasks]


def test_gloo_does_not_run_against_its_user(gang: Gang, tmp_path: Path) -> None:
    """Where both have one core, its event loop would spin until the next tick of the clock."""
    for found in gang.run(policies, places(tmp_path, "aaaa")):
        assert found
        assert set(found) == {os.SCHED_BATCH}


def test_errors_are_errors_of_cpupp() -> None:
    assert issubclass(PeerLostError, CpuppError)
    assert issubclass(FrameError, CpuppError)
