"""A vLLM worker that writes down how many bytes its weights and its KV cache take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.model_loader.base_loader as loader
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.bench.memory import FOLDER_ENV


class MeasuringWorker(CPUWorker):  # type: ignore[misc]
    """Counts parameters before they are repacked, and what the process has grown by when it is done."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load as ever, and look before and after."""
        found = {"parameters": 0}
        process = loader.process_weights_after_loading

        def look(model: Any, *rest: Any) -> Any:
            found["parameters"] = _bytes(tensor for tensor in model.parameters())
            return process(model, *rest)

        loader.process_weights_after_loading = look
        before = _anonymous()
        super().load_model(*args, **kwargs)
        loader.process_weights_after_loading = process
        # Latent attention adds copies of its up-projections once all is loaded (vllm mla_attention.py: W_UV, W_UK_T).
        held = [{**vars(module), **module._parameters} for module in self.model_runner.model.modules()]
        values = [value for names in held for name, value in names.items() if name.startswith("W_U")]
        copies = _bytes(value for value in values if isinstance(value, torch.Tensor))
        self._measured = {"parameters": found["parameters"] + copies, "grown": _anonymous() - before}

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the KV cache, and write everything down."""
        super().initialize_from_config(*args, **kwargs)
        self._measured["kv"] = _bytes(self.model_runner.kv_caches)
        path = Path(os.environ[FOLDER_ENV]) / f"rank-{self.rank}.json"
        path.write_text(json.dumps(self._measured), encoding="utf-8")


def _bytes(tensors: Any) -> int:
    """Bytes of all tensors, shared storage once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _anonymous() -> int:
    """Bytes of private memory of this process: files that are mapped to be read do not count."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise LookupError("RssAnon")
