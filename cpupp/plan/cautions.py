"""What a plan says beside itself: warnings (it works, but costs or surprises) and assumptions (nobody observed it)."""

from __future__ import annotations

from collections.abc import Mapping

from cpupp.plan.backend import GroupPlan, memory_domains
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.exposure import exposures
from cpupp.plan.facts import HostFacts
from cpupp.plan.grid import Grid, Seat
from cpupp.plan.memory import KV_ENV, context_length
from cpupp.plan.model import ModelFacts
from cpupp.plan.network import Endpoint, everything_is_here, is_loopback
from cpupp.plan.secret import literal_warnings
from cpupp.plan.shm_room import MIB, ShmRoom, hosts_without_room
from cpupp.plan.threads import CorePlan
from cpupp.plan.versions import known_faults, version_warning
from cpupp.plan.weights import engine_arg, is_compiled

ASSUMED_MASTER_PORT = 29500
SLOW_NAMES = "no name server answers, so a start waits for each look-up of a peer: put all hosts into its /etc/hosts"


def plan_warnings(
    spec: ClusterSpec,
    grid: Grid,
    facts: Mapping[str, HostFacts],
    cores: CorePlan,
    groups: tuple[GroupPlan, ...],
    rooms: tuple[ShmRoom, ...],
    endpoints: Mapping[str, Endpoint],
    model: ModelFacts | None,
) -> list[str]:
    """Everything that works but costs or surprises, in the order of the plan's page."""
    found = list(cores.warnings)
    machines = memory_domains(spec, tuple(h.name for h in spec.hosts), facts)
    found += [f"{' and '.join(m)} are one machine: its cores and memory are divided" for m in machines if len(m) > 1]
    found += _room_warnings(spec, rooms)
    found += _preload_warnings(facts)
    found += _compiler_warnings(spec, facts)
    found += [f"host {n}: {SLOW_NAMES}" for n, fact in facts.items() if fact.slow_names and len(spec.hosts) > 1]
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
        if name in facts and len(spec.hosts) > 1:
            found += _endpoint_warnings(spec, name, endpoint)
    found += _kv_warnings(spec)
    found += _context_warnings(spec, model)
    found += _slow_linear(spec, facts)
    found += map(str, exposures(spec, endpoints))
    found += literal_warnings(spec)
    return found


def _room_warnings(spec: ClusterSpec, rooms: tuple[ShmRoom, ...]) -> list[str]:
    no_room = hosts_without_room(spec, rooms)
    found = []
    for room in rooms:
        if room.hosts[0] in no_room:
            found.append(f"{room.shortage}: its groups are gloo, which is slower; {room.remedy}")
        elif room.is_tight:
            need = f"links and vLLM's queues may need {room.need // MIB} MiB"
            found.append(f"{room.has}, {need}: ranks die of SIGBUS when it is full; {room.remedy}")
    return found


def _endpoint_warnings(spec: ClusterSpec, name: str, endpoint: Endpoint) -> list[str]:
    if is_loopback(endpoint.address) and not everything_is_here(spec):
        return [f"host {name}: its data plane is loopback: no other machine can join"]
    return []


def _slow_linear(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> list[str]:
    if spec.engine.packed_weights != "off" or str(engine_arg(spec, "dtype") or "").startswith("float32"):
        return []
    slow = [name for name, fact in facts.items() if "avx2" in fact.isa and "avx512f" not in fact.isa]
    where = f"{' and '.join(slow)}: no instructions for 16-bit floats"
    gain = "engine.packed_weights: auto makes linear layers several times as fast there, with other rounding"
    return [f"{where}; {gain}"] if slow else []


def _kv_warnings(spec: ClusterSpec) -> list[str]:
    own = {host.name: host.engine.env[KV_ENV] for host in spec.hosts if KV_ENV in host.engine.env}
    if len(set(own.values())) + (len(own) < len(spec.hosts)) < 2:
        return []
    table = ", ".join(f"{name}: {size} GiB" for name, size in own.items())
    return [f"{KV_ENV} differs between hosts ({table}): vLLM uses the smallest number of blocks everywhere"]


def _context_warnings(spec: ClusterSpec, model: ModelFacts | None) -> list[str]:
    if model is None or model.max_position is None:
        return []
    tokens = context_length(spec, model)
    if tokens <= model.max_position:
        return []
    asked = f"max_model_len {tokens} is more than the model's {model.max_position} positions"
    return [f"{asked}: vLLM refuses that, unless its config scales them or VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set"]


def _preload_warnings(facts: Mapping[str, HostFacts]) -> list[str]:
    found = []
    for name, fact in facts.items():
        if fact.engine.error:
            continue
        if not fact.engine.tcmalloc:
            found.append(f"host {name}: libtcmalloc not found: allocation is slower (Debian: libtcmalloc-minimal4)")
        if not fact.engine.iomp and fact.arch == "x86_64":
            found.append(f"host {name}: libiomp5 not found: threads run on gomp, slower (pip install intel-openmp)")
    return found


def _compiler_warnings(spec: ClusterSpec, facts: Mapping[str, HostFacts]) -> list[str]:
    found = []
    for host in spec.hosts:
        fact = facts.get(host.name)
        if not is_compiled(spec) or fact is None or fact.engine.error or "CXX" in {*spec.engine.env, *host.engine.env}:
            continue
        lacks = [w for w, path in (("g++", fact.engine.compiler), ("Python.h", fact.engine.python_h)) if not path]
        if lacks:
            lack = f"host {host.name}: no {' and no '.join(lacks)}"
            found.append(f"{lack}: vLLM cannot compile the model there (doctor's ENGINE-COMPILER says what to do)")
    return found


def _tensor_cost(group: GroupPlan, seats: tuple[Seat, ...]) -> str:
    hosts = list(dict.fromkeys(seats[rank].host for rank in group.ranks))
    return (
        f"group {group.name} spans {', '.join(hosts)}: two all-reduces a layer cross the network for every token; "
        "tensor inside hosts and pipeline across is faster"
    )


def assumptions(spec: ClusterSpec, facts: Mapping[str, HostFacts], num_layers: int | None) -> list[str]:
    """What nobody observed: the plan takes it as given."""
    missing = [host.name for host in spec.hosts if host.name not in facts]
    if not missing:
        return []
    who = f"host {missing[0]} was" if len(missing) == 1 else f"hosts {', '.join(missing)} were"
    found = [f"{who} not asked: cores, addresses, versions and memory are unknown"]
    if len(spec.hosts) > 1:
        found.append("entries are different machines, unless they are reached in the same way")
    if spec.network.master_port == "auto" and spec.hosts[0].name in missing:
        found.append(f"master port {ASSUMED_MASTER_PORT} (a launch takes a free one of the head)")
    if num_layers is None:
        found.append("the model was not read: layers are unknown (model.num_layers can say how many)")
    return found
