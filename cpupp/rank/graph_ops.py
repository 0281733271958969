"""Our collectives as torch operators, so that a compiled model calls them by group name and sees nothing inside.

On the CPU platform vLLM lets torch.compile trace through the communicator. What it would find there (ctypes, waits)
cannot be traced, and a transport baked into a compiled graph would be wrong in the next run that loads the graph from
vLLM's cache with other links.
"""

from __future__ import annotations

from typing import Protocol

import torch

_LIBRARY = torch.library.Library("cpupp", "DEF")
_LIBRARY.define("all_reduce_(Tensor(a!) tensor, str group) -> ()")
_LIBRARY.define("all_gather(Tensor tensor, int dim, int size, str group) -> Tensor")


class Collectives(Protocol):
    """What an operator needs of a communicator."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate along `dim`."""


_groups: dict[str, Collectives] = {}


def serve(group: str, collectives: Collectives) -> None:
    """Let the operators find the communicator of this group (a later one of the same name takes its place)."""
    _groups[group] = collectives


def withdraw(group: str, collectives: Collectives) -> None:
    """Forget the communicator, unless another one has taken its place."""
    if _groups.get(group) is collectives:
        del _groups[group]


def _all_reduce(tensor: torch.Tensor, group: str) -> None:
    _groups[group].all_reduce(tensor)


def _all_gather(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    return _groups[group].all_gather(tensor, dim)


def _all_reduce_shape(tensor: torch.Tensor, group: str) -> None:
    return None


def _all_gather_shape(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] *= size
    return tensor.new_empty(shape)


_LIBRARY.impl("all_reduce_", _all_reduce, "CPU")
_LIBRARY.impl("all_gather", _all_gather, "CPU")
torch.library.register_fake("cpupp::all_reduce_", _all_reduce_shape, lib=_LIBRARY)
torch.library.register_fake("cpupp::all_gather", _all_gather_shape, lib=_LIBRARY)
