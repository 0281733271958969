"""Gives vLLM 0.18.0 to 0.32.0 our communicator. The only module that imports vLLM, and only worker processes load it.

What differs between the versions sits here: the constructor gained `use_all2all` and will gain more; 0.18 calls the
tensor dict methods always (vllm #37933), 0.20 and later when `supports_tensor_dict` is true (vllm PR #40150).
"""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.cpu_communicator import (  # type: ignore[import-not-found, unused-ignore]  # on the hosts only
    CpuCommunicator,
)
from vllm.logger import init_logger  # type: ignore[import-not-found, unused-ignore]  # on the hosts only

from cpupp.plan.handoff import HANDOFF_ENV, RankHandoff
from cpupp.rank import graph_ops
from cpupp.rank.announce import append_error, append_report
from cpupp.rank.beat import start_beat
from cpupp.rank.communicator import Communicator
from cpupp.rank.packed_linear import PackedLinear, PackedTable, is_worth_packing
from cpupp.rank.vllm_steps import count_steps

# vLLM makes the TP group before the PP group, in every version.
_tensor_group: Communicator | None = None
_tiled_shapes: set[tuple[int, ...]] = set()
COMPILER_ENV = ("ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_", "TORCH_COMPILE_", "CXX", "CC", "CFLAGS", "CXXFLAGS")
logger = init_logger("vllm.cpupp")


