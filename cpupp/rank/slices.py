"""Pipeline hops of tensor-parallel stages: each rank sends one slice across hosts, the receiving host puts it together.

The hidden states that a stage hands on are equal on all ranks of its TP group, and each rank has a link to its
counterpart in the next stage. vLLM's generic path sends one slice over each link and gathers (`all_gather_group`); its
path for a communicator of one's own has lost that. Here a slice travels where the link is gloo and the receiving TP
group shares memory. All ranks of both TP groups must decide alike, so the decision rests on what all have exchanged,
and on the tensor's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cpupp.rank.frames import FrameError
from cpupp.rank.graph_ops import Collectives
from cpupp.rank.identity import Exchange

MARK = "cpupp slices"
SLICED_BYTES = 64 * 1024  # below that, putting it together costs more than the wire


class Slicer:
    """Slices and joins for one rank of a PP group.

    tensor_group: this rank's TP communicator; size, index: of that TP group; sliced: PP positions whose link is sliced.
    """

    def __init__(self, tensor_group: Collectives, size: int, index: int, sliced: frozenset[int]) -> None:
        self._group, self._size, self._index = tensor_group, size, index
        self.sliced = sliced

    def cut(self, items: Mapping[str, Any], target: int) -> Mapping[str, Any]:
        """What to send instead of `items`: this rank's slice of each large tensor, and which ones those are.

        Raises FrameError when a key is the one that this adds.
        """
        if MARK in items:
            raise FrameError(f"to position {target} of the pipeline", f"key {MARK!r} is reserved")
        if target not in self.sliced:
            return items
        keys = [k for k, v in items.items() if isinstance(v, torch.Tensor) and self._worthwhile(v)]
        if not keys:
            return items
        cut = dict(items)
        for key in keys:
            cut[key] = items[key].contiguous().view(self._size, -1)[self._index]
        cut[MARK] = [[key, *items[key].shape] for key in keys]
        return cut

    def join(self, items: dict[str, Any]) -> dict[str, Any]:
        """Put the slices of all ranks of the TP group together; every one of them calls this for the same dict."""
        for key, *shape in items.pop(MARK, ()):
            items[key] = self._group.all_gather(items[key], 0).view(shape)
        return items

    def _worthwhile(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.nbytes >= SLICED_BYTES and tensor.numel() % self._size == 0)


def agree(
    pipeline: Exchange, tensor: Exchange, transports: list[str], position: int, tensor_shm: bool, size: int, index: int
) -> frozenset[int]:
    """The PP positions whose link with this rank is sliced, the same for all ranks of both TP groups.

    pipeline, tensor: exchanges over the PP and the TP group; transports: of this rank's links, by PP position;
    tensor_shm: whether this rank's TP group shares memory; size, index: of the TP group.
    """
    mine = bytes(transport == "gloo" for transport in transports)
    rows = tensor(mine)
    all_gloo = bytes(min(column) for column in zip(*rows, strict=True))
    facts = pipeline(bytes([tensor_shm, size & 0xFF, index & 0xFF]) + all_gloo)
    return frozenset(
        p
        for p, row in enumerate(facts)
        if p != position
        and all_gloo[p]
        and row[3 + position]
        and row[:3] == bytes([1, size & 0xFF, index & 0xFF])
        and tensor_shm
    )
