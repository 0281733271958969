"""The plan as a page, and as the `data` of the envelope. `cpupp launch --dry-run` prints the same page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cpupp.plan.command import RankCommand
from cpupp.plan.network import url_host
from cpupp.plan.placement import Prediction
from cpupp.plan.plan import NodePlan, Plan, RankPlan
from cpupp.plan.shown import SHOWN, shown_argv, shown_env
from cpupp.render import WIDTH, Page
from cpupp.render_groups import add_groups, groups_data
from cpupp.render_map import add_map
from cpupp.render_sizes import count, gib, ranges


def plan_page(
    plan: Plan, commands: Sequence[RankCommand], width: int = WIDTH, *, with_commands: bool = True, lines: bool = True
) -> Page:
    """Lay out the whole plan. lines: whether the map may use line-drawing characters."""
    page = Page(width)
    _summary(page, plan)
    add_map(page, plan, lines=lines)
    _hosts(page, plan)
    _ranks(page, plan)
    add_groups(page, plan.groups, plan.details)
    if with_commands:
        _commands(page, commands)
    _notes(page, plan)
    return page


def _summary(page: Page, plan: Plan) -> None:
    num_ranks, num_hosts = len(plan.ranks), len(plan.hosts)
    page.line(
        f"cluster {plan.name}: pipeline {plan.pipeline} x tensor {plan.tensor} = {count(num_ranks, 'rank')} "
        f"on {count(num_hosts, 'host')}, {count(len(plan.nodes), 'vLLM node')}",
        "bold",
    )
    page.line()
    rows = [("model", _model_text(plan))]
    rows.append(("API", f"http://{url_host(plan.serve_host)}:{plan.serve_port}/v1 on the head {plan.head}"))
    rows.append(("served as", plan.served_name))
    rows.append(("rank 0 at", f"{url_host(plan.master_addr)}:{plan.master_port} (rendezvous)"))
    rows.append(("ranks talk", _COMMUNICATORS[plan.communicator]))
    if plan.pipeline > 1:
        rows.append(("batches", _MICRO_BATCHES[plan.micro_batches]))
    if plan.packed_weights:
        rows.append(("weights", "packed for linear layers on CPUs without instructions for 16-bit floats"))
    if any(rank.tiles for rank in plan.ranks):
        rows.append(("tiles", _tiles_text(plan)))
    if plan.parallel_reason:
        rows.append(("split", plan.parallel_reason))
    if plan.layers_reason:
        rows.append(("layers", plan.layers_reason))
    rows.append(("KV cache", plan.kv.reason))
    for name, value in rows:
        page.prose(value, hang=name.ljust(12))


_COMMUNICATORS = {
    "links": "communicator links: every link by its own transport, proved at start",
    "fallback": "communicator fallback: one backend for each group, proved at start",
    "stock": "communicator stock: vLLM's own, nothing injected",
}


_MICRO_BATCHES = {
    True: "micro-batches: requests in one part a stage where that is measured to be faster, long prompts in pieces",
    False: "as vLLM makes them",
}


def _model_text(plan: Plan) -> str:
    facts = plan.model_facts
    if facts is None:
        return plan.model
    stored = f", {gib(facts.stored_bytes)} stored" if facts.kinds else ""
    heads = f"{facts.num_heads} heads ({facts.num_kv_heads} KV)"
    return f"{plan.model}: {facts.architecture}, {facts.num_layers} layers, {heads}, {facts.dtype}{stored}"


def _hosts(page: Page, plan: Plan) -> None:
    page.heading("Hosts")
    endpoint = {node.host: node.endpoint for node in plan.nodes}
    rows = []
    for host in plan.hosts:
        place = endpoint[host.name]
        rows.append(
            (
                host.name,
                "this machine" if host.local else f"ssh {host.ssh}",
                f"{place.address} {place.interface}".rstrip(),
                place.reason,
                host.vllm,
                host.python,
            )
        )
    page.table(("host", "reached by", "data plane", "why", "vLLM", "python"), rows)
    for host in plan.hosts:
        if host.preload:
            page.prose(f"{host.name} preloads {', '.join(host.preload)}", style="dim")
    for machine in plan.machines:
        if len(machine) > 1:
            page.prose(f"{', '.join(machine)} share one memory: one machine")


def _ranks(page: Page, plan: Plan) -> None:
    page.heading("Ranks")
    rows = [_rank_row(rank) for rank in plan.ranks]
    page.table(("rank", "host", "vLLM node", "stage", "tp", "cores", "layers", "weights", "KV cache", "time"), rows)
    for text in conclusions(plan):
        page.prose(text)


def conclusions(plan: Plan) -> list[str]:
    """What the numbers of the ranks mean together: room for sequences, speed, and which stage is the limit of each."""
    kv, found = plan.kv, []
    if kv.sequences is not None and kv.tokens is not None:
        limit = f", as many as stage {kv.limit} holds" if plan.pipeline > 1 else ""
        text = f"room for {kv.tokens:,} tokens, {count(kv.sequences, 'sequence')} of full length{limit}"
        if kv.largest_context is not None:
            text += f"; with this memory one sequence could have {kv.largest_context:,} tokens"
        found.append(text)
    if plan.prediction is not None:
        made = plan.prediction
        text = f"predicted {_rate(made.tokens_per_s)} tokens/s at batch 1, of its time {made.link_share:.1%} on links"
        if plan.pipeline > 1:
            host = next(rank.host for rank in plan.ranks if rank.stage == made.slowest)
            most = 1e9 / made.stages[made.slowest]
            text += f"; the slowest stage is {made.slowest} ({host}): {_rate(most)} steps/s at most"
        found.append(f"{text}; costs of links are assumed")
    return found


def _rate(per_second: float) -> str:
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _rank_row(rank: RankPlan) -> tuple[str, ...]:
    layers = ""
    if rank.layers is not None:
        first, last = rank.layers
        layers = f"{first}-{last - 1} ({last - first})"
    return (
        str(rank.rank),
        rank.host,
        str(rank.node_rank),
        str(rank.stage),
        str(rank.tp_index),
        ranges(rank.cores),
        layers,
        "" if rank.weights is None else gib(rank.weights),
        gib(rank.kv) if rank.kv_used == rank.kv else f"{gib(rank.kv_used)} of {gib(rank.kv)}",
        "" if rank.time_ns is None else milliseconds(rank.time_ns),
    )


def _commands(page: Page, commands: Sequence[RankCommand]) -> None:
    page.heading("Commands")
    for command in commands:
        page.line(f"  vLLM node {command.node_rank} on {command.host}:", "bold")
        for text in environment_lines({**shown_env(command), **command.site_env}):
            page.line(f"    {text} \\")
        words = _by_flag(shown_argv(command.argv))
        for index, text in enumerate(words):
            more = " \\" if index < len(words) - 1 else ""
            page.line(f"    {'  ' if index else ''}{text}{more}")
    if commands:
        _environment_notes(page, commands)


def _environment_notes(page: Page, commands: Sequence[RankCommand]) -> None:
    page.prose("{site}: the folder that the agent makes for the run", style="dim")
    sources = {f"{name} from {source}" for command in commands for name, source in command.secrets.items()}
    if sources:
        page.prose(f"the launcher reads these secrets: {', '.join(sorted(sources))}", style="dim")
    kept = " ".join(commands[0].keep_env)
    page.prose(f"of each host's own environment, these alone reach vLLM, where they are set: {kept}", style="dim")


def _by_flag(argv: Sequence[str]) -> list[str]:
    """The command's start, then one flag with its values a line."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and len(lines[0]) > 1:
            lines.append([])
        lines[-1].append(_word(word))
    return [" ".join(line) for line in lines]


