"""Collectives of a group that may span hosts: shared memory inside a host, as few bytes as possible between hosts.

Numerics: floating point is summed in float32 (float64 in itself), in an order that is fixed for the group, and every
piece of the result is computed once or from equal inputs in equal order. So all ranks get equal results, bit for bit.
In a group that spans hosts each host's partial sum is rounded once to the dtype before it travels; stock gloo rounds
after every step of its ring, stock SHM not at all, but sums in another order on every rank.
"""

from __future__ import annotations

import torch

from cpupp.rank.board import SLOT_BYTES, Board, sum_in_order
from cpupp.rank.wire import DIRECT_BYTES, Wire

SWAP_BYTES = 256 * 1024
PIECE_BYTES = 1024 * 1024
GLOO_DTYPES = (torch.bfloat16, torch.float32)
"""Of two ranks gloo sums these as we do, and from SWAP_BYTES on nothing that we tried was faster."""


class Collectives:
    """The collectives as the rank at `position` sees them.

    subsets: positions that share memory, disjoint, each position once; board: of this rank's subset, None if alone.
    """

    def __init__(self, subsets: tuple[tuple[int, ...], ...], position: int, board: Board | None, wire: Wire) -> None:
        self._subsets = subsets
        self._position = position
        self._board = board
        self._wire = wire
        self._size = sum(len(s) for s in subsets)
        self._host = next(h for h, s in enumerate(subsets) if position in s)
        self._local = subsets[self._host]
        self._index = self._local.index(position)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._num_owners = min(len(s) for s in subsets)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place over the group; contiguous. Raises PeerLostError."""
        if not tensor.numel():
            return
        if len(self._subsets) == 1:
            assert self._board is not None
            self._board.all_reduce(tensor)
            return
        flat = tensor.view(-1)
        if len(self._subsets) == self._size:  # one rank a host; else all ranks go in equal steps, also a lone one
            self._sum_with_peers(flat)
            return
        for part in flat.split(SLOT_BYTES // flat.itemsize):
            self._two_level(part)

    def _two_level(self, part: torch.Tensor) -> None:
        """Sum up to SLOT_BYTES: each owner sums its slice on its host, then over the hosts, then the host shares it."""
        slices = part.tensor_split(self._num_owners)
        mine = slices[self._index] if self._index < self._num_owners else part[:0]
        if self._board is not None:
            start = sum(s.numel() for s in slices[: self._index])
            sum_in_order([slot[start : start + mine.numel()] for slot in self._board.publish(part)], mine)
        if self._index < self._num_owners:
            self._sum_with_peers(mine)
        if self._board is not None:
            for owned, slot in zip(slices, self._board.publish(mine), strict=False):
                owned.copy_(slot[: owned.numel()])

    def _sum_with_peers(self, flat: torch.Tensor) -> None:
        """Sum in place over the ranks of equal index, one on each host."""
        peers = [s[self._index] for s in self._subsets]
        others = [p for p in peers if p != self._position]
        if flat.nbytes <= DIRECT_BYTES:
            if flat.nbytes:
                parts = dict(zip(others, self._wire.swap(others, flat), strict=True))
                sum_in_order([parts.get(p, flat) for p in peers], flat)
                self._wire.expect(others)
            return
        if len(peers) == 2 and flat.nbytes <= SWAP_BYTES:
            (theirs,) = self._scratch_like(flat, 1)
            self._wire.exchange([(others[0], flat)], [(others[0], theirs)])
            sum_in_order([flat if p == self._position else theirs for p in peers], flat)
            return
        if self._size == 2 and flat.dtype in GLOO_DTYPES:
            self._wire.all_reduce(flat)
            return
        self._sum_slices(flat, peers)

    def _sum_slices(self, flat: torch.Tensor, peers: list[int]) -> None:
        """As many bytes as a ring, in two steps whatever the number of hosts: sum the slice I own, then share it.

        In pieces: while one is under way, the one before is summed and shared. All receives are posted first, as gloo
        moves a message at once that is already waited for. A shared piece may be written where the summand still is
        that its owner has read: it comes only after that has arrived there.
        """
        others = [p for p in peers if p != self._position]
        slices = dict(zip(peers, flat.tensor_split(len(peers)), strict=True))
        pieces = {p: self._pieces(s) for p, s in slices.items()}
        mine = pieces.pop(self._position)
        copies = [self._pieces(c) for c in self._scratch_like(slices[self._position], len(others))]
        into = [self._wire.start([], list(zip(others, theirs, strict=True))) for theirs in zip(*copies, strict=True)]
        shared = [self._wire.start([], [(p, piece) for piece in pieces[p]]) for p in others]
        out = [self._wire.start([(p, piece) for piece in pieces[p]], []) for p in others]
        for works, piece, *theirs in zip(into, mine, *copies, strict=True):
            self._wire.finish(works)
            parts = {**dict(zip(others, theirs, strict=True)), self._position: piece}
            sum_in_order([parts[p] for p in peers], piece)
            out.append(self._wire.start([(p, piece) for p in others], []))
        for works in (*shared, *out):
            self._wire.finish(works)

    def _pieces(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(flat.split(PIECE_BYTES // flat.itemsize))

    def _scratch_like(self, flat: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Memory for `count` tensors like `flat`, the same in each call: fresh memory costs a page fault per 4 KiB."""
        size = -(-flat.nbytes // 64) * 64
        if self._scratch.numel() < size * count:
            self._scratch = torch.empty(size * count, dtype=torch.uint8)
        return [self._scratch[i * size : i * size + flat.nbytes].view(flat.dtype) for i in range(count)]

    def all_gather(self, tensor: torch.Tensor, out: list[torch.Tensor]) -> None:
        """Copy every position's contiguous tensor into the equally shaped tensors of `out`. Raises PeerLostError."""
        if not tensor.numel():
            return
        if len(self._subsets) == 1:
            assert self._board is not None
            self._board.all_gather(tensor, out)
            return
        # A tensor crosses to each other host once: to one rank there, which shows it to the others.
        sends = [(s[self._index % len(s)], tensor) for h, s in enumerate(self._subsets) if h != self._host]
        received = {p: torch.empty_like(tensor) for p in self._carried(self._index)}
        self._wire.exchange(sends, list(received.items()))
        if self._board is None:
            for position, part in {**received, self._position: tensor}.items():
                out[position].copy_(part)
            return
        self._board.all_gather(tensor, [out[p] for p in self._local])
        carried = [self._carried(i) for i in range(len(self._local))]
        for turn in range(max(len(c) for c in carried)):
            mine = carried[self._index][turn] if turn < len(carried[self._index]) else self._position
            targets = [out[c[turn]] if turn < len(c) else torch.empty_like(tensor) for c in carried]
            self._board.all_gather(received.get(mine, tensor), targets)

    def _carried(self, index: int) -> list[int]:
        """The positions on other hosts whose tensors the local rank of this index takes in."""
        others = [s for h, s in enumerate(self._subsets) if h != self._host]
        return [p for s in others for i, p in enumerate(s) if i % len(self._local) == index]

    def gather(self, tensor: torch.Tensor, target: int, out: list[torch.Tensor] | None) -> None:
        """As `all_gather`, for the position `target`, which gives `out`. Raises PeerLostError."""
        if not tensor.numel():
            return
        if len(self._subsets) == 1:
            assert self._board is not None
            self._board.gather(tensor, out)
        elif out is None:
            self._wire.exchange([(target, tensor)], [])
        else:
            received = {p: torch.empty_like(tensor) for p in range(self._size) if p != self._position}
            self._wire.exchange([], list(received.items()))
            for position, part in {**received, self._position: tensor}.items():
                out[position].copy_(part)