class LinksCommunicator(CpuCommunicator):  # type: ignore[misc, unused-ignore]  # vLLM is untyped where it is not installed
    """vLLM's CPU communicator with a transport per link for the TP and PP groups; any other group is left as it is."""

    supports_tensor_dict: bool
    per_link = True

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        **kwargs: Any,
    ) -> None:
        ours = unique_name.startswith(("tp", "pp"))
        # Under another name the stock constructor skips its own choice of SHM. That choice tests architecture and op
        # before its collective, so a rank that fails a test would leave its peers waiting.
        stock_name = f"cpupp-{unique_name}" if ours else unique_name
        super().__init__(
            cpu_group=cpu_group, device=device, device_group=device_group, unique_name=stock_name, **kwargs
        )
        self.unique_name = unique_name
        self.links: Communicator | None = None
        cure_model()
        if not ours:
            return
        handoff = RankHandoff.decode(os.environ[HANDOFF_ENV])
        count_steps(handoff.reports, torch.distributed.get_rank())
        if self.world_size == 1:
            return
        try:
            if unique_name.startswith("pp"):
                cure_eager_pipeline()
            cure_local_size()
            tensor_dicts_follow_the_communicator()
            self.links = self._connect(unique_name, cpu_group, handoff)
            append_report(handoff.reports, self.links.report())
            start_beat(handoff, torch.distributed.get_rank(), torch.distributed.get_world_size())
        except BaseException as error:
            append_error(handoff.reports, f"group {unique_name} of ranks {self.ranks}", error)
            raise
        graph_ops.serve(unique_name, self.links)
        self.supports_tensor_dict = self.per_link or self.links.outcome.backend == "shm"
        logger.info("cpupp: group %s of ranks %s: %s", unique_name, self.ranks, self.links.summary())

    def _connect(self, name: str, group: ProcessGroup, handoff: RankHandoff) -> Communicator:
        global _tensor_group
        if name.startswith("pp"):
            address = os.environ.get("VLLM_HOST_IP", "")
            return Communicator(
                name, group, handoff, per_link=self.per_link, tensor_group=_tensor_group, address=address
            )
        _tensor_group = Communicator(name, group, handoff, per_link=self.per_link)
        return _tensor_group

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place, as stock does."""
        if self.links is None:
            return super().all_reduce(input_)  # type: ignore[no-any-return, unused-ignore]  # untyped upstream
        if torch.compiler.is_compiling():
            torch.ops.cpupp.all_reduce_(input_, self.unique_name)
        else:
            self.links.all_reduce(input_)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate along `dim`."""
        if self.links is None:
            return super().all_gather(input_, dim)  # type: ignore[no-any-return, unused-ignore]  # untyped upstream
        if torch.compiler.is_compiling():
            gathered: torch.Tensor = torch.ops.cpupp.all_gather(
                input_, dim % input_.dim(), self.world_size, self.unique_name
            )
            return gathered
        return self.links.all_gather(input_, dim % input_.dim())

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate along `dim` on the rank at position `dst`."""
        if self.links is None:
            return super().gather(input_, dst, dim)  # type: ignore[no-any-return, unused-ignore]  # untyped upstream
        return self.links.gather(input_, dst, dim % input_.dim())

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        """Send to the position `dst`. Raises FrameError, PeerLostError."""
        if self.links is None:
            super().send_tensor_dict(tensor_dict, dst)
            return
        self._check_supported()
        self.links.send_tensor_dict(tensor_dict, dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        """Receive from the position `src`. Raises FrameError, PeerLostError."""
        if self.links is None:
            return super().recv_tensor_dict(src)  # type: ignore[no-any-return, unused-ignore]  # untyped upstream
        self._check_supported()
        return self.links.recv_tensor_dict(src)

    def _check_supported(self) -> None:
        if not self.supports_tensor_dict:
            raise NotImplementedError(f"group {self.unique_name}: mode fallback sends no tensor dict over gloo")

    def destroy(self) -> None:
        """Release links and segments."""
        global _tensor_group
        if self.links is not None:
            graph_ops.withdraw(self.unique_name, self.links)
            self.links.close()
            if _tensor_group is self.links:
                _tensor_group = None
            self.links = None
        super().destroy()


class FallbackCommunicator(LinksCommunicator):
    """What the upstream fix (vllm PR #40150) does, on every version: one transport for the whole group, and tensor
    dicts only over shared memory; over gloo vLLM's generic path carries them.
    """

    per_link = False


def tensor_dicts_follow_the_communicator() -> None:
    """Make a group ask its communicator whether it carries tensor dicts, whatever this vLLM's group asks itself.

    0.18 and 0.19 ask whether the SHM op exists (vllm #37933): wrong across hosts, and wrong on AVX2 builds, which have
    no such op although our links need none. A property, because the group's constructor is running when this is called.
    """
    from vllm.distributed.parallel_state import GroupCoordinator  # type: ignore[import-not-found, unused-ignore]

    def supported(self: Any) -> bool:
        return bool(getattr(self.device_communicator, "supports_tensor_dict", False))

    GroupCoordinator.use_cpu_custom_send_recv = property(supported, lambda self, value: None)


def cure_local_size() -> None:
    """Let a vLLM node with several ranks start when there are several nodes.

    The response queue takes the number of devices for the number of ranks on a node, and the CPU platform has one
    device. So the head's second rank counts as remote, and the engine dies on `assert local_message_queue is not None`
    (seen with 0.32.0).
    """
    from vllm.config import get_current_vllm_config_or_none  # type: ignore[import-not-found, unused-ignore]
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue  # type: ignore[import-not-found, unused-ignore]
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found, unused-ignore]

    config = get_current_vllm_config_or_none()
    size = getattr(config.parallel_config, "local_world_size", 1) if config is not None else 1
    original = getattr(MessageQueue, "create_from_process_group_single_reader", None)
    if original is None or size == 1 or hasattr(original, "cpupp"):
        return

    @wraps(original)
    def cured(*args: Any, **kwargs: Any) -> Any:
        with patch.object(CpuPlatform, "device_count", classmethod(lambda cls: size), create=True):
            return original(*args, **kwargs)

    cured.cpupp = True  # type: ignore[attr-defined]  # marks the function as patched
    MessageQueue.create_from_process_group_single_reader = staticmethod(cured)


def cure_eager_pipeline() -> None:
    """Allocate the buffer for received tensors when nobody did. From 0.27.1 to 0.32.0 an eager CPU start skips the
    dummy run that allocates it, and the first request dies on `assert self.intermediate_tensors is not None`.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found, unused-ignore]

    original = getattr(GPUModelRunner, "sync_and_gather_intermediate_tensors", None)
    if original is None or hasattr(original, "cpupp"):
        return

    @wraps(original)
    def cured(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    cured.cpupp = True  # type: ignore[attr-defined]  # marks the method as patched
    GPUModelRunner.sync_and_gather_intermediate_tensors = cured


def cure_model() -> None:
    """What a worker's model needs before it is made, also of a run of one rank, which has no communicator."""
    handoff = RankHandoff.decode(os.environ[HANDOFF_ENV])
    cure_compiled_loading(handoff)
    if handoff.packed_weights or handoff.tiled_weights:
        cure_linear(handoff)


def cure_linear(handoff: RankHandoff) -> None:
    """Put our own linear layers in the place of vLLM's, where they are faster.

    vLLM 0.32 asks oneDNN for a product and keeps its handler in a closure of `layer.cpu_linear`; with AMX,
    rank/tiled_linear.py takes its place for few rows. oneDNN has no product for bfloat16 on AVX2 ("Failed to create
    oneDNN linear, fallback to torch linear"): then vLLM takes torch's, whose time grows with the number of tokens, and
    rank/packed_linear.py its place. What vLLM did prepare sits in a function with a closure; the fallback has none.
    """
    from vllm.model_executor.layers import utils  # type: ignore[import-not-found, unused-ignore]
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found, unused-ignore]
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    original = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if original is None or hasattr(original, "cpupp"):
        return

    @wraps(original)
    def cured(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        original(layer, remove_weight)
        is_table = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
        prepared = getattr(layer, "cpu_linear", None)
        cells = getattr(prepared, "__closure__", None)
        if prepared is None or weight.is_meta:
            return
        if cells:
            if handoff.tiled_weights:
                _tile(layer, weight, cells, is_table=is_table)
        elif handoff.packed_weights and is_worth_packing(weight):
            logger.info_once("cpupp: linear layers run on packed weights")
            layer.cpu_linear = PackedTable() if is_table else PackedLinear(weight)
            if remove_weight:
                layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    cured.cpupp = True  # type: ignore[attr-defined]  # marks the function as patched
    utils.dispatch_cpu_unquantized_gemm = cured


def _tile(layer: torch.nn.Module, weight: torch.Tensor, cells: tuple[Any, ...], *, is_table: bool) -> None:
    handler = next((c.cell_contents for c in cells if hasattr(c.cell_contents, "handler_tensor")), None)
    if handler is None:  # not oneDNN's
        return
    from cpupp.rank.tiled_linear import TiledTable, tiled

    try:
        if is_table:
            layer.cpu_linear = TiledTable(handler, layer.cpu_linear)
        elif (ours := tiled(weight, getattr(layer, "bias", None), handler)) is not None:
            layer.cpu_linear = ours
            _tiled_shapes.add(tuple(weight.shape))
            logger.info_once("cpupp: linear layers of up to 32 rows run on AMX tiles where that is faster")
    except (RuntimeError, AttributeError) as error:  # no compiler, no tiles, or another vLLM
        logger.warning_once("cpupp: linear layers are vLLM's own: %s", error)


def cure_compiled_loading(handoff: RankHandoff) -> None:
    """Let a compiled model be loaded from the cache of an earlier start instead of compiled again.

    vLLM ends the loading of a stored function by its `finalize_loading`. On CPU the stored function is torch's own,
    which is complete once it is read and has no such method: so the load fails with `'function' object has no attribute
    'finalize_loading'`, and every start compiles anew (seen with 0.32.0). vLLM's own class has the method and is left
    alone, and so is every check of the cache's key and of the sources.

    What is loaded now was compiled with `-march=native` and for a number of threads, and vLLM's key knows neither:
    hosts may share a home, and a changed plan may give a rank other cores. So both become part of the key.
    """
    try:
        from vllm.compilation import caching  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return
    load = getattr(torch.compiler, "load_compiled_function", None)
    factors = getattr(caching, "aot_compile_hash_factors", None)
    if load is None or factors is None or hasattr(load, "cpupp"):
        return

    keyed = False

    @wraps(load)
    def cured_load(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        if not keyed:  # this vLLM makes its key elsewhere: without ours in it nothing is loaded
            return loaded
        function = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        if type(function).__module__.startswith("torch.") and not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda config: None  # type: ignore[union-attr]  # what vLLM will call
        return loaded

    @wraps(factors)
    def cured_factors(*args: Any, **kwargs: Any) -> list[str]:
        nonlocal keyed
        keyed = True
        return [*factors(*args, **kwargs), compiled_for(handoff)]

    cured_load.cpupp = True  # type: ignore[attr-defined]  # marks the function as patched
    torch.compiler.load_compiled_function = cured_load
    caching.aot_compile_hash_factors = cured_factors


def _tiled_way() -> str:
    """What compiled code holds of tiles: for which shapes, and how it calls them."""
    if not _tiled_shapes:
        return ""
    from cpupp.rank.tiled_linear import OPERATOR

    return f"{sorted(_tiled_shapes)} {OPERATOR}"


def compiled_for(handoff: RankHandoff) -> str:
    """What code compiled here depends on, beyond the model and the versions: instructions, threads, the compiler's
    environment, whether weights may be packed or tiled, and which are tiled (an embedding that serves as the head runs
    outside compiled code).

    vLLM makes its key at the first step, when all weights are loaded.
    """
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    lines = {line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(("flags", "Features"))}
    settings = {n: v for n, v in os.environ.items() if n.startswith(COMPILER_ENV) and n != "TORCHINDUCTOR_CACHE_DIR"}
    ways = f"packed={handoff.packed_weights} tiled={handoff.tiled_weights} {_tiled_way()}"
    return f"{sorted(lines)} {torch.get_num_threads()} {sorted(settings.items())} {ways}"
