"""Descriptions and examples of the keys of a cluster file, for its JSON Schema: the words of docs/yaml.md."""

from __future__ import annotations

from typing import Any

WORDS: dict[str, str] = {
    "name": "Name of the cluster: letters, digits, ., -, _, at most 63. Part of the run folder's name.",
    "model": "The model.",
    "parallel": "How it is split.",
    "hosts": "The machines, in rank order. The first one is the head: it has rank 0 and serves the API.",
    "engine": "How vLLM runs.",
    "network": "The data plane.",
    "serve": "Where the API listens.",
    "deadlines": "How long each phase of a start may take.",
    "restart": "Whether the run comes again after a failure.",
    "model.path": (
        "A folder that every host has, at the same path, or a hub id that is in every host's cache. ~ is "
        "expanded on the host. A relative path starts at the SSH login directory; on a local: true host, "
        "where cpupp is started."
    ),
    "model.served_name": "The model's name in the API.",
    "model.num_layers": (
        "Number of layers, for plans without facts (cpupp plan --offline). Hosts know better when they are asked."
    ),
    "parallel.auto": "Choose the sizes; parallel: auto is short for it.",
    "parallel.pipeline": "Number of stages.",
    "parallel.tensor": "Ranks that share every layer of a stage.",
    "parallel.layers": "Layers of each stage, one number a stage.",
    "hosts[].name": "Name of the entry, used once.",
    "hosts[].ssh": "[user@]host[:port] (IPv6 in brackets) or an alias of ~/.ssh/config.",
    "hosts[].local": "This machine, without SSH. Exactly one of ssh and local: true is needed.",
    "hosts[].address": (
        "Address on the data plane, where it differs from the one that SSH reaches. It must be on the host's "
        "own interface."
    ),
    "hosts[].slots": "Ranks on this host.",
    "hosts[].cores": "CPU numbers that its ranks may use, as the kernel counts them.",
    "hosts[].engine": (
        "What this host overrides: python, env (added to engine.env) and secrets (added to engine.secrets)."
    ),
    "engine.python": "The Python that has vLLM. ~ is expanded on the host.",
    "engine.args": (
        "Arguments of vllm serve, without dashes in front: max_model_len: 1024, enforce_eager: true. true "
        "becomes --name, false becomes --no-name, a list several values, a mapping JSON."
    ),
    "engine.env": "Environment of the ranks. Values are text: quote numbers. They reach the process byte for byte.",
    "engine.secrets": (
        "Variables of the ranks whose values are not in this file: variable -> env (the launcher's variable "
        "of that name), env:OTHER, or file:PATH (its first line, read at the launcher). security.md says "
        "where they go."
    ),
    "engine.keep_env": (
        "Variables of each host's own environment that reach its ranks beside those that always do: "
        "KRB5CCNAME, MALLOC_*."
    ),
    "engine.executor": "vLLM's multi-node executor. Ray and others are not supported.",
    "engine.communicator": (
        "What carries data between ranks: cpupp's, a transport for every link; cpupp's, one backend for every"
        " group; vLLM's own."
    ),
    "engine.micro_batches": (
        "auto: the decoding requests of a pipeline go in one part a stage where that is measured to be faster, and "
        "long prompts in pieces that follow each other through the stages; with communicator links and vLLM 0.32. "
        "off: batches as vLLM makes them."
    ),
    "engine.packed_weights": (
        "auto: where the CPU has no instructions for 16-bit floats (AVX2 alone), linear layers run on weights packed"
        " as float16, several times as fast for more than one token; sums run in another order, so answers differ from"
        " stock vLLM's as those of another CPU do. off: vLLM's own way."
    ),
    "engine.tiled_weights": (
        "auto: where the CPU has AMX and memory has room, linear layers of a bfloat16 model hold their weights a second"
        " time, as tiles for steps of up to 32 tokens; used where that is measured to be faster and gives the same bits"
        " as vLLM's own way; needs a C++ compiler on the host. off: vLLM's own way."
    ),
    "network.interface": "One interface name that every host has. auto: on each host the one that holds its address.",
    "network.master_addr": "Where rank 0 is found. auto: the head's address.",
    "network.master_port": "Port of the rendezvous. auto: a free one of the head.",
    "network.backend": (
        "auto: shared memory where it is proved and /dev/shm has room, gloo elsewhere. shm: a demand, refused"
        " where it cannot be met. gloo: everywhere."
    ),
    "serve.host": "Address on the head that the API listens on.",
    "serve.port": "Its port.",
    "serve.api_key_env": (
        "The launcher's variable that holds the API's key, or file:PATH. vLLM on the head gets it as VLLM_API_KEY."
    ),
    "deadlines.connect": "Until a host's agent has answered. Then the host counts as unreachable: exit code 5.",
    "deadlines.spawn": "Until every vLLM node's process runs.",
    "deadlines.import": "Until vLLM is imported. From a cold network disk this takes minutes.",
    "deadlines.join": "Until every rank has announced its groups.",
    "deadlines.load": "Until the weights are loaded.",
    "deadlines.warm_up": "Until the model is compiled and warmed up.",
    "deadlines.answer": "Until the API is healthy and one completion has come back.",
    "restart.policy": "on-failure: after a failure, or a passed deadline, the whole gang starts again.",
    "restart.max": "Restarts in the whole run.",
    "restart.backoff": "Wait before the first restart. It doubles with every further one, up to 300.",
}

EXAMPLES: dict[str, list[Any]] = {
    "name": ["pair"],
    "model.path": ["/models/Qwen2.5-14B-Instruct"],
    "hosts[].ssh": ["me@10.0.0.1", "me@node2:2222"],
    "hosts[].address": ["10.0.0.1"],
    "engine.python": ["~/venv/bin/python"],
    "engine.args": [{"max_model_len": 4096}],
    "engine.secrets": [{"HF_TOKEN": "env"}],
    "parallel.layers": [[14, 16]],
    "serve.api_key_env": ["VLLM_API_KEY", "file:/etc/cpupp/key"],
}
