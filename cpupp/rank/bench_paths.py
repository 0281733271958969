"""The ways that `cpupp bench comm` measures, each over the same ranks: what one turn of each path does.

A turn of a hop is there and back again: the first rank sends and then receives, the other receives and then sends. So
a path whose send returns before anything has arrived gains nothing by that. A turn of a collective is one operation.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from cpupp.plan.bench_order import HOP, BenchTarget
from cpupp.rank.communicator import Communicator
from cpupp.rank.streams import connect

COLUMNS = 4096


class Path(Protocol):
    """One way. `prepare` makes the data of `size` bytes, `turn` does one turn with it."""

    def prepare(self, size: int) -> None:
        """Make buffers of `size` bytes in all."""

    def turn(self) -> None:
        """Do one turn. All ranks of the target call it equally often."""


class HopPath:
    """Base of the hops: the first rank of the target leads."""

    def __init__(self, *, lead: bool) -> None:
        self._lead = lead

    def turn(self) -> None:
        """There and back."""
        if self._lead:
            self.send()
            self.recv()
        else:
            self.recv()
            self.send()

    def send(self) -> None:
        """Send the prepared data."""
        raise NotImplementedError

    def recv(self) -> None:
        """Receive as much."""
        raise NotImplementedError


class DictHop(HopPath):
    """A dict of two tensors, as a pipeline stage sends it, by our communicator or by vLLM's group."""

    def __init__(self, send: Callable[[dict[str, Any]], Any], recv: Callable[[], Any], *, lead: bool) -> None:
        super().__init__(lead=lead)
        self._send, self._recv = send, recv
        self._items: dict[str, Any] = {}

    def prepare(self, size: int) -> None:
        """Two bfloat16 tensors of half the bytes each."""
        self._items = stage_output(size)

    def send(self) -> None:
        """Send the dict."""
        self._send(self._items)

    def recv(self) -> None:
        """Receive a dict."""
        self._recv()


class GlooHop(HopPath):
    """One message of torch.distributed: no key, no shape, the receiver knows the size."""

    def __init__(self, peer: int, *, lead: bool) -> None:
        super().__init__(lead=lead)
        self._peer = peer
        self._out = self._in = torch.empty(0, dtype=torch.uint8)

    def prepare(self, size: int) -> None:
        """One buffer for each direction."""
        self._out, self._in = _filled(size, torch.uint8), _filled(size, torch.uint8)

    def send(self) -> None:
        """Send and wait."""
        dist.send(self._out, self._peer)

    def recv(self) -> None:
        """Receive and wait."""
        dist.recv(self._in, self._peer)


class TcpHop(HopPath):
    """A plain TCP socket between the ranks' addresses."""

    def __init__(self, connection: socket.socket, *, lead: bool) -> None:
        super().__init__(lead=lead)
        self._socket = connection
        self._out, self._in = bytearray(), bytearray()

    def prepare(self, size: int) -> None:
        """One buffer for each direction."""
        self._out, self._in = bytearray(b"\1" * size), bytearray(b"\1" * size)

    def send(self) -> None:
        """Give it all to the kernel."""
        self._socket.sendall(self._out)

    def recv(self) -> None:
        """Read it all. Raises ConnectionError when the peer is gone."""
        view = memoryview(self._in)
        while view:
            num = self._socket.recv_into(view)
            if num == 0:
                raise ConnectionResetError("Connection reset by peer")
            view = view[num:]


class ShmHop(HopPath):
    """vLLM's bare SHM operation on the same two tensors: no keys, no shapes."""

    def __init__(self, handle: int, peer: int, *, lead: bool) -> None:
        super().__init__(lead=lead)
        self._handle, self._peer = handle, peer
        self._tensors: list[torch.Tensor] = []

    def prepare(self, size: int) -> None:
        """Two bfloat16 tensors of half the bytes each."""
        self._tensors = list(stage_output(size).values())

    def send(self) -> None:
        """Copy into the peer's reach."""
        torch.ops._C.shm_send_tensor_list(self._handle, self._tensors, self._peer)

    def recv(self) -> None:
        """Copy out; spins until it is there."""
        torch.ops._C.shm_recv_tensor_list(self._handle, self._peer)