def _word(word: str) -> str:
    return word if word == SHOWN or word.endswith(f"={SHOWN}") else quote(word)


def _notes(page: Page, plan: Plan) -> None:
    if plan.warnings:
        page.heading("Warnings")
        for text in plan.warnings:
            page.prose(text, hang="! ", style="yellow")
    if plan.assumed:
        page.heading("Assumed, not observed")
        for text in plan.assumed:
            page.prose(text, hang="? ", style="magenta")


def _tiles_text(plan: Plan) -> str:
    most = max(rank.tiles for rank in plan.ranks)
    hosts = dict.fromkeys(rank.host for rank in plan.ranks if rank.tiles)
    where = "" if len(hosts) == len(plan.hosts) else f" on {' and '.join(hosts)}"
    return f"for short steps on AMX linear weights are held a second time{where}: at most {gib(most)} a rank"


def plan_data(plan: Plan, commands: Sequence[RankCommand]) -> dict[str, Any]:
    """The plan as JSON values. Exact, but for values of secrets."""
    return {
        "name": plan.name,
        "model": {
            "path": plan.model,
            "served_name": plan.served_name,
            "facts": None if plan.model_facts is None else asdict(plan.model_facts),
        },
        "parallel": {"pipeline": plan.pipeline, "tensor": plan.tensor},
        "communicator": plan.communicator,
        "micro_batches": plan.micro_batches,
        "packed_weights": plan.packed_weights,
        "head": plan.head,
        "master": {"address": plan.master_addr, "port": plan.master_port},
        "serve": {"host": plan.serve_host, "port": plan.serve_port},
        "hosts": [_host_data(plan, host.name) for host in plan.hosts],
        "machines": [list(machine) for machine in plan.machines],
        "nodes": [_node_data(node) for node in plan.nodes],
        "ranks": [_rank_data(rank) for rank in plan.ranks],
        "groups": groups_data(plan.groups, plan.details),
        "commands": [_command_data(command) for command in commands],
        "parallel_reason": plan.parallel_reason,
        "layers_reason": plan.layers_reason,
        "kv": _kv_data(plan),
        "kv_reason": plan.kv.reason,
        "prediction": _prediction_data(plan.prediction),
        "warnings": list(plan.warnings),
        "assumed": list(plan.assumed),
    }


