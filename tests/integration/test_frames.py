"""The wire format: what goes in comes out, and nothing that is not a frame gets through or allocates past the bound."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpupp.rank.frames import (
    COUNTS,
    FIXED,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    SEQUENCE,
    FrameCodec,
    FrameError,
    Header,
    checksum,
)

LINK = "rank 3 -> rank 7"
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool]

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=20)
values = scalars | st.lists(scalars | st.lists(scalars, max_size=3), max_size=5)
shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype and shape, 0 rows and scalars included; sometimes not contiguous."""
    tensor = torch.randint(0, 2, draw(shapes)).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


dicts = st.dictionaries(st.text(st.characters(), max_size=12), values | tensors(), max_size=8)


def deliver(header: bytes, parts: list[torch.Tensor], codec: FrameCodec) -> dict[str, Any]:
    """What a link does with a frame on the other side."""
    result, empty = codec.decode(header).allocate()
    for target, part in zip(empty, parts, strict=True):
        assert (target.dtype, target.shape) == (part.dtype, part.shape)
        target.copy_(part)
    return result


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


@settings(deadline=None)
@given(st.lists(dicts, min_size=1, max_size=4))
def test_what_goes_in_comes_out_in_order(items: list[dict[str, Any]]) -> None:
    sender, receiver = FrameCodec(LINK), FrameCodec(LINK)
    for item in items:
        header, parts, _ = sender.encode(item, 0)
        assert all(p.is_contiguous() for p in parts)
        got = deliver(header, parts, receiver)
        assert list(got) == list(item)
        assert all(same(item[k], got[k]) for k in item)


def test_two_hundred_keys() -> None:
    items = {f"model.layers.{i}.hidden": torch.full((1, 2), i) for i in range(200)}
    header, parts, _ = FrameCodec(LINK).encode(items, 0)
    assert deliver(header, parts, FrameCodec(LINK)).keys() == items.keys()


def test_a_frame_is_inline_up_to_the_limit() -> None:
    items = {"x": torch.zeros(100, dtype=torch.uint8)}
    length = len(FrameCodec(LINK).encode(items, 0)[0]) + 100
    assert FrameCodec(LINK).encode(items, length)[2] is False
    assert FrameCodec(LINK).encode(items, length - 1)[2] is True


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ({"a": (1, 2)}, "value of key 'a' is a builtins.tuple"),
        ({"a": {"b": 1}}, "value of key 'a' is a builtins.dict"),
        ({"a": [b"x"]}, "value of key 'a' is a builtins.bytes"),
        ({"a": [[[[[1]]]]]}, "value of key 'a' is a builtins.list"),
        ({"a": torch.ones(2, device="meta")}, "tensor 'a' (torch.float32, torch.strided, meta) cannot travel"),
        ({"a": torch.ones(2).to_sparse()}, "tensor 'a' (torch.float32, torch.sparse_coo, cpu) cannot travel"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "tensor 'a' (torch.complex64, torch.strided, cpu) cannot travel"),
        ({1: 2}, "key 1 is a int, keys must be str"),
        ({"a": "x" * MAX_HEADER_BYTES}, "exceeds the bound"),
        ({"a": torch.empty(9, dtype=torch.uint8)}, "payload of 9 bytes exceeds the bound of 8"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(items: dict[Any, Any], text: str) -> None:
    with pytest.raises(FrameError) as caught:
        FrameCodec(LINK, max_payload=8).encode(items, 0)
    assert LINK in str(caught.value)
    assert text in str(caught.value)


def a_frame() -> bytes:
    items = {"hidden_states": torch.zeros(3, 4).bfloat16(), "step": 7, "names": ["a", None, 1.5]}
    return FrameCodec(LINK).encode(items, 0)[0]


@pytest.mark.parametrize("length", range(len(a_frame())))
def test_a_truncated_frame_names_both_ranks(length: int) -> None:
    with pytest.raises(FrameError, match=LINK):
        FrameCodec(LINK).decode(a_frame()[:length])
    with pytest.raises(FrameError, match=LINK):  # cut short in a buffer that still holds other bytes
        FrameCodec(LINK).decode(a_frame()[:length] + bytes(b ^ 0x5A for b in a_frame()[length:]))


def test_another_version_is_named() -> None:
    frame = bytearray(a_frame())
    frame[4] = 9
    with pytest.raises(FrameError, match=f"{LINK}: frame of version 9, this rank speaks version 1"):
        FrameCodec(LINK).decode(bytes(frame))


def test_garbage_is_no_frame() -> None:
    with pytest.raises(FrameError, match=f"{LINK}: not a cpupp frame: it starts with 80049563"):
        FrameCodec(LINK).decode(b"\x80\x04\x95\x63" + bytes(200))


def test_a_frame_out_of_order_is_refused() -> None:
    sender, receiver = FrameCodec(LINK), FrameCodec(LINK)
    first, second = (sender.encode({}, 0)[0] for _ in range(2))
    with pytest.raises(FrameError, match="frame 2 arrived, frame 1 was due"):
        receiver.decode(second)
    receiver.decode(first)
    with pytest.raises(FrameError, match="frame 1 arrived, frame 2 was due"):
        receiver.decode(first)


def framed(after: bytes, payload: int) -> bytes:
    """A header with a right checksum, whatever it says."""
    fixed = FIXED.pack(b"CPUF", 1, 0, PREFIX_BYTES + len(after), payload)
    return fixed + checksum(fixed, after) + SEQUENCE.pack(1) + after


def checked(data: bytes, bound: int) -> Header | None:
    """Decode; whatever the bytes are, the result is an error with both ranks or a header within the bound."""
    try:
        header = FrameCodec(LINK, max_payload=bound).decode(data)
    except FrameError as error:
        assert str(error).startswith(LINK)  # noqa: PT017  # most inputs are refused, and each must name the ranks
        return None
    assert sum(t.nbytes for t in header.allocate()[1]) == header.payload <= bound
    return header


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_never_crash(data: bytes) -> None:
    checked(data, 1024)
    checked(framed(data, 8), 1024)
    checked(framed(COUNTS.pack(0, 1, 20, 2, 4) + data, 8), 1024)


@settings(deadline=None)
@given(st.data(), dicts)
def test_flipped_bytes_never_get_through(data: st.DataObject, items: dict[str, Any]) -> None:
    frame = bytearray(FrameCodec(LINK).encode(items, 0)[0])
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    assert checked(bytes(frame), 1 << 20) is None


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20), st.binary(max_size=4)), max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6),
    st.binary(max_size=12),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1) | st.none(),
)
def test_a_well_checksummed_lie_stays_within_the_bound(
    entries: list[tuple[int, int, bytes]], dims: list[int], tail: bytes, payload: int, schema_id: int | None
) -> None:
    schema = b"".join(struct.pack("<BBH", code, n, len(key)) + key for code, n, key in entries)
    body = schema + struct.pack(f"<{len(dims)}q", *dims) + tail
    known = zlib.crc32(schema) if schema_id is None else schema_id
    checked(framed(COUNTS.pack(known, len(entries), len(schema), len(dims), len(tail)) + body, payload), 4096)


def test_sizes_are_checked_before_anything_is_allocated() -> None:
    header = FrameCodec(LINK).encode({"x": torch.empty(4, 4)}, 0)[0]
    after = header[PREFIX_BYTES:-16] + struct.pack("<2q", 1 << 40, 1 << 20)
    for payload, text in ((1 << 62, f"payload of {1 << 62} bytes exceeds the bound"), (64, "exceeds the bounds")):
        with pytest.raises(FrameError, match=text):
            FrameCodec(LINK).decode(framed(after, payload))
