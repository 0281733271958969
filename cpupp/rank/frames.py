"""The wire format of one tensor dict: a versioned binary header, then the bytes of its tensors. No pickle.

A frame is (little endian)

    prefix   36 bytes: magic, version, flags, header length, payload length; checksum; sequence number
    counts   20 bytes: schema id, entries, bytes of the schema, dimensions, bytes of the values
    schema   per entry: code (0 = plain value, else the dtype), number of dimensions, key length, key in UTF-8
    dims     int64 for each dimension of each tensor, in order
    values   the plain values, tagged
    payload  the tensors' bytes in order (in the same message, or in messages of their own)

The schema id is the CRC-32 of the schema. The checksum covers the header but for the sequence number, so the headers
of equal steps are equal up to that number: both sides keep what they worked out for a header that they have seen.
Whoever reads a frame checks every length against a bound before it allocates anything.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch

from cpupp.errors import CpuppError, ExitCode
from cpupp.rank.plain_values import pack_value, unpack_value

MAGIC = b"CPUF"
VERSION = 1
FIXED = struct.Struct("<4sHHIQ")
CHECKSUM = struct.Struct("<I")
SEQUENCE = struct.Struct("<Q")
COUNTS = struct.Struct("<IIIII")
_SEQUENCE_AT = FIXED.size + CHECKSUM.size
PREFIX_BYTES = _SEQUENCE_AT + SEQUENCE.size
MAX_HEADER_BYTES = 64 * 1024
MAX_ENTRIES = 4096
MAX_PAYLOAD_BYTES = 8 << 30
MAX_DIMS = 16
_MAX_REMEMBERED = 64  # a peer whose headers never repeat must not make this grow for ever

_ENTRY = struct.Struct("<BBH")
_VALUE = 0
# Codes are part of the format: append, never renumber.
_DTYPES: dict[int, torch.dtype] = {
    1: torch.bfloat16,
    2: torch.float16,
    3: torch.float32,
    4: torch.float64,
    5: torch.int8,
    6: torch.int16,
    7: torch.int32,
    8: torch.int64,
    9: torch.uint8,
    10: torch.bool,
    11: torch.float8_e4m3fn,
    12: torch.float8_e5m2,
    13: torch.uint16,
    14: torch.uint32,
    15: torch.uint64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

Entry = tuple[str, torch.dtype | None, int]
"""Key, dtype (None for a plain value), number of dimensions."""


class Memory(Protocol):
    """Where received tensors come from."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape with any content."""


class FrameError(CpuppError):
    """A frame cannot be sent or read. The text names both ranks and what is wrong."""

    def __init__(self, link: str, message: str) -> None:
        super().__init__(
            "FRAME",
            f"{link}: {message}",
            hint="both ranks must run the same cpupp; see the log of the other rank for an earlier error",
            exit_code=ExitCode.RANK_FAILED,
        )


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header. `shapes`: one per tensor, in order; `payload`: the sum of their bytes; `length`: its own."""

    entries: tuple[Entry, ...]
    shapes: tuple[tuple[int, ...], ...]
    values: bytes
    payload: int
    detached: bool
    length: int

    def allocate(self, memory: Memory | None = None) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return the dict with uninitialised tensors (of `memory`, if given), and those tensors in payload order."""
        empty = torch.empty if memory is None else memory.empty
        result: dict[str, Any] = {}
        tensors: list[torch.Tensor] = []
        at = 0
        for key, dtype, _ in self.entries:
            if dtype is None:
                result[key], at = unpack_value(self.values, at)
            else:
                result[key] = tensor = empty(self.shapes[len(tensors)], dtype=dtype)
                tensors.append(tensor)
        return result, tensors


