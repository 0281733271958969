"""The plain values that may travel in a tensor dict: bool, int, float, str, None, and lists of these."""

from __future__ import annotations

import struct
from typing import Any

MAX_LIST_DEPTH = 4
_LENGTH = struct.Struct("<I")
_DOUBLE = struct.Struct("<d")


def pack_value(value: Any, out: bytearray, depth: int = 0) -> None:
    """Append the value to `out`. Raises TypeError, naming the type, for anything else than the plain values."""
    kind = type(value)  # not isinstance: a numpy number or an enum would come out as something else
    if value is None:
        out += b"N"
    elif kind is bool:
        out += b"T" if value else b"F"
    elif kind is int:
        raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        out += b"i" + _LENGTH.pack(len(raw)) + raw
    elif kind is float:
        out += b"f" + _DOUBLE.pack(value)
    elif kind is str:
        raw = value.encode("utf-8", "surrogatepass")
        out += b"s" + _LENGTH.pack(len(raw)) + raw
    elif kind is list and depth < MAX_LIST_DEPTH:
        out += b"l" + _LENGTH.pack(len(value))
        for item in value:
            pack_value(item, out, depth + 1)
    else:
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__}, which cannot travel: tensors, bool, int, float, str, None and "
            f"lists of these (to depth {MAX_LIST_DEPTH}) can"
        )


def unpack_value(data: bytes, at: int, depth: int = 0) -> tuple[Any, int]:
    """Read one value from position `at`; return it and the position behind it. Raises ValueError for anything else."""
    tag = data[at : at + 1]
    at += 1
    if tag in (b"N", b"T", b"F"):
        return {b"N": None, b"T": True, b"F": False}[tag], at
    length_bytes = data[at : at + 4]
    if tag == b"f" and at + 8 <= len(data):
        return _DOUBLE.unpack_from(data, at)[0], at + 8
    if tag not in (b"i", b"s", b"l") or len(length_bytes) != 4:
        raise ValueError(f"unknown tag {tag!r}, or the data end inside a value")
    (length,) = _LENGTH.unpack(length_bytes)
    at += 4
    if length > len(data) - at:
        raise ValueError(f"length {length} runs past the end")
    if tag == b"l":
        if depth >= MAX_LIST_DEPTH:
            raise ValueError("lists are nested too deep")
        items: list[Any] = []
        for _ in range(length):
            item, at = unpack_value(data, at, depth + 1)
            items.append(item)
        return items, at
    raw = data[at : at + length]
    value = int.from_bytes(raw, "little", signed=True) if tag == b"i" else raw.decode("utf-8", "surrogatepass")
    return value, at + length