def _host_data(plan: Plan, name: str) -> dict[str, Any]:
    host = next(h for h in plan.hosts if h.name == name)
    endpoint = next(node.endpoint for node in plan.nodes if node.host == name)
    return {
        "name": host.name,
        "ssh": host.ssh,
        "local": host.local,
        "address": endpoint.address,
        "interface": endpoint.interface,
        "address_reason": endpoint.reason,
        "python": host.python,
        "vllm": host.vllm,
        "preload": list(host.preload),
    }


def _node_data(node: NodePlan) -> dict[str, Any]:
    return {"node_rank": node.node_rank, "host": node.host, "ranks": list(node.ranks)}


def _kv_data(plan: Plan) -> dict[str, Any]:
    kv = plan.kv
    return {
        "tokens": kv.tokens,
        "sequences": kv.sequences,
        "limiting_stage": kv.limit,
        "largest_context": kv.largest_context,
    }


def _prediction_data(made: Prediction | None) -> dict[str, Any] | None:
    if made is None:
        return None
    return {
        "tokens_per_s": round(made.tokens_per_s, 3),
        "link_share": round(made.link_share, 4),
        "slowest_stage": made.slowest,
        "stages_ms": [round(time / 1e6, 3) for time in made.stages],
        "hops_ms": [round(time / 1e6, 3) for time in made.hops],
        "assumed": ["cost of a hop and of an all-reduce", "cost of a layer beside its bytes"],
    }


def _rank_data(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host,
        "node_rank": rank.node_rank,
        "local_rank": rank.local_rank,
        "stage": rank.stage,
        "tp_index": rank.tp_index,
        "cores": list(rank.cores),
        "layers": None if rank.layers is None else list(rank.layers),
        "weights_bytes": rank.weights,
        "kv_bytes": rank.kv,
        "kv_used_bytes": rank.kv_used,
        "tiles_bytes": rank.tiles,
        "time_ms": None if rank.time_ns is None else round(rank.time_ns / 1e6, 3),
    }


def _command_data(command: RankCommand) -> dict[str, Any]:
    return {
        "host": command.host,
        "node_rank": command.node_rank,
        "argv": list(shown_argv(command.argv)),
        "env": shown_env(command),
        "site_env": dict(command.site_env),
        "secrets": dict(command.secrets),
        "keep_env": list(command.keep_env),
        "drop_env": list(command.drop_env),
    }


def milliseconds(nanoseconds: int) -> str:
    """Three significant digits."""
    value = nanoseconds / 1e6
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def quote(text: str) -> str:
    """Quote for bash, on one line: control characters as $'...'."""
    if not re.search(r"[\x00-\x1f\x7f]", text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + re.sub(r"[\x00-\x1f\x7f]", lambda m: _ESCAPES.get(m[0], f"\\x{ord(m[0]):02x}"), escaped) + "'"


_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def environment_lines(env: Mapping[str, str]) -> list[str]:
    """`NAME=value` lines, quoted."""
    return [f"{name}={_word(value)}" for name, value in sorted(env.items())]
