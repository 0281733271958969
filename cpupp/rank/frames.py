"""The wire format of one tensor dict: a versioned binary header, then the bytes of its tensors. No pickle.

A frame is

    prefix   48 bytes: magic, version, flags, schema id, lengths, sequence number; checksum of the header
    schema   per entry: code (0 = plain value, else the dtype), number of dimensions, key length, key in UTF-8
    dims     int64 for each dimension of each tensor, in order
    values   the plain values, tagged
    payload  the tensors' bytes in order (in the same message, or in messages of their own)

The schema id is the CRC-32 of the schema, so a corrupt schema is refused and a known one need not be parsed again.
Whoever reads a frame checks every length against a bound before it allocates anything.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from cpupp.errors import CpuppError, ExitCode

MAGIC = b"CPUF"
VERSION = 1
PREFIX = struct.Struct("<4sHHIIIIIQQ")
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = PREFIX.size + _CHECKSUM.size
MAX_HEADER_BYTES = 64 * 1024
MAX_ENTRIES = 4096
MAX_PAYLOAD_BYTES = 8 << 30
MAX_DIMS = 16
MAX_LIST_DEPTH = 4

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


class FrameError(CpuppError):
    """A frame cannot be sent or read. The text names both ranks and what is wrong."""

    def __init__(self, link: str, message: str) -> None:
        super().__init__(
            "FRAME",
            f"{link}: {message}",
            hint="both ranks must run the same cpupp; see the log of the other rank for an earlier error",
            exit_code=ExitCode.RANK_FAILED,
        )


def checksum(prefix: bytes, body: bytes) -> bytes:
    """The last four bytes of the prefix: CRC-32 of its other bytes and of the rest of the header."""
    return _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(prefix)))


@dataclass(frozen=True, slots=True)
class Schema:
    """The part of a frame that repeats: (key, dtype or None for a plain value, number of dimensions) per entry."""

    entries: tuple[tuple[str, torch.dtype | None, int], ...]
    encoded: bytes
    schema_id: int
    num_dims: int


@dataclass(slots=True)
class Header:
    """A decoded header. `shapes` has one entry per tensor, in order; `payload` is the sum of their bytes."""

    schema: Schema
    shapes: list[tuple[int, ...]]
    values: list[Any]
    sequence: int
    payload: int
    detached: bool
    length: int

    def allocate(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return the dict with uninitialised tensors, and those tensors in payload order."""
        result: dict[str, Any] = {}
        tensors: list[torch.Tensor] = []
        values = iter(self.values)
        shapes = iter(self.shapes)
        for key, dtype, _ in self.schema.entries:
            if dtype is None:
                result[key] = next(values)
            else:
                tensor = torch.empty(next(shapes), dtype=dtype)
                tensors.append(tensor)
                result[key] = tensor
        return result, tensors


