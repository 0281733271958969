"""Packed linear layers against torch's own, in one process with torch and vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.gang import Gang
from tests.integration.test_vllm_adapter import handoff

SHAPES = [(1, 64), (5, 64), (2, 3, 64), (0, 64)]


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang([1]) as ranks:
        yield ranks


def against_torch(rank: int, threads: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """For each shape, with and without bias: shape, dtype, and the largest error in units of the result's rounding."""
    from cpupp.rank.packed_linear import PackedLinear

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    packed = PackedLinear(weight)
    found = []
    for shape, added in itertools.product(SHAPES, (None, bias)):
        x = torch.randn(shape).to(dtype)
        got = packed(x, torch.empty(0), added)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        error = (got.double() - exact).abs() / (exact.abs() + 1) / torch.finfo(dtype).eps
        found.append((list(got.shape), got.dtype == dtype, float(error.max()) if error.numel() else 0.0))
    columns = torch.randn(64, 3).to(dtype).t()
    torch.testing.assert_close(packed(columns, weight), torch.nn.functional.linear(columns, weight))
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_is_as_exact_as_its_dtype(gang: Gang, threads: int, dtype: torch.dtype) -> None:
    (found,) = gang.run(against_torch, threads, dtype)
    assert [shape for shape, _, _ in found] == [[*s[:-1], 96] for s in SHAPES for _ in range(2)]
    assert all(same for _, same, _ in found)
    assert max(error for _, _, error in found) <= 1


def in_vllm(rank: int) -> dict[str, Any]:
    """What vLLM's linear method makes of layers, before and after the cure."""
    from unittest.mock import patch

    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    from cpupp.rank.packed_linear import PackedLinear
    from cpupp.rank.vllm_adapter import cure_linear

    def prepared(weight: torch.Tensor) -> tuple[str, int, bool]:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        method, x = UnquantizedLinearMethod(), torch.randn(3, weight.shape[1]).to(weight.dtype)
        wanted = torch.nn.functional.linear(x, weight)
        method.process_weights_after_loading(layer)
        close = torch.allclose(method.apply(layer, x), wanted, rtol=0.02, atol=0.02)
        return type(layer.cpu_linear).__name__, layer.weight.numel(), close

    def of_vocabulary(kind: type[torch.nn.Module]) -> tuple[str, int, bool]:
        """The same for an embedding or a head: its class, its packed weights before it is used as a head."""
        layer = torch.nn.Linear(64, 8, bias=False)
        layer.weight = torch.nn.Parameter(torch.randn(8, 64).bfloat16(), requires_grad=False)
        layer.__class__ = kind  # its own constructor wants tensor groups
        method, x = UnquantizedEmbeddingMethod(), torch.randn(3, 64).bfloat16()
        method.process_weights_after_loading(layer)
        num_packed = sum(isinstance(module, PackedLinear) for module in layer.modules())
        wanted = torch.nn.functional.linear(x, layer.weight)
        close = torch.allclose(method.apply(layer, x), wanted, rtol=0.02, atol=0.02)
        assert layer.weight.numel() == 8 * 64
        return type(layer.cpu_linear).__name__, num_packed, close

    huge = torch.full((8, 64), 1e6, dtype=torch.bfloat16)
    found: dict[str, Any] = {"stock": prepared(torch.randn(8, 64).bfloat16())}
    told = replace(handoff(Path(), "links"), packed_weights=True)
    cure_linear(told)
    cure_linear(told)
    found["bfloat16"] = prepared(torch.randn(8, 64).bfloat16())
    found["float32"] = prepared(torch.randn(8, 64))
    found["beyond float16"] = prepared(huge)[:2]
    found["head"] = of_vocabulary(ParallelLMHead)
    found["embedding"] = of_vocabulary(VocabParallelEmbedding)
    with patch("torch.backends.cpu.get_cpu_capability", lambda: "AVX512"):
        found["AVX-512"] = prepared(torch.randn(8, 64).bfloat16())
    return found


def test_vllm_packs_where_it_has_nothing_better(gang: Gang) -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        pytest.skip(f"this CPU has more than AVX2 ({torch.backends.cpu.get_cpu_capability()}): vLLM has a product here")
    (found,) = gang.run(in_vllm)
    assert found["stock"] == ("function", 8 * 64, True)
    assert found["bfloat16"] == ("PackedLinear", 0, True)
    assert found["float32"][0] == "function"
    assert found["float32"][2]
    assert found["beyond float16"] == ("function", 8 * 64)
    assert found["head"] == ("PackedLinear", 1, True)
    assert found["embedding"] == ("PackedTable", 0, True)  # most serve as no head, and would hold memory for nothing
    assert found["AVX-512"] == ("function", 8 * 64, True)
