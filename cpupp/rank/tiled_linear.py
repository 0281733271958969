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
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)

_LIBRARY = torch.library.Library("cpupp_tiles", "DEF")
_LIBRARY.define("linear(Tensor input, Tensor tiles, Tensor handler, Tensor? bias, int out_features) -> Tensor")

Shape = tuple[int, int]
_weights: dict[Shape, list[tuple[torch.Tensor, Any]]] = {}
_chosen: dict[Shape, list[bool]] = {}
_equal: dict[Shape, bool] = {}


class TiledLinear(torch.nn.Module):
    """x [..., K] -> x @ weight.T + bias [..., N], in bfloat16. weight: [N, K], which is not kept; handler: oneDNN's."""

    def __init__(self, weight: torch.Tensor, handler: Any) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.kept = handler  # frees oneDNN's weight when it goes
        self.register_buffer("tiles", pack(weight), persistent=False)
        self.register_buffer("handler", handler.handler_tensor, persistent=False)
        shape = (self.out_features, self.in_features)
        _weights.setdefault(shape, []).append((self.tiles, handler))

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The signature of vLLM's `cpu_linear`; `weight` is what is left of the layer's own and is not read."""
        product: torch.Tensor = torch.ops.cpupp_tiles.linear(x, self.tiles, self.handler, bias, self.out_features)
        return product


class TiledTable(torch.nn.Module):
    """For an embedding, which vLLM prepares as if it were a linear layer: tiled once it serves as the head."""

    def __init__(self, handler: Any) -> None:
        super().__init__()
        self.kept = handler
        self.tiled: TiledLinear | None = None

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The signature of vLLM's `cpu_linear`."""
        if self.tiled is None:
            self.tiled = TiledLinear(weight, self.kept)
        product: torch.Tensor = self.tiled(x, weight, bias)
        return product


def can_be_tiled(weight: torch.Tensor, bias: torch.Tensor | None, handler: Any) -> bool:
    """Whether tiles give this weight's products bit by bit as oneDNN does. Raises RuntimeError when there are no tiles.

    weight: [N, K]; handler: vLLM's CPUDNNLGEMMHandler of it.
    """
    fits = (
        weight.dim() == 2 and weight.dtype == torch.bfloat16 and weight.shape[0] % STEP == weight.shape[1] % STEP == 0
    )
    if not fits or not weight.numel() or (bias is not None and bias.dtype != torch.bfloat16):
        return False
    shape = (weight.shape[0], weight.shape[1])
    if shape not in _equal:
        _equal[shape] = _is_equal(weight, handler.handler_tensor)
    return _equal[shape]


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
    found.cpupp_linear.argtypes = (pointer, pointer, pointer, pointer, number, number, number)
    found.cpupp_pack.restype = found.cpupp_linear.restype = None
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
    key = hashlib.sha256(source + repr(FLAGS).encode()).hexdigest()[:16]
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
            argv = [compiler, *FLAGS, "-x", "c++", "-", "-o", str(made)]
            done = subprocess.run(argv, input=source, capture_output=True, timeout=120, check=False)
            if done.returncode != 0:
                raise OSError(f"{compiler}: {done.stderr.decode(errors='replace').strip()[-500:]}")
            made.replace(path)  # at once: several workers may be doing this
    return path


def _is_equal(weight: torch.Tensor, handler: torch.Tensor) -> bool:
    n, k = weight.shape
    tiles = pack(weight)
    dice = torch.Generator().manual_seed(n + k)
    added = torch.randn(n, generator=dice).bfloat16()
    for rows in range(1, MOST_ROWS + 1):
        x = torch.randn(rows, k, generator=dice).bfloat16()
        for bias in (None, added) if rows in BIASED_ROWS else (None,):
            if not torch.equal(_own(x, tiles, bias, n), _stock(x, handler, bias, n)):
                return False
    return True


def _own(x: torch.Tensor, tiles: torch.Tensor, bias: torch.Tensor | None, n: int) -> torch.Tensor:
    x = x.contiguous()
    k = x.shape[-1]
    product = x.new_empty((*x.shape[:-1], n))
    bias = None if bias is None else bias.contiguous()
    added = bias.data_ptr() if bias is not None else None
    library().cpupp_linear(x.data_ptr(), tiles.data_ptr(), added, product.data_ptr(), x.numel() // k, n, k)
    return product


def _stock(x: torch.Tensor, handler: torch.Tensor, bias: torch.Tensor | None, n: int) -> torch.Tensor:
    """As vLLM's _custom_ops.onednn_mm (0.32)."""
    product = x.new_empty((*x.shape[:-1], n))
    torch.ops._C.onednn_mm(product, x.reshape(-1, x.shape[-1]), bias, handler)
    return product


def _choose(shape: Shape) -> list[bool]:
    """Whether tiles are the faster way, by number of rows, 0 to MOST_ROWS. Measured when the shape is used first: all
    weights are loaded then."""
    n, k = shape
    known = _weights.pop(shape)
    weights = [(tiles, handler.handler_tensor) for tiles, handler in known[: max(1, TIMED_BYTES // (2 * n * k))]]
    choice = [False]
    dice = torch.Generator().manual_seed(0)  # torch's own must stay as it is: vLLM samples by it
    for rows in TIMED_ROWS:
        x = torch.randn(rows, k, generator=dice).bfloat16()

        def seconds(way: Callable[..., torch.Tensor], which: int, x: torch.Tensor = x) -> float:
            began = time.perf_counter()
            for weight in weights:
                way(x, weight[which], None, n)
            return time.perf_counter() - began

        turns = [(seconds(_own, 0), seconds(_stock, 1)) for _ in range(TURNS)]
        own, stock = (statistics.median(times) for times in zip(*turns, strict=True))
        choice += [own < EVEN * stock] * (rows + 1 - len(choice))
    return choice


def _linear(
    x: torch.Tensor, tiles: torch.Tensor, handler: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    k = x.shape[-1]
    rows = x.numel() // k
    shape = (out_features, k)
    choice = _chosen.get(shape)
    if choice is None:
        choice = _chosen[shape] = _choose(shape)
    ours = x.dtype == torch.bfloat16 and (bias is None or bias.dtype == torch.bfloat16)
    if ours and 0 < rows <= MOST_ROWS and choice[rows]:
        return _own(x, tiles, bias, out_features)
    return _stock(x, handler, bias, out_features)


def _linear_shape(
    x: torch.Tensor, tiles: torch.Tensor, handler: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_LIBRARY.impl("linear", _linear, "CPU")
torch.library.register_fake("cpupp_tiles::linear", _linear_shape, lib=_LIBRARY)
