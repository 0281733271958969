"""Plan -> the exact command of every vLLM node. vLLM's own spellings appear here and where vLLM is called.

`env` is set as it is written; `site_env` holds the variables whose value depends on the site folder that the agent
makes on the host: `{site}` in them is replaced there. Nothing of this meets a shell: it travels as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from cpupp.plan.host_env import DROPPED_ENV, KEPT_ENV
from cpupp.plan.memory import KV_ENV
from cpupp.plan.partition import GIB
from cpupp.plan.plan import HostPlan, NodePlan, Plan
from cpupp.plan.secret import API_KEY_ENV
from cpupp.plan.versions import FORK_SAFE, METHOD_ENV, binds_by_global_rank

SITE = "{site}"
PLUGINS_ENV = "VLLM_PLUGINS"
PLUGIN = "cpupp"
SCHEDULER_ARG = "scheduler_cls"
SCHEDULER = "cpupp.rank.scheduler.make_scheduler"
CLI = "cpupp.rank.vllm_cli"
STOCK_CLI = "vllm.entrypoints.cli.main"

SHORT_LOOKUPS = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""Where no name server answers: torch's store looks for the name of each peer that it connects to, twice in a start
(torch/csrc/distributed/c10d/socket.cpp, `formatSockAddr`), and glibc waits for 10 s each time."""

OWNED_ARGS: dict[str, str] = {
    "model": "model.path",
    "served_model_name": "model.served_name",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "pp": "parallel.pipeline",
    "tp": "parallel.tensor",
    "data_parallel_size": "nothing: cpupp runs one replica",
    "dp": "nothing: cpupp runs one replica",
    "api_server_count": "nothing: the head runs one API server",
    "nnodes": "hosts",
    "node_rank": "hosts",
    "master_addr": "network.master_addr",
    "master_port": "network.master_port",
    "headless": "hosts",
    "distributed_executor_backend": "engine.executor",
    "host": "serve.host",
    "port": "serve.port",
    "uds": "serve.host",
    "ssl_keyfile": "nothing: the API is asked in plain HTTP; TLS is for a proxy in front of it",
    "ssl_certfile": "nothing: the API is asked in plain HTTP; TLS is for a proxy in front of it",
    "config": "nothing: arguments stand under engine.args, where they are checked",
}
"""`vllm serve` arguments that cpupp sets itself, and the key of the cluster file that says it."""


def owner(name: str) -> str | None:
    """Say which key of the cluster file sets an argument (`nothing: REASON` when none does); None when it is free.

    name: in any spelling that vLLM's parser takes for it, with dashes or underscores, or cut short.
    """
    plain = name.lstrip("-").replace("-", "_").lower()
    if plain.startswith("data_parallel"):
        plain = "data_parallel_size"
    if plain in OWNED_ARGS:
        return OWNED_ARGS[plain]
    # argparse takes any unique beginning: --tensor-parallel is --tensor-parallel-size.
    return next((home for owned, home in OWNED_ARGS.items() if len(plain) > 2 and owned.startswith(plain)), None)


