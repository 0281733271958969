"""A link over a connection of its own: frames that come in any pieces, a slow or lost peer, and who may connect."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpupp.rank.frames import FrameCodec, FrameError
from cpupp.rank.ring import PeerLostError
from cpupp.rank.stream_link import CLOSE_S, MAX_PARTS, STREAM_BYTES, StreamLink
from cpupp.rank.streams import connect, neighbours

Pair = tuple[StreamLink, StreamLink]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    links = make_pair(*ends)
    yield links
    for end in ends:
        end.close()


def make_pair(left: socket.socket, right: socket.socket) -> Pair:
    return StreamLink(left, 0, 1, None, 1), StreamLink(right, 1, 0, None, 0)


def frame(codec: FrameCodec, items: dict[str, Any]) -> bytes:
    """What a link sends for this dict."""
    header, tensors, _ = codec.encode(items, STREAM_BYTES)
    return header + b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(
        torch.equal(v, b[k]) and v.dtype == b[k].dtype if isinstance(v, torch.Tensor) else v == b[k]
        for k, v in a.items()
    )


def items_of(size: int, mark: int) -> dict[str, Any]:
    """A dict like a stage's output, of about `size` bytes."""
    half = size // 4
    return {"hidden_states": torch.full((half,), mark).bfloat16(), "residual": torch.full((half,), mark).bfloat16()}


