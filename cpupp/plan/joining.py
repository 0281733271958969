"""The announcements: which are missing, and how one differs from the plan."""

from __future__ import annotations

from cpupp.plan.backend import GroupPlan
from cpupp.plan.failures import Failure
from cpupp.plan.gang import GroupKey, State
from cpupp.plan.handoff import GroupReport


def missing(state: State) -> list[GroupKey]:
    """The announcements that have not come, in the order of ranks."""
    return sorted(set(state.expected) - state.announced)


def silent(state: State, absent: list[GroupKey]) -> Failure:
    """The failure of a rank that runs, but never announced its group."""
    rank, kind, ranks = absent[0]
    node = next(n for n in state.nodes if rank in n.ranks)
    loaded = "the plugin was loaded" if node.plugin else "cpupp's plugin was never loaded (is VLLM_PLUGINS set?)"
    message = f"rank {rank} never announced its {kind} group {list(ranks)}: {loaded}"
    hint = "without it vLLM runs its stock communicator; see the log of that node"
    return Failure(
        host=node.host, node_rank=node.node_rank, ranks=(rank,), code="INJECTION-MISSING", message=message, hint=hint
    )


def mismatch(group: GroupPlan | None, report: GroupReport) -> str | None:
    """Say how a rank's announcement differs from the plan; None when it matches."""
    name = f"{report.kind} group {report.ranks}"
    if group is None:
        return f"rank {report.rank} announced {name}, which the plan does not have"
    planned = {(link.src, link.dst): link.transport for link in group.links}
    for src, dst, transport in report.links:
        if planned.get((src, dst)) != transport:
            want = planned.get((src, dst), "no such link")
            return f"rank {report.rank}, {name}, link {src}->{dst}: plan {want}, rank {transport} ({report.reason})"
    if group.backend != report.backend:
        return f"rank {report.rank}, {name}: plan {group.backend}, rank {report.backend} ({report.reason})"
    return None