@dataclass(slots=True)
class FrameCodec:
    """Encodes and decodes the frames of one direction of one link.

    link: how errors call this link, for instance `rank 0 -> rank 2`; max_payload: bound of a frame's payload in bytes;
    sequence: number of the last frame.
    """

    link: str
    max_payload: int = MAX_PAYLOAD_BYTES
    sequence: int = 0
    _written: dict[Any, tuple[bytes, bytes, bool]] = field(default_factory=dict)
    _read: dict[bytes, Header] = field(default_factory=dict)
    _last: tuple[bytes, bytes, Header] | None = None

    def encode(self, items: Mapping[str, Any], inline_limit: int) -> tuple[bytes, list[torch.Tensor], bool]:
        """Return the header, the tensors (contiguous, on the CPU) and whether the payload travels detached.

        The payload is detached when header and payload together exceed `inline_limit` bytes.
        Raises FrameError for a value that cannot travel (by key and type) and for a frame past the bounds.
        """
        tensors: list[torch.Tensor] = []
        signature: list[Any] = [inline_limit]
        values: bytearray | None = None
        for key, value in items.items():
            if isinstance(value, torch.Tensor):
                tensor = self._travelling(key, value)
                tensors.append(tensor)
                signature += (key, tensor.dtype, tensor.shape)
            else:
                values = bytearray() if values is None else values
                self._pack(key, value, values)
                signature += (key, None, ())
        repeated = tuple(signature) if values is None else None
        known = self._written.get(repeated)
        if known is None:
            known = self._compose(signature, tensors, bytes(values or b""), inline_limit)
            if repeated is not None:
                self._remember(self._written, repeated, known)
        before, after, detached = known
        self.sequence += 1
        return before + SEQUENCE.pack(self.sequence) + after, tensors, detached

    def _compose(
        self, signature: list[Any], tensors: list[torch.Tensor], values: bytes, inline_limit: int
    ) -> tuple[bytes, bytes, bool]:
        """The header up to its sequence number, the rest of it, and whether the payload is detached."""
        num_entries = (len(signature) - 1) // 3
        schema = bytearray()
        for key, dtype, shape in zip(signature[1::3], signature[2::3], signature[3::3], strict=True):
            name = key.encode("utf-8", "surrogatepass")
            if len(name) > 0xFFFF:
                raise FrameError(self.link, f"key {key[:40]!r}... of {len(name)} bytes is too long")
            schema += _ENTRY.pack(_VALUE if dtype is None else _CODES[dtype], len(shape), len(name)) + name
        num_dims = sum(t.dim() for t in tensors)
        counts = COUNTS.pack(zlib.crc32(schema), num_entries, len(schema), num_dims, len(values))
        after = counts + schema + struct.pack(f"<{num_dims}q", *(n for t in tensors for n in t.shape)) + values
        length, payload = PREFIX_BYTES + len(after), sum(t.nbytes for t in tensors)
        self._check_bounds(length, payload, num_entries)
        detached = length + payload > inline_limit
        fixed = FIXED.pack(MAGIC, VERSION, int(detached), length, payload)
        return fixed + checksum(fixed, after), after, detached

    def decode(self, data: bytes | memoryview) -> Header:
        """Read a header from the start of `data` (which may be longer). Allocates no tensor.

        Raises FrameError when it is truncated, is not a frame, has another version, or names sizes past the bounds.
        """
        length, _ = self.lengths(data)
        if len(data) < length:
            raise FrameError(self.link, f"truncated frame: {len(data)} bytes of a header of {length}")
        before, after = bytes(data[:_SEQUENCE_AT]), bytes(data[PREFIX_BYTES:length])
        header = self._read.get(before + after)
        if header is None:
            header = self._parse(before, after)
            self._remember(self._read, before + after, header)
        self._count(data)
        self._last = before, after, header
        return header

    def again(self, data: memoryview, expected: Header) -> Header | None:
        """Return the last header if it is the `expected` one and `data` starts with its like; else read nothing.

        Raises FrameError when it is out of order.
        """
        if self._last is None or self._last[2] is not expected:
            return None
        before, after, header = self._last
        if data[:_SEQUENCE_AT] != before or data[PREFIX_BYTES : header.length] != after:
            return None
        self._count(data)
        return header

    def _count(self, data: bytes | memoryview) -> None:
        (sequence,) = SEQUENCE.unpack_from(data, _SEQUENCE_AT)
        if sequence != self.sequence + 1:
            raise FrameError(self.link, f"frame {sequence} arrived, frame {self.sequence + 1} was due")
        self.sequence = sequence

    def lengths(self, prefix: bytes | memoryview) -> tuple[int, int]:
        """Return the bytes of header and payload of the frame that starts with `prefix`; raises like `decode`."""
        if len(prefix) < PREFIX_BYTES:
            raise FrameError(self.link, f"truncated frame: {len(prefix)} bytes, a prefix has {PREFIX_BYTES}")
        magic, version, flags, length, payload = FIXED.unpack_from(prefix)
        if magic != MAGIC:
            raise FrameError(self.link, f"not a cpupp frame: it starts with {magic.hex()}, not {MAGIC.hex()}")
        if version != VERSION:
            raise FrameError(self.link, f"frame of version {version}, this rank speaks version {VERSION}")
        if flags > 1 or length < PREFIX_BYTES + COUNTS.size:
            raise FrameError(self.link, f"corrupt frame: flags {flags:#x}, header of {length} bytes")
        self._check_bounds(length, payload, 0)
        return length, payload

    def _check_bounds(self, length: int, payload: int, num_entries: int) -> None:
        if length > MAX_HEADER_BYTES or num_entries > MAX_ENTRIES:
            raise FrameError(self.link, f"header of {length} bytes and {num_entries} entries exceeds the bounds")
        if payload > self.max_payload:
            raise FrameError(self.link, f"payload of {payload} bytes exceeds the bound of {self.max_payload}")

    def _travelling(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        self._check_key(key)
        if not tensor.is_cpu or tensor.layout != torch.strided or tensor.dtype not in _CODES:
            raise FrameError(
                self.link,
                f"tensor {key!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot travel: "
                "only dense CPU tensors of the plain dtypes can",
            )
        if tensor.dim() > MAX_DIMS:
            raise FrameError(self.link, f"tensor {key!r} has {tensor.dim()} dimensions, at most {MAX_DIMS} can travel")
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def _check_key(self, key: Any) -> None:
        if not isinstance(key, str):
            raise FrameError(self.link, f"key {key!r} is a {type(key).__name__}, keys must be str")

    def _pack(self, key: Any, value: Any, out: bytearray) -> None:
        self._check_key(key)
        try:
            pack_value(value, out)
        except TypeError as error:
            raise FrameError(self.link, f"value of key {key!r} is {error}") from None

    @staticmethod
    def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
        if len(table) >= _MAX_REMEMBERED:
            table.clear()
        table[key] = value

    def _parse(self, before: bytes, after: bytes) -> Header:
        fixed = before[: FIXED.size]
        if checksum(fixed, after) != before[FIXED.size :]:
            raise FrameError(self.link, "corrupt or truncated frame: the checksum of its header does not match")
        _, _, flags, length, payload = FIXED.unpack(fixed)
        schema_id, num_entries, schema_bytes, num_dims, value_bytes = COUNTS.unpack_from(after)
        self._check_bounds(length, payload, num_entries)
        schema = after[COUNTS.size : COUNTS.size + schema_bytes]
        dims_at = COUNTS.size + schema_bytes
        if dims_at + 8 * num_dims + value_bytes != len(after) or zlib.crc32(schema) != schema_id:
            raise FrameError(self.link, "corrupt frame: its schema does not match its schema id, or its lengths differ")
        entries = self._parse_schema(schema)
        if len(entries) != num_entries or sum(e[2] for e in entries) != num_dims:
            raise FrameError(self.link, f"corrupt frame: {len(entries)} entries, {num_entries} were announced")
        values = after[dims_at + 8 * num_dims :]
        shapes = self._parse_shapes(entries, struct.unpack_from(f"<{num_dims}q", after, dims_at), payload)
        self._check_values(entries, values)
        return Header(entries, shapes, values, payload, bool(flags & 1), length)

    def _parse_schema(self, schema: bytes) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        at = 0
        while at < len(schema):
            if at + _ENTRY.size > len(schema):
                raise FrameError(self.link, "corrupt frame: the schema ends inside an entry")
            code, num_dims, key_bytes = _ENTRY.unpack_from(schema, at)
            at += _ENTRY.size
            name = schema[at : at + key_bytes]
            at += key_bytes
            if len(name) != key_bytes or (code != _VALUE and code not in _DTYPES):
                raise FrameError(self.link, f"corrupt frame: schema entry with code {code}, key of {key_bytes} bytes")
            if num_dims > (MAX_DIMS if code else 0):
                raise FrameError(self.link, f"corrupt frame: an entry with {num_dims} dimensions")
            try:
                key = name.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                raise FrameError(self.link, f"corrupt frame: key {name!r} is not UTF-8") from None
            entries.append((key, _DTYPES[code] if code else None, num_dims))
        if len({e[0] for e in entries}) != len(entries):
            raise FrameError(self.link, "corrupt frame: a key occurs twice")
        return tuple(entries)

    def _parse_shapes(
        self, entries: tuple[Entry, ...], dims: tuple[int, ...], payload: int
    ) -> tuple[tuple[int, ...], ...]:
        shapes: list[tuple[int, ...]] = []
        at = total = 0
        for key, dtype, num_dims in entries:
            if dtype is None:
                continue
            shape = dims[at : at + num_dims]
            at += num_dims
            # torch computes strides in int64 even for an empty tensor, so the product without zeros is bounded too
            if any(n < 0 for n in shape) or prod(n or 1 for n in shape) * dtype.itemsize > max(8, self.max_payload):
                raise FrameError(self.link, f"tensor {key!r} of shape {list(shape)} exceeds the bounds")
            total += prod(shape) * dtype.itemsize
            shapes.append(shape)
        if total != payload:
            raise FrameError(self.link, f"corrupt frame: shapes need {total} bytes, the payload has {payload}")
        return tuple(shapes)

    def _check_values(self, entries: tuple[Entry, ...], values: bytes) -> None:
        at = 0
        for key, dtype, _ in entries:
            if dtype is None:
                try:
                    _, at = unpack_value(values, at)
                except ValueError as error:
                    raise FrameError(self.link, f"corrupt frame: value of key {key!r}: {error}") from None
        if at != len(values):
            raise FrameError(self.link, f"corrupt frame: {len(values) - at} bytes are left after its values")


def checksum(fixed: bytes, after: bytes) -> bytes:
    """CRC-32 of the header but for itself and the sequence number, as it stands between the two."""
    return CHECKSUM.pack(zlib.crc32(after, zlib.crc32(fixed)))