@dataclass(slots=True)
class FrameCodec:
    """Encodes and decodes the frames of one direction of one link; remembers the schemas it has seen.

    link: how errors call this link, for instance `rank 0 -> rank 2`; max_payload: bound of a frame's payload in bytes.
    """

    link: str
    max_payload: int = MAX_PAYLOAD_BYTES
    sequence: int = 0
    _encoders: dict[tuple[tuple[str, torch.dtype | None, int], ...], Schema] = field(default_factory=dict)
    _decoders: dict[bytes, Schema] = field(default_factory=dict)

    def encode(self, items: Mapping[str, Any], inline_limit: int) -> tuple[bytes, list[torch.Tensor], bool]:
        """Return the header, the tensors (contiguous, on the CPU) and whether the payload travels detached.

        The payload is detached when header and payload together exceed `inline_limit` bytes.
        Raises FrameError for a value that cannot travel (by key and type) and for a frame past the bounds.
        """
        tensors: list[torch.Tensor] = []
        entries: list[tuple[str, torch.dtype | None, int]] = []
        values = bytearray()
        for key, value in items.items():
            if isinstance(value, torch.Tensor):
                tensor = self._tensor(key, value)
                tensors.append(tensor)
                entries.append((key, tensor.dtype, tensor.dim()))
            else:
                entries.append((self._key(key), None, 0))
                self._put(key, value, values, 0)
        schema = self._schema(tuple(entries))
        payload = sum(t.nbytes for t in tensors)
        if payload > self.max_payload:
            raise FrameError(self.link, f"payload of {payload} bytes exceeds the bound of {self.max_payload}")
        dims = struct.pack(f"<{schema.num_dims}q", *(n for t in tensors for n in t.shape))
        length = PREFIX_BYTES + len(schema.encoded) + len(dims) + len(values)
        if length > MAX_HEADER_BYTES:
            raise FrameError(self.link, f"header of {length} bytes exceeds the bound of {MAX_HEADER_BYTES}")
        detached = length + payload > inline_limit
        self.sequence += 1
        body = schema.encoded + dims + bytes(values)
        prefix = PREFIX.pack(
            MAGIC,
            VERSION,
            int(detached),
            schema.schema_id,
            len(entries),
            len(schema.encoded),
            schema.num_dims,
            len(values),
            self.sequence,
            payload,
        )
        return prefix + checksum(prefix, body) + body, tensors, detached

    def decode(self, data: bytes) -> Header:
        """Read a header from the start of `data` (which may be longer). Allocates no tensor.

        Raises FrameError when it is truncated, is not a frame, has another version, or names sizes past the bounds.
        """
        length, fields = self._prefix(data)
        _, _, flags, schema_id, num_entries, schema_bytes, num_dims, _, sequence, payload = fields
        if len(data) < length:
            raise FrameError(self.link, f"truncated frame: {len(data)} bytes of a header of {length}")
        body = data[PREFIX_BYTES:length]
        if checksum(data[: PREFIX.size], body) != data[PREFIX.size : PREFIX_BYTES]:
            raise FrameError(self.link, "corrupt or truncated frame: the checksum of its header does not match")
        if sequence != self.sequence + 1:
            raise FrameError(self.link, f"frame {sequence} arrived, frame {self.sequence + 1} was due")
        schema = self._known(body[:schema_bytes], schema_id, num_entries)
        if schema.num_dims != num_dims:
            raise FrameError(self.link, f"corrupt frame: {num_dims} dimensions, its schema has {schema.num_dims}")
        dims_end = schema_bytes + 8 * num_dims
        dims = struct.unpack(f"<{num_dims}q", body[schema_bytes:dims_end])
        shapes = self._shapes(schema, dims, payload)
        values = self._values(schema, body[dims_end:])
        self.sequence = sequence
        return Header(schema, shapes, values, sequence, payload, bool(flags & 1), length)

    def header_length(self, prefix: bytes) -> int:
        """Return the length of the whole header whose first PREFIX_BYTES are `prefix`; raises like `decode`."""
        return self._prefix(prefix)[0]

    def _prefix(self, data: bytes) -> tuple[int, tuple[Any, ...]]:
        if len(data) < PREFIX_BYTES:
            raise FrameError(self.link, f"truncated frame: {len(data)} bytes, a prefix has {PREFIX_BYTES}")
        fields = PREFIX.unpack_from(data)
        magic, version, flags, _, num_entries, schema_bytes, num_dims, value_bytes, _, payload = fields
        if magic != MAGIC:
            raise FrameError(self.link, f"not a cpupp frame: it starts with {magic.hex()}, not {MAGIC.hex()}")
        if version != VERSION:
            raise FrameError(self.link, f"frame of version {version}, this rank speaks version {VERSION}")
        length = int(PREFIX_BYTES + schema_bytes + 8 * num_dims + value_bytes)
        if length > MAX_HEADER_BYTES or num_entries > MAX_ENTRIES:
            raise FrameError(self.link, f"header of {length} bytes and {num_entries} entries exceeds the bounds")
        if payload > self.max_payload:
            raise FrameError(self.link, f"payload of {payload} bytes exceeds the bound of {self.max_payload}")
        if flags > 1:
            raise FrameError(self.link, f"unknown flags {flags:#x}")
        return length, fields

    def _key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise FrameError(self.link, f"key {key!r} is a {type(key).__name__}, keys must be str")
        return key

    def _tensor(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        self._key(key)
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.dtype not in _CODES:
            raise FrameError(
                self.link,
                f"tensor {key!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot travel: "
                "only dense CPU tensors of the plain dtypes can",
            )
        if tensor.dim() > MAX_DIMS:
            raise FrameError(self.link, f"tensor {key!r} has {tensor.dim()} dimensions, at most {MAX_DIMS} can travel")
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def _schema(self, entries: tuple[tuple[str, torch.dtype | None, int], ...]) -> Schema:
        schema = self._encoders.get(entries)
        if schema is None:
            if len(entries) > MAX_ENTRIES:
                raise FrameError(self.link, f"{len(entries)} entries exceed the bound of {MAX_ENTRIES}")
            encoded = bytearray()
            for key, dtype, num_dims in entries:
                name = key.encode("utf-8", "surrogatepass")
                if len(name) > 0xFFFF:
                    raise FrameError(self.link, f"key {key[:40]!r}... of {len(name)} bytes is too long")
                encoded += _ENTRY.pack(_VALUE if dtype is None else _CODES[dtype], num_dims, len(name)) + name
            schema = Schema(entries, bytes(encoded), zlib.crc32(encoded), sum(e[2] for e in entries))
            self._remember(self._encoders, entries, schema)
        return schema

    def _known(self, encoded: bytes, schema_id: int, num_entries: int) -> Schema:
        schema = self._decoders.get(encoded)
        if schema is None:
            schema = self._parse(encoded)
            self._remember(self._decoders, encoded, schema)
        if schema.schema_id != schema_id or len(schema.entries) != num_entries:
            raise FrameError(self.link, "corrupt frame: its schema does not match its schema id")
        return schema

    @staticmethod
    def _remember(table: dict[Any, Schema], key: Any, schema: Schema) -> None:
        if len(table) >= 64:  # a peer whose keys never repeat must not make this grow for ever
            table.clear()
        table[key] = schema

    def _parse(self, encoded: bytes) -> Schema:
        entries: list[tuple[str, torch.dtype | None, int]] = []
        at = 0
        while at < len(encoded):
            if at + _ENTRY.size > len(encoded):
                raise FrameError(self.link, "corrupt frame: the schema ends inside an entry")
            code, num_dims, key_bytes = _ENTRY.unpack_from(encoded, at)
            at += _ENTRY.size
            name = encoded[at : at + key_bytes]
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
        return Schema(tuple(entries), encoded, zlib.crc32(encoded), sum(e[2] for e in entries))

    def _shapes(self, schema: Schema, dims: tuple[int, ...], payload: int) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        at = total = 0
        for key, dtype, num_dims in schema.entries:
            if dtype is None:
                continue
            shape = dims[at : at + num_dims]
            at += num_dims
            # torch computes strides in int64 even for an empty tensor, so the product without zeros is bounded too
            if any(n < 0 for n in shape) or prod(n or 1 for n in shape) * dtype.itemsize > max(1, self.max_payload):
                raise FrameError(self.link, f"tensor {key!r} of shape {list(shape)} exceeds the bounds")
            total += prod(shape) * dtype.itemsize
            shapes.append(shape)
        if total != payload:
            raise FrameError(self.link, f"corrupt frame: shapes need {total} bytes, the payload has {payload}")
        return shapes

    def _put(self, key: Any, value: Any, out: bytearray, depth: int) -> None:
        kind = type(value)
        if value is None:
            out += b"N"
        elif kind is bool:
            out += b"T" if value else b"F"
        elif kind is int:
            raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
            out += b"i" + struct.pack("<I", len(raw)) + raw
        elif kind is float:
            out += b"f" + struct.pack("<d", value)
        elif kind is str:
            raw = value.encode("utf-8", "surrogatepass")
            out += b"s" + struct.pack("<I", len(raw)) + raw
        elif kind is list and depth < MAX_LIST_DEPTH:
            out += b"l" + struct.pack("<I", len(value))
            for item in value:
                self._put(key, item, out, depth + 1)
        else:
            raise FrameError(
                self.link,
                f"value of key {key!r} is a {kind.__module__}.{kind.__qualname__}, which cannot travel: tensors, "
                f"bool, int, float, str, None and lists of these (to depth {MAX_LIST_DEPTH}) can",
            )

    def _values(self, schema: Schema, data: bytes) -> list[Any]:
        values: list[Any] = []
        at = 0
        for key, dtype, _ in schema.entries:
            if dtype is None:
                try:
                    value, at = self._take(data, at, 0)
                except (struct.error, IndexError, UnicodeDecodeError) as error:
                    raise FrameError(self.link, f"corrupt frame: value of key {key!r}: {error}") from None
                values.append(value)
        if at != len(data):
            raise FrameError(self.link, f"corrupt frame: {len(data) - at} bytes are left after its values")
        return values

    def _take(self, data: bytes, at: int, depth: int) -> tuple[Any, int]:
        tag = data[at : at + 1]
        at += 1
        if tag in (b"N", b"T", b"F"):
            return {b"N": None, b"T": True, b"F": False}[tag], at
        if tag == b"f":
            return struct.unpack_from("<d", data, at)[0], at + 8
        if tag not in (b"i", b"s", b"l"):
            raise IndexError(f"unknown tag {tag!r}")
        length = struct.unpack_from("<I", data, at)[0]
        at += 4
        if length > len(data) - at:
            raise IndexError(f"length {length} runs past the end")
        if tag == b"l":
            if depth >= MAX_LIST_DEPTH:
                raise IndexError("lists are nested too deep")
            items: list[Any] = []
            for _ in range(length):
                item, at = self._take(data, at, depth + 1)
                items.append(item)
            return items, at
        raw = data[at : at + length]
        at += length
        return (int.from_bytes(raw, "little", signed=True) if tag == b"i" else raw.decode("utf-8", "surrogatepass")), at