class Reduce:
    """An all-reduce in place, bfloat16, by whatever function."""

    def __init__(self, reduce: Callable[[torch.Tensor], Any]) -> None:
        self._reduce = reduce
        self._tensor = torch.empty(0)

    def prepare(self, size: int) -> None:
        """A tensor of `size` bytes."""
        self._tensor = _filled(size // 2, torch.bfloat16)

    def turn(self) -> None:
        """Reduce once."""
        self._reduce(self._tensor)


def stage_output(size: int) -> dict[str, torch.Tensor]:
    """What a stage of a Llama sends, `size` bytes in all: hidden states and residual, rows of COLUMNS if they fit."""
    half = size // 4
    shape = (half // COLUMNS, COLUMNS) if half % COLUMNS == 0 else (1, half)
    return {name: _filled(half, torch.bfloat16).view(shape).clone() for name in ("hidden_states", "residual")}


def _filled(num: int, dtype: torch.dtype) -> torch.Tensor:
    # Written once: memory that nobody has written is one page of zeros, which stays in the cache.
    return torch.empty(num, dtype=dtype).fill_(0)


class Vllm:
    """What is measured of the vLLM that is installed here. `group`, `shm`: False where it cannot be had."""

    def __init__(self) -> None:
        self.group: Any = None
        self.shm = False
        try:
            from vllm.distributed.parallel_state import GroupCoordinator

            self.group = GroupCoordinator
            self.shm = hasattr(torch.ops._C, "init_shm_manager")
        except Exception as error:  # a broken vLLM must not hide what the rest costs
            print(f"vLLM cannot be measured here: {type(error).__name__}: {error}", flush=True)

    def coordinator(self, kind: str, group_ranks: list[list[int]]) -> Any:
        """A group as vLLM makes it, kept on the generic path. Called by all ranks.

        Under a name that is neither tp nor pp vLLM does not choose SHM, so its collectives are torch.distributed's.
        """
        made = self.group(
            group_ranks=group_ranks,
            local_rank=0,
            torch_distributed_backend="gloo",
            use_device_communicator=True,
            group_name=f"bench_{kind}",
        )
        made.use_cpu_custom_send_recv = False
        return made


def shm_handle(store: Any, name: str, ranks: tuple[int, ...], rank: int) -> int:
    """Make vLLM's SHM manager for exactly these ranks, which all call this."""
    handle: int = torch.ops._C.init_shm_manager(name, len(ranks), ranks.index(rank), torch.get_num_threads())
    together(store, f"{name}-made", len(ranks))
    torch.ops._C.join_shm_manager(handle, name)
    together(store, f"{name}-joined", len(ranks))
    return handle


def together(store: Any, key: str, num: int) -> None:
    """Wait until `num` ranks have called this with `key`."""
    if store.add(key, 1) == num:
        store.set(f"{key}-all", b"1")
    store.wait([f"{key}-all"])


def tcp_pair(store: Any, key: str, position: int, address: str, timeout_s: float) -> socket.socket:
    """A connection of the two ranks of a hop, which both call this. Raises OSError."""
    turns = itertools.count()

    def exchange(row: bytes) -> list[bytes]:
        turn = f"{key}-{next(turns)}"
        store.set(f"{turn}-{position}", row)
        return [store.get(f"{turn}-{each}") for each in range(2)]

    made = connect(exchange, position, [(0, 1)], address, timeout_s)
    if not made:
        raise ConnectionRefusedError(f"no TCP connection between the ranks of {key}")
    connection = made[1 - position]
    connection.settimeout(timeout_s)
    return connection


class Ways:
    """Everything that this rank can be measured with: built together with all other ranks, then asked per target.

    communicators, coordinators: of the groups that this rank is in, by the group's name.
    """

    def __init__(
        self,
        *,
        rank: int,
        address: str,
        store: Any,
        prefix: str,
        communicators: dict[str, Communicator],
        coordinators: dict[str, Any],
        shm: bool,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self._address, self._store, self._prefix, self._timeout_s = address, store, prefix, timeout_s
        self._communicators, self.coordinators, self.shm = communicators, coordinators, shm

    def of(self, number: int, target: BenchTarget) -> dict[str, Path]:
        """The paths of a target, by name, in the order in which they take turns. All of its ranks call this."""
        handle = None
        if target.shared and self.shm:
            handle = shm_handle(self._store, f"{self._prefix}-{number}", target.ranks, self.rank)
        return self._hop(number, target, handle) if target.op == HOP else self._reduce(target, handle)

    def _hop(self, number: int, target: BenchTarget, handle: int | None) -> dict[str, Path]:
        lead = target.ranks[0] == self.rank
        peer = target.ranks[1] if lead else target.ranks[0]
        ours = self._communicators[target.group]
        at = ours.ranks.index(peer)
        paths: dict[str, Path] = {
            "cpupp": DictHop(lambda d: ours.send_tensor_dict(d, at), lambda: ours.recv_tensor_dict(at), lead=lead)
        }
        if self.coordinators:
            vllm = self.coordinators[target.group]
            paths["vllm_generic"] = DictHop(
                lambda d: vllm.send_tensor_dict(d, dst=at), lambda: vllm.recv_tensor_dict(src=at), lead=lead
            )
        paths["gloo"] = GlooHop(peer, lead=lead)
        position = target.ranks.index(self.rank)
        connection = tcp_pair(self._store, f"tcp-{number}", position, self._address, self._timeout_s)
        paths["tcp"] = TcpHop(connection, lead=lead)
        if handle is not None:
            paths["shm"] = ShmHop(handle, target.ranks.index(peer), lead=lead)
        return paths

    def _reduce(self, target: BenchTarget, handle: int | None) -> dict[str, Path]:
        ours = self._communicators[target.group]
        paths: dict[str, Path] = {"cpupp": Reduce(ours.all_reduce)}
        if self.coordinators:
            paths["vllm_generic"] = Reduce(self.coordinators[target.group].all_reduce)
        paths["gloo"] = Reduce(lambda tensor: dist.all_reduce(tensor, group=ours.group))
        if handle is not None:
            paths["shm"] = Reduce(lambda tensor: torch.ops._C.shm_allreduce(handle, tensor))
        return paths
