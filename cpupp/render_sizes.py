"""Numbers as people read them: counts, sizes, CPU lists."""

from __future__ import annotations

from collections.abc import Sequence

from cpupp.plan.amounts import count
from cpupp.plan.partition import GIB

__all__ = ["count", "gib", "ranges"]


def gib(size: int) -> str:
    """Bytes as GiB with three significant digits at least."""
    value = size / GIB
    return (
        f"{value:.0f} GiB"
        if value >= 100 or size % GIB == 0
        else f"{value:.1f} GiB"
        if value >= 10
        else f"{value:.2f} GiB"
    )


def ranges(numbers: Sequence[int]) -> str:
    """CPU numbers as the kernel writes them: `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