OWNED_ENV: dict[str, str] = {
    "VLLM_PP_LAYER_PARTITION": "parallel.layers",
    "VLLM_HOST_IP": "hosts[].address",
    "GLOO_SOCKET_IFNAME": "network.interface",
    "MASTER_ADDR": "network.master_addr",
    "MASTER_PORT": "network.master_port",
    "PYTHONPATH": "nothing: the site folder of the run comes first there",
    "CPUPP_HANDOFF": "nothing: it is cpupp's own",
}
"""Environment that cpupp sets itself, and the key of the cluster file that says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """The command of one vLLM node on its host.

    secrets: variable -> where the launcher finds its value; keep_env: what of the host's own environment passes (names,
    or beginnings with `*`) unless it begins with one of drop_env.
    """

    host: str
    node_rank: int
    argv: tuple[str, ...]
    env: dict[str, str]
    site_env: dict[str, str]
    secrets: dict[str, str] = field(default_factory=dict)
    keep_env: tuple[str, ...] = KEPT_ENV
    drop_env: tuple[str, ...] = DROPPED_ENV


def make_commands(plan: Plan) -> tuple[RankCommand, ...]:
    """Write the command of every vLLM node, in node rank order."""
    hosts = {host.name: host for host in plan.hosts}
    return tuple(
        RankCommand(
            host=node.host,
            node_rank=node.node_rank,
            argv=_argv(plan, node, hosts[node.host]),
            env=_env(plan, node, hosts[node.host]),
            site_env={
                "PYTHONPATH": SITE,
                "TMPDIR": f"{SITE}/tmp",
                "VLLM_RPC_BASE_PATH": f"{SITE}/rpc",
            },
            secrets=_secrets(node, hosts[node.host]),
            keep_env=(*KEPT_ENV, *plan.keep_env),
        )
        for node in plan.nodes
    )


def _secrets(node: NodePlan, host: HostPlan) -> dict[str, str]:
    # Only the node that serves the API needs the key to it.
    return {name: source for name, source in host.secrets.items() if node.node_rank == 0 or name != API_KEY_ENV}


def _argv(plan: Plan, node: NodePlan, host: HostPlan) -> tuple[str, ...]:
    argv = [host.python, "-m", STOCK_CLI if plan.communicator == "stock" else CLI, "serve", host.model]
    argv += ["--served-model-name", plan.served_name]
    argv += ["--pipeline-parallel-size", str(plan.pipeline), "--tensor-parallel-size", str(plan.tensor)]
    argv += ["--distributed-executor-backend", "mp"]
    if len(plan.nodes) > 1:
        argv += ["--nnodes", str(len(plan.nodes)), "--node-rank", str(node.node_rank)]
        argv += ["--master-addr", plan.master_addr, "--master-port", str(plan.master_port)]
    if node.node_rank > 0:
        argv += ["--headless"]
    else:
        argv += ["--host", plan.serve_host, "--port", str(plan.serve_port)]
        if plan.micro_batches:
            argv += _flag(SCHEDULER_ARG, SCHEDULER)
    for name, value in plan.args.items():
        argv += _flag(name, value)
    return tuple(argv)


def _flag(name: str, value: object) -> list[str]:
    dashed = name.lstrip("-").replace("_", "-")
    if value is True:
        return [f"--{dashed}"]
    if value is False:
        return [f"--no-{dashed}"]
    if value is None:
        return []
    if isinstance(value, list):
        return [f"--{dashed}", *map(str, value)]
    if isinstance(value, dict):
        return [f"--{dashed}", json.dumps(value, sort_keys=True)]
    text = str(value)
    return [f"--{dashed}={text}"] if text.startswith("-") else [f"--{dashed}", text]


def _env(plan: Plan, node: NodePlan, host: HostPlan) -> dict[str, str]:
    ranks = [plan.ranks[rank] for rank in node.ranks]
    env = {
        # Clusters without a way out would wait for time-outs at every start.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        KV_ENV: str(ranks[0].kv // GIB),
    }
    if host.preload:
        env["LD_PRELOAD"] = ":".join(host.preload)
    if host.slow_names:
        env |= SHORT_LOOKUPS
    if plan.communicator != "stock" and any(FORK_SAFE in path for path in host.preload):
        env[METHOD_ENV] = "fork"
    if all(rank.cores for rank in ranks):
        listed = plan.ranks if binds_by_global_rank(host.vllm) else ranks
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank.cores)) for rank in listed)
    env.update(host.env)
    if PLUGINS_ENV in env:  # an allow-list: without our name in it vLLM would leave us out, and say nothing
        names = [name for name in env[PLUGINS_ENV].split(",") if name]
        env[PLUGINS_ENV] = ",".join(dict.fromkeys([*names, PLUGIN]))
    env["VLLM_HOST_IP"] = node.endpoint.address
    if node.endpoint.interface:
        env["GLOO_SOCKET_IFNAME"] = node.endpoint.interface
    if plan.pipeline > 1 and plan.ranks[0].layers is not None:
        env["VLLM_PP_LAYER_PARTITION"] = ",".join(str(size) for size in _layer_sizes(plan))
    return env


def _layer_sizes(plan: Plan) -> list[int]:
    sizes = {}
    for rank in plan.ranks:
        assert rank.layers is not None
        sizes[rank.stage] = rank.layers[1] - rank.layers[0]
    return [sizes[stage] for stage in range(plan.pipeline)]
