"""Memory for tensors that come and go: whether somebody holds it still, and taking it again when nobody does."""

from __future__ import annotations

import torch

REUSED_BYTES = 256 * 1024
MAX_REUSED = 4


class ReusedMemory:
    """Memory for large received tensors, taken again once nobody holds it: fresh memory costs as much as the wire."""

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape; its memory held something else before."""
        kept = self._kept.get((shape, dtype), [])
        for tensor in kept:
            if holders(tensor) == 1:
                return tensor.detach()
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.nbytes >= REUSED_BYTES and len(kept) < MAX_REUSED:
            if len(self._kept) >= MAX_REUSED:  # prefill sizes vary: keep the last few alone
                del self._kept[next(iter(self._kept))]
            self._kept.setdefault((shape, dtype), kept).append(tensor)
            return tensor.detach()
        return tensor


def holders(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory, itself included. There is no public way to ask.

    Who keeps the bare storage object, and no tensor over it, is not counted.
    """
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # without the storage object that we ask


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself when it alone has its memory, else a copy: for what is sent from where it is, after the return.

    vLLM takes our send for a finished one. A stage's output can be a view of a buffer that its next step overwrites
    (the residual of a middle stage is a slice of the received one), and such a view shares its storage. A tensor with
    memory of its own is the step's output, which nobody writes to: the next step makes another one (vLLM 0.32, CPU).
    """
    return tensor if holders(tensor) == 1 else tensor.clone()
