"""A linear layer for CPUs without instructions for 16-bit floats: weights packed as float16, sums in float32.

On such a CPU (AVX2: EPYC Zen 2 and Zen 3, Xeon before AVX-512) oneDNN has no product for bfloat16, and torch's own one
takes every row of the input through the whole weight: 8 rows cost 8 times as much as one. FBGEMM, which torch carries,
reads a float16 weight once for many rows. A bfloat16 number of normal size is a float16 number too, so the weights stay
what they are; sums differ from torch's in their order alone (figures: docs/benchmarks.md).
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch

_LIBRARY = torch.library.Library("cpupp_linear", "DEF")
_LIBRARY.define("packed(Tensor input, Tensor number, int out_features) -> Tensor")

_weights: dict[int, Any] = {}
_numbers = itertools.count()


class PackedLinear(torch.nn.Module):
    """x [..., K] -> x @ weight.T + bias [..., N], in x's dtype. weight: [N, K], which is not kept."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.alone = torch.get_num_threads() == 1
        if self.alone:
            # Its packed weight is a tensor, so torch.compile sees it as one and casts within its own loops.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                packed = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(weight.float())
            self.register_buffer("packed", packed, persistent=False)
            self.register_buffer("no_bias", torch.zeros(self.out_features), persistent=False)
        else:
            # It works with all threads, but its packed weight is an object that a compiled graph cannot hold.
            number = next(_numbers)
            _weights[number] = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
            self.register_buffer("packed", torch.tensor(number), persistent=False)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The signature of vLLM's `cpu_linear`; `weight` is what is left of the layer's own and is not read."""
        rows = x.reshape(-1, self.in_features).float()
        if self.alone:
            product = torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(
                rows, self.packed, self.no_bias, self.out_features
            )
        else:
            product = torch.ops.cpupp_linear.packed(rows, self.packed, self.out_features)
        if bias is not None:
            product = product + bias
        return product.to(x.dtype).view(*x.shape[:-1], self.out_features)


class PackedTable(torch.nn.Module):
    """For an embedding, which vLLM prepares as if it were a linear layer: packed once it serves as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: PackedLinear | None = None

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The signature of vLLM's `cpu_linear`."""
        if self.packed is None:
            self.packed = PackedLinear(weight)
        product: torch.Tensor = self.packed(x, weight, bias)
        return product


def is_worth_packing(weight: torch.Tensor) -> bool:
    """Whether this CPU has only the slow way for the weight, and float16 holds it."""
    return (
        weight.dim() == 2
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.numel() > 0
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
        and "fbgemm" in torch.backends.quantized.supported_engines
        and hasattr(torch.ops._quantized, "wrapped_fbgemm_linear_fp16_weight")
        and bool(weight.half().isfinite().all())
    )


def _packed(rows: torch.Tensor, number: torch.Tensor, out_features: int) -> torch.Tensor:
    product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, _weights[int(number)])
    return product


def _packed_shape(rows: torch.Tensor, number: torch.Tensor, out_features: int) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], out_features))


_LIBRARY.impl("packed", _packed, "CPU")
torch.library.register_fake("cpupp_linear::packed", _packed_shape, lib=_LIBRARY)
