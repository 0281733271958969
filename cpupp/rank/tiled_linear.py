"""A linear layer on AMX tiles for the few rows of a decode step, with the very bits of vLLM's own.

vLLM gives such layers to oneDNN, whose product of few rows uses tiles too but reads the weight at half of what a core
can read (figures: docs/benchmarks.md). `tiles.cpp` asks for the weight ahead of its use. It is compiled on the host,
with the compiler that torch.compile needs as well, and kept in vLLM's cache. The weight is held a second time for
it: larger batches stay oneDNN's.

Nothing is taken on trust: a weight goes to tiles only if the products of both are equal bit by bit for its shape on
this host, and for each number of rows only if tiles are faster there.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

MOST_ROWS = 32
"""A second row of tiles holds rows 17 to 32; with more, oneDNN sums in another order."""
STEP = 32
BIASED_ROWS = (3, 17)
"""With these numbers of rows a bias is tried too; without one, all of them."""
TIMED_ROWS = (1, 4, 16, 32)
TURNS = 5
TIMED_BYTES = 256 << 20
"""Of weights of one shape that are timed: more than most caches hold, and read within a second in all."""
EVEN = 1.05
"""Times that differ by less are noise: then it is tiles."""
SOURCE = Path(__file__).with_name("tiles.cpp")
FLAGS = (
    *("-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)
TORCH = Path(torch.__file__).parent

OPERATOR = "linear(Tensor input, Tensor tiles, Tensor handler, Tensor? bias, Tensor choice, int out_features) -> Tensor"
"""In tiles.cpp; compiled models hold calls of it. choice: uint8 [1 + MOST_ROWS], whether tiles are the faster way by
number of rows; its first element says whether that was measured, and else `choose` is called to do it."""

_LIBRARY = torch.library.Library("cpupp_tiles", "DEF")
_LIBRARY.define(OPERATOR)
_LIBRARY.define("choose(Tensor(a!) choice, int out_features, int in_features) -> ()")

_TILES, _ONEDNN = (torch.tensor([True] + [own] * MOST_ROWS, dtype=torch.uint8) for own in (True, False))

Shape = tuple[int, int]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
_weights: dict[Shape, list[tuple[torch.Tensor, Any]]] = {}
_chosen: dict[Shape, torch.Tensor] = {}
_equal: dict[Shape, bool] = {}


class TiledLinear(torch.nn.Module):
    """x [..., K] -> x @ weight.T + bias [..., N], in bfloat16. tiles: the packed weight; handler: oneDNN's of it."""

    def __init__(self, tiles: torch.Tensor, shape: Shape, handler: Any) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.kept = handler  # frees oneDNN's weight when it goes
        self.register_buffer("tiles", tiles, persistent=False)
        self.register_buffer("handler", handler.handler_tensor, persistent=False)
        self.register_buffer("choice", torch.zeros(1 + MOST_ROWS, dtype=torch.uint8), persistent=False)
        _weights.setdefault(shape, []).append((tiles, handler))

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The signature of vLLM's `cpu_linear`; `weight` is what is left of the layer's own and is not read."""
        product: torch.Tensor = torch.ops.cpupp_tiles.linear(
            x, self.tiles, self.handler, bias, self.choice, self.out_features
        )
        return product


class TiledTable(torch.nn.Module):
    """For an embedding, which vLLM prepares as if it were a linear layer: tiled once it serves as the head.

    handler: oneDNN's of the table; stock: vLLM's own `cpu_linear`. Raises RuntimeError when there are no tiles.
    """

    def __init__(self, handler: Any, stock: Linear) -> None:
        super().__init__()
        library()
        self.handler, self.stock = handler, stock
        self.way: Linear | None = None

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The signature of vLLM's `cpu_linear`."""
        if self.way is None:
            self.way = tiled(weight, bias, self.handler) or self.stock
        return self.way(x, weight, bias)


