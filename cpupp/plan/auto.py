"""`parallel: auto`: tensor inside hosts, pipeline across them."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.facts import HostFacts
from cpupp.plan.model import ModelFacts


def settle_parallel(
    spec: ClusterSpec, model: ModelFacts | None, facts: Mapping[str, HostFacts]
) -> tuple[ClusterSpec, str]:
    """Return the spec with its sizes chosen, and the reason; unchanged and without one when the file says them."""
    if not spec.parallel.auto:
        return spec, ""
    slots = [host.slots for host in spec.hosts]
    common = gcd(*slots)
    tensor = next(n for n in range(common, 0, -1) if common % n == 0 and (model is None or heads_fit(model, n)))
    pipeline = sum(slots) // tensor
    parallel = spec.parallel.model_copy(update={"pipeline": pipeline, "tensor": tensor})
    return spec.model_copy(update={"parallel": parallel}), _reason(spec, model, facts, common, tensor)


def heads_fit(model: ModelFacts, tensor: int) -> bool:
    """Whether vLLM can split the heads over so many ranks: it asserts both, after minutes."""
    if model.num_heads % tensor:
        return False
    return model.num_kv_shards == 1 or model.num_kv_heads % tensor == 0 or tensor % model.num_kv_heads == 0


def _reason(
    spec: ClusterSpec, model: ModelFacts | None, facts: Mapping[str, HostFacts], common: int, tensor: int
) -> str:
    slots = list(dict.fromkeys(host.slots for host in spec.hosts))
    if common == 1:
        why = "one rank a host" if slots == [1] else f"slots({', '.join(map(str, slots))}) have no common divisor"
        found = f"no tensor split: {why}"
    elif model is None:
        found = f"tensor {tensor} inside hosts, pipeline across; the model's heads are unknown"
    elif tensor < common:
        heads = f"{model.num_heads} heads ({model.num_kv_heads} KV)"
        split = f"tensor {tensor}" if tensor > 1 else "no tensor split"
        found = f"{split}: {heads} cannot be split over {common} ranks of a host"
    else:
        found = f"tensor {tensor} inside hosts, pipeline across"
    return found + _idle_nodes(spec, model, facts)


def _idle_nodes(spec: ClusterSpec, model: ModelFacts | None, facts: Mapping[str, HostFacts]) -> str:
    """Say where a rank would span NUMA nodes: a rank's memory is bound to one of them."""
    if any(host.slots > 1 for host in spec.hosts):
        return ""
    nodes = {host.name: len({cpu.numa for cpu in facts[host.name].cpus}) for host in spec.hosts if host.name in facts}
    common = gcd(*nodes.values()) if nodes else 1
    if common == 1 or (model is not None and not heads_fit(model, common)):
        return ""
    return f"; every host has {common} NUMA nodes: slots: {common} would give tensor {common} inside them"
