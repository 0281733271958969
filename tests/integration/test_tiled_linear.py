"""Linear layers on AMX tiles against vLLM's own, in one process with torch and vLLM; on a CPU with AMX."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cpupp.plan.tiles import NEEDED_ISA
from cpupp.rank.agent_probe import isa_flags
from tests.integration.gang import Gang
from tests.integration.test_vllm_adapter import handoff

ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 32)

needs_amx = pytest.mark.skipif(not set(isa_flags()) >= NEEDED_ISA, reason="this CPU has no AMX")


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang([1]) as ranks:
        yield ranks


def of_handler(n: int, k: int) -> tuple[torch.Tensor, Any]:
    """A weight, and vLLM's handler of it."""
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    weight = torch.randn(n, k).bfloat16()
    return weight, ops.create_onednn_mm(weight.t(), 32)


def oned(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The layer's product by oneDNN's own."""
    product = x.new_empty((*x.shape[:-1], layer.out_features))
    torch.ops._C.onednn_mm(product, x.reshape(-1, x.shape[-1]), bias, layer.handler)
    return product


def products(rank: int, threads: int) -> dict[str, Any]:
    """Whether each number of rows gives oneDNN's bits, with and without bias, and what other inputs give."""
    from cpupp.rank import tiled_linear

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    found: dict[str, Any] = {"rows": []}
    for n, k in ((96, 64), (1088, 576), (32, 1536)):
        weight, handler = of_handler(n, k)
        layer = tiled_linear.tiled(weight, None, handler)
        assert layer is not None
        layer.choice.fill_(True)
        for rows in ROWS:
            x, bias = torch.randn(rows, k).bfloat16(), torch.randn(n).bfloat16()
            stock = [oned(layer, x, added) for added in (None, bias)]
            own = [layer(x, weight, added) for added in (None, bias)]
            found["rows"].append(all(map(torch.equal, own, stock)))
        columns = torch.randn(k, 4).bfloat16().t()
        found["rows"].append(torch.equal(layer(columns, weight), layer(columns.contiguous(), weight)))
        found[f"{n} shapes"] = [list(layer(torch.randn(*s, k).bfloat16(), weight).shape) for s in ((2, 3), (0,), (33,))]
    weight, handler = of_handler(40, 64)
    found["ragged"] = tiled_linear.tiled(weight, None, handler) is not None
    found["wide bias"] = tiled_linear.tiled(of_handler(96, 64)[0], torch.randn(96), handler) is not None
    torch.set_num_threads(before)
    return found


@needs_amx
@pytest.mark.parametrize("threads", [1, 2])
def test_the_products_are_those_of_vllm_bit_by_bit(gang: Gang, threads: int) -> None:
    (found,) = gang.run(products, threads)
    assert all(found["rows"])
    for n in (96, 1088, 32):
        assert found[f"{n} shapes"] == [[2, 3, n], [0, n], [33, n]]
    assert not found["ragged"]
    assert not found["wide bias"]


def unequal(rank: int) -> tuple[bool, bool]:
    """Whether a shape is tiled when one weight differs in its packed form, and the same for another shape after it."""
    from cpupp.rank import tiled_linear

    def spoiled(weight: torch.Tensor) -> torch.Tensor:
        return pack(weight + torch.eye(*weight.shape).bfloat16())

    pack = tiled_linear.pack
    with patch.object(tiled_linear, "pack", spoiled):
        first = tiled_linear.tiled(*before(of_handler(160, 64)))
    return first is not None, tiled_linear.tiled(*before(of_handler(192, 64))) is not None


def before(pair: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, None, Any]:
    """The arguments of tiled(), without a bias."""
    return pair[0], None, pair[1]


@needs_amx
def test_other_bits_keep_vllms_own_way(gang: Gang) -> None:
    assert gang.run(unequal) == [(False, True)]


def chosen(rank: int, slow: bool) -> tuple[list[int], bool, bool]:
    """The choice by rows where tiles win or lose, and which way the next product of few rows and of many takes."""
    from cpupp.rank import tiled_linear

    n = 224 if slow else 288
    weight, handler = of_handler(n, 64)
    layer = tiled_linear.tiled(weight, None, handler)
    assert layer is not None
    product = tiled_linear._product

    def delayed(*args: Any, own: bool) -> torch.Tensor:
        time.sleep(0.002 * (own == slow))
        return product(*args, own=own)

    x, state = torch.randn(1, 64).bfloat16(), torch.random.get_rng_state()
    with patch.object(tiled_linear, "_product", delayed):
        layer(x, weight)
    assert torch.equal(torch.random.get_rng_state(), state), "vLLM samples by torch's generator"
    layer.tiles.zero_()
    return layer.choice.tolist(), bool(layer(x, weight).any()), bool(layer(x.expand(33, 64), weight).any())


@needs_amx
def test_where_tiles_are_slower_vllms_own_way_stays(gang: Gang) -> None:
    assert gang.run(chosen, True) == [([1] + [0] * 32, True, True)]
    assert gang.run(chosen, False) == [([1] + [1] * 32, False, True)]


def in_vllm(rank: int) -> dict[str, tuple[str, bool]]:
    """What vLLM's linear method makes of a large layer after the cure: its class, and whether products are right."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from cpupp.rank.vllm_adapter import cure_linear

    of_handler(96, 64)

    def prepared(n: int, dtype: torch.dtype) -> tuple[str, bool]:
        layer = torch.nn.Linear(576, n, bias=False)
        layer.weight = torch.nn.Parameter(torch.randn(n, 576).to(dtype), requires_grad=False)
        method, x = UnquantizedLinearMethod(), torch.randn(3, 576).to(dtype)
        wanted = torch.nn.functional.linear(x, layer.weight)
        method.process_weights_after_loading(layer)
        return type(layer.cpu_linear).__name__, torch.allclose(method.apply(layer, x), wanted, rtol=0.02, atol=0.02)

    cure_linear(replace(handoff(Path(), "links"), tiled_weights=True))
    return {
        "large": prepared(3072, torch.bfloat16),
        "small": prepared(64, torch.bfloat16),
        "float32": prepared(3072, torch.float32),
    }


@needs_amx
def test_vllm_gets_tiles_where_it_would_ask_onednn(gang: Gang) -> None:
    (found,) = gang.run(in_vllm)
    assert found == {"large": ("TiledLinear", True), "small": ("function", True), "float32": ("function", True)}


def tables(rank: int) -> dict[str, tuple[bool, int, int]]:
    """Of a table that serves as the head, for two shapes: right products; weights packed when made, and after two uses.

    The second shape is one that no tiles have.
    """
    from cpupp.rank import tiled_linear

    found = {}
    for name, n in (("tiled", 256), ("ragged", 100)):
        weight, handler = of_handler(n, 64)
        packed: list[torch.Tensor] = []
        pack = tiled_linear.pack

        def counted(weight: torch.Tensor, pack: Any = pack, packed: list[torch.Tensor] = packed) -> torch.Tensor:
            packed.append(weight)
            return pack(weight)

        def stock(x: torch.Tensor, weight: torch.Tensor, bias: Any, handler: Any = handler, n: int = n) -> torch.Tensor:
            product = x.new_empty((*x.shape[:-1], n))
            torch.ops._C.onednn_mm(product, x, bias, handler.handler_tensor)
            return product

        with patch.object(tiled_linear, "pack", counted):
            table = tiled_linear.TiledTable(handler, stock)
            made = len(packed)
            x = torch.randn(3, 64).bfloat16()
            right = all(torch.equal(table(x, weight), stock(x, weight, None)) for _ in range(2))
        found[name] = (right, made, len(packed))
    return found


@needs_amx
def test_an_embedding_is_packed_when_it_serves_as_the_head(gang: Gang) -> None:
    assert gang.run(tables) == [{"tiled": (True, 0, 1), "ragged": (True, 0, 0)}]


def without(rank: int, folder: str) -> tuple[str, str]:
    """What is said where no compiler is, and where it fails."""
    from cpupp.rank import tiled_linear

    said = []
    failing = Path(folder) / "g++"
    failing.write_text("#!/bin/sh\necho no tiles here >&2\nexit 1\n")
    failing.chmod(0o755)
    for path in (f"{folder}/nothing", folder):
        with patch.dict(os.environ, {"PATH": path, "VLLM_CACHE_ROOT": folder, "CXX": ""}):
            tiled_linear._library.cache_clear()
            try:
                tiled_linear.library()
            except RuntimeError as error:
                said.append(str(error))
    tiled_linear._library.cache_clear()
    return said[0], said[1]


def test_no_tiles_without_a_compiler(gang: Gang, tmp_path: Path) -> None:
    ((nothing, failed),) = gang.run(without, str(tmp_path))
    assert "no C++ compiler" in nothing
    assert "no tiles here" in failed


def damaged(rank: int, folder: str) -> tuple[int, bool]:
    """Compilations when the kept library is cut short, and whether the next call compiles again."""
    from cpupp.rank import tiled_linear

    runs = []
    run = subprocess.run

    def counted(*args: Any, **options: Any) -> Any:
        runs.append(args)
        return run(*args, **options)

    with patch.dict(os.environ, {"VLLM_CACHE_ROOT": folder}), patch.object(subprocess, "run", counted):
        tiled_linear._compiled().write_bytes(b"")
        loaded = tiled_linear._loaded()
        tiled_linear._loaded()
        return len(runs), hasattr(loaded, "cpupp_pack")


@needs_amx
def test_a_library_that_was_cut_short_is_compiled_again(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(damaged, str(tmp_path)) == [(2, True)]


def keys(rank: int) -> tuple[bool, bool]:
    """Whether the key of compiled code changes with what may be tiled, and with what was."""
    from cpupp.rank import vllm_adapter

    plain = handoff(Path(), "links")
    allowed = replace(plain, tiled_weights=True)
    before = vllm_adapter.compiled_for(allowed)
    with patch.object(vllm_adapter, "_tiled_shapes", {(96, 64)}):
        after = vllm_adapter.compiled_for(allowed)
    return vllm_adapter.compiled_for(plain) != before, after != before


def test_compiled_code_belongs_to_the_weights_that_are_tiled(gang: Gang) -> None:
    assert gang.run(keys) == [(True, True)]