def tiled(weight: torch.Tensor, bias: torch.Tensor | None, handler: Any) -> TiledLinear | None:
    """The layer of a weight, None when tiles do not give its products bit by bit as oneDNN does.

    weight: [N, K], which is not kept; handler: vLLM's CPUDNNLGEMMHandler of it. Raises RuntimeError when there are no
    tiles.
    """
    fits = (
        weight.dim() == 2 and weight.dtype == torch.bfloat16 and weight.shape[0] % STEP == weight.shape[1] % STEP == 0
    )
    if not fits or not weight.numel() or (bias is not None and bias.dtype != torch.bfloat16):
        return None
    shape = (weight.shape[0], weight.shape[1])
    if _equal.get(shape) is False:
        return None
    tiles = pack(weight)
    if shape not in _equal:
        _equal[shape] = _is_equal(tiles, shape, handler.handler_tensor)
    return TiledLinear(tiles, shape, handler) if _equal[shape] else None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> the same numbers in the order of tiles.cpp, one dimension."""
    n, k = weight.shape
    tiles = torch.empty(n * k, dtype=torch.bfloat16)
    if tiles.data_ptr() % 64:
        raise RuntimeError("this torch does not align tensors to 64 bytes")
    library().cpupp_pack(weight.contiguous().data_ptr(), tiles.data_ptr(), n, k)
    return tiles


def library() -> ctypes.CDLL:
    """tiles.cpp, compiled and loaded. Raises RuntimeError that says why there is none."""
    found = _library()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none: found out once, not for each layer."""
    try:
        found = _loaded()
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot compile or load {SOURCE.name}: {error}"
    pointer, number = ctypes.c_void_p, ctypes.c_long
    found.cpupp_pack.argtypes = (pointer, pointer, number, number)
    found.cpupp_pack.restype = None
    if found.cpupp_permit_tiles() != 0:
        return "the kernel does not let this process use AMX tiles"
    return found


def _loaded() -> ctypes.CDLL:
    """Raises OSError, SubprocessError."""
    path = _compiled()
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # cut short, or of a machine with another libc that has the same home
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_compiled()))


def _compiled() -> Path:
    """The shared library in vLLM's cache, where compiled models lie too. Raises OSError, SubprocessError."""
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + repr((FLAGS, torch.__version__)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm"
    folder = Path(os.environ.get("VLLM_CACHE_ROOT") or cache) / "cpupp"
    path = folder / f"tiles-{key}.so"
    if not path.exists():
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++"))), None)
        if compiler is None:
            raise OSError("no C++ compiler (g++)")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "tiles.so"
            torchs = (f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}")
            argv = [compiler, *FLAGS, *torchs, "-x", "c++", "-", "-x", "none", "-ltorch_cpu", "-o", str(made)]
            done = subprocess.run(argv, input=source, capture_output=True, timeout=120, check=False)
            if done.returncode != 0:
                raise OSError(f"{compiler}: {done.stderr.decode(errors='replace').strip()[-500:]}")
            made.replace(path)  # at once: several workers may be doing this
    return path


def _is_equal(tiles: torch.Tensor, shape: Shape, handler: torch.Tensor) -> bool:
    n, k = shape
    dice = torch.Generator().manual_seed(n + k)
    added = torch.randn(n, generator=dice).bfloat16()
    for rows in range(1, MOST_ROWS + 1):
        x = torch.randn(rows, k, generator=dice).bfloat16()
        for bias in (None, added) if rows in BIASED_ROWS else (None,):
            own, stock = (_product(x, tiles, handler, bias, n, own=own) for own in (True, False))
            if not torch.equal(own, stock):
                return False
    return True


def _product(
    x: torch.Tensor, tiles: torch.Tensor, handler: torch.Tensor, bias: torch.Tensor | None, n: int, *, own: bool
) -> torch.Tensor:
    """By tiles or, as vLLM would have it, by oneDNN."""
    choice = _TILES if own else _ONEDNN
    product: torch.Tensor = torch.ops.cpupp_tiles.linear(x, tiles, handler, bias, choice, n)
    return product


def _choose(choice: torch.Tensor, out_features: int, in_features: int) -> None:
    """Write which way is the faster one. Measured when the shape is used first: all weights are loaded then."""
    shape = (out_features, in_features)
    if shape not in _chosen:
        _chosen[shape] = _measured(shape)
    choice.copy_(_chosen[shape])


def _measured(shape: Shape) -> torch.Tensor:
    n, k = shape
    known = _weights.pop(shape)
    weights = [(tiles, handler.handler_tensor) for tiles, handler in known[: max(1, TIMED_BYTES // (2 * n * k))]]
    choice = [True]
    dice = torch.Generator().manual_seed(0)  # torch's own must stay as it is: vLLM samples by it
    for rows in TIMED_ROWS:
        x = torch.randn(rows, k, generator=dice).bfloat16()

        def seconds(own: bool, x: torch.Tensor = x) -> float:
            began = time.perf_counter()
            for tiles, handler in weights:
                _product(x, tiles, handler, None, n, own=own)
            return time.perf_counter() - began

        turns = [(seconds(own=True), seconds(own=False)) for _ in range(TURNS)]
        own, stock = (statistics.median(times) for times in zip(*turns, strict=True))
        choice += [own < EVEN * stock] * (rows + 1 - len(choice))
    return torch.tensor(choice, dtype=torch.uint8)


def _linear_shape(
    x: torch.Tensor,
    tiles: torch.Tensor,
    handler: torch.Tensor,
    bias: torch.Tensor | None,
    choice: torch.Tensor,
    out_features: int,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_LIBRARY.impl("choose", _choose, "CPU")
torch.library.register_fake("cpupp_tiles::linear", _linear_shape, lib=_LIBRARY)