@given(
    sizes=st.lists(st.sampled_from([0, 4, 40, 4000, 4000, 70_000]), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 3000), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_frames_may_come_in_any_pieces(sizes: list[int], cuts: list[int]) -> None:
    """Also a smaller frame than the last one, whose successor is here already, and a header in two parts."""
    left, right = socket.socketpair()
    with left, right:
        reader = make_pair(left, right)[1]
        codec = FrameCodec("rank 0 -> rank 1")
        sent = [items_of(size, i) | ({"i": i} if i % 3 == 2 else {}) for i, size in enumerate(sizes)]
        data = b"".join(frame(codec, items) for items in sent)

        def write() -> None:
            at = number = 0
            while at < len(data):
                size = cuts[number % len(cuts)] if number < 50 else 65_536
                left.sendall(data[at : at + size])
                at, number = at + size, number + 1

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            for items in sent:
                assert same(reader.recv(), items)
                reader.expect()
            writing.result(10)


def test_many_tensors_and_none(pair: Pair) -> None:
    many = {f"key {i}": torch.full((3,), i) for i in range(MAX_PARTS + 100)}
    for items in (many, {}, {"only": "words"}, {"no rows": torch.empty(0, 4)}, many):
        pair[0].send(items)
        assert same(pair[1].recv(), items)


def test_a_slow_peer_keeps_nobody_waiting_and_the_order_stays(pair: Pair) -> None:
    """The kernel cannot hold what is sent: a thread goes on with it, and the sender may overwrite its tensors."""
    sent = torch.zeros(400_000, dtype=torch.uint8)
    began = time.monotonic()
    for i in range(6):
        sent.fill_(i)
        pair[0].send({"x": sent, "i": i})
    sent.fill_(99)
    assert time.monotonic() - began < 5.0, "it waited for the peer"
    for i in range(6):
        got = pair[1].recv()
        assert got["i"] == i
        assert bool((got["x"] == i).all())
    pair[0].flush()


def test_the_thread_ends_with_the_link_and_what_was_sent_arrives(pair: Pair) -> None:
    sent = items_of(STREAM_BYTES // 2, 5)
    pair[1].send({"unread": 1})
    with ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            pair[0].send(sent)
        got = pool.submit(lambda: [pair[1].recv() for _ in range(4)])
        pair[0].close()
        assert all(same(items, sent) for items in got.result(20))
    thread = pair[0]._outlet._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_a_peer_that_never_reads_does_not_keep_a_link_open(pair: Pair) -> None:
    for _ in range(4):
        pair[0].send(items_of(STREAM_BYTES // 2, 5))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pair[0].close).result(CLOSE_S + 10)


def test_both_may_send_first(pair: Pair) -> None:
    items = items_of(STREAM_BYTES // 2, 3)
    for link in pair:
        for _ in range(4):
            link.send(items)
    for link in pair:
        for _ in range(4):
            assert same(link.recv(), items)


def test_what_was_received_stays_while_someone_holds_it(pair: Pair) -> None:
    held = []
    for i in range(12):
        pair[0].send({"x": torch.full((300_000,), i, dtype=torch.uint8)})
        pair[1].expect()
        x = pair[1].recv()["x"]
        held.append([x, x[5:], x.numpy(), x.view(2, -1), None][i % 5])
    assert all(h is None or bool((torch.as_tensor(h) == i).all()) for i, h in enumerate(held))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda data: bytes(range(200)), "not a cpupp frame"),
        (lambda data: data[:4] + b"\7\0" + data[6:], "frame of version 7, this rank speaks version 1"),
        (lambda data: data[:60] + b"\xff" + data[61:], "corrupt or truncated frame"),
        (lambda data: data[:8] + b"\xff\xff\xff\x7f" + data[12:], "header of 2147483647 bytes"),
        (lambda data: data[:12] + b"\0\0\0\x40" + data[16:], "corrupt or truncated frame"),
        (lambda data: data[:-20], "Connection closed by peer"),
        (lambda data: data[:50], "Connection closed by peer"),
        (lambda data: b"", "Connection closed by peer"),
    ],
)
def test_what_is_no_frame_is_an_error_that_names_both_ranks(
    pair: Pair, spoil: Callable[[bytes], bytes], text: str, known: bool
) -> None:
    """known: a frame like it has been received before, so there is room for the next one."""
    codec = FrameCodec("rank 0 -> rank 1")
    if known:
        pair[0]._socket.sendall(frame(codec, {"x": torch.zeros(100)}))
        pair[1].recv()
    pair[0]._socket.sendall(spoil(frame(codec, {"x": torch.zeros(100)})))
    pair[0]._socket.close()
    with pytest.raises((FrameError, PeerLostError), match=f"rank 0 -> rank 1: .*{text}"):
        pair[1].recv()


@pytest.mark.parametrize("size", [1000, 2_000_000])
def test_a_peer_that_is_gone_is_named_by_who_sends(pair: Pair, size: int) -> None:
    pair[1]._socket.close()

    def send_many() -> None:
        for _ in range(20):
            pair[0].send({"x": torch.zeros(size, dtype=torch.uint8)})

    with pytest.raises(PeerLostError, match="rank 0 -> rank 1: "):
        send_many()


def test_a_peer_that_goes_while_a_thread_sends_is_named(pair: Pair) -> None:
    pair[0].send({"x": torch.zeros(1_500_000, dtype=torch.uint8)})
    pair[1]._socket.close()
    with pytest.raises(PeerLostError, match="rank 0 -> rank 1: "):
        pair[0].flush()


# Who is connected


class Meeting:
    """The exchange of a group whose ranks are threads."""

    def __init__(self, size: int) -> None:
        self._rows = [b""] * size
        self._barrier = threading.Barrier(size)

    def of(self, position: int) -> Callable[[bytes], list[bytes]]:
        def exchange(row: bytes) -> list[bytes]:
            self._rows[position] = row
            self._barrier.wait(20)
            rows = list(self._rows)
            self._barrier.wait(20)
            return rows

        return exchange


def meet(addresses: list[str], pairs: list[tuple[int, int]]) -> list[set[int]]:
    """Whom each rank is connected to; every connection carries a word both ways."""
    meeting = Meeting(len(addresses))
    with ThreadPoolExecutor(len(addresses)) as pool:
        made = list(pool.map(lambda p: connect(meeting.of(p[0]), p[0], pairs, p[1], timeout=1.0), enumerate(addresses)))
    for position, connections in enumerate(made):
        for other, connection in connections.items():
            connection.sendall(bytes([position]))
            assert made[other][position].recv(1) == bytes([position])
    for connections in made:
        for connection in connections.values():
            connection.close()
    return [set(connections) for connections in made]


def test_neighbours_are_connected_and_the_last_with_the_first() -> None:
    assert neighbours(1) == []
    assert neighbours(2) == [(0, 1)]
    assert meet(["127.0.0.1"] * 4, neighbours(4)) == [{1, 3}, {0, 2}, {1, 3}, {0, 2}]
    assert meet(["::1", "::1"], neighbours(2)) == [{1}, {0}]


def test_a_rank_without_an_address_is_left_to_gloo_on_both_sides() -> None:
    assert meet(["127.0.0.1", "", "127.0.0.1"], neighbours(3)) == [{2}, set(), {0}]
    assert meet(["127.0.0.1", "192.0.2.7"], neighbours(2)) == [set(), set()]
    assert meet(["127.0.0.1", "no address"], neighbours(2)) == [set(), set()]


def test_strangers_are_turned_away() -> None:
    """Whoever connects without the word that the group knows, or says nothing, is not taken for a peer."""
    meeting = Meeting(2)
    strangers: list[socket.socket] = []

    def listening(row: bytes) -> list[bytes]:
        rows = meeting.of(1)(row)
        if not strangers:
            port = int.from_bytes(rows[1][1:3], "little")
            for word in (*[b""] * 8, b"x" * 20, b"half"):
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                strangers[-1].sendall(word)
        return rows

    with ThreadPoolExecutor(2) as pool:
        pairs = neighbours(2)
        began = time.monotonic()
        second = pool.submit(connect, listening, 1, pairs, "127.0.0.1", 8.0)
        first = pool.submit(connect, meeting.of(0), 0, pairs, "127.0.0.1", 8.0)
        (mine,), (its,) = first.result(20).values(), second.result(20).values()
    with mine, its:
        mine.sendall(b"me")
        assert its.recv(2) == b"me"
        assert time.monotonic() - began < 6.0, "strangers who say nothing held it up"
    for stranger in strangers:
        stranger.close()
