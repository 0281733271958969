"""The smallest changes that would make a model fit: computed by solving the partition again, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cpupp.plan.partition import Problem, Room, fits

MOST_HOSTS = 64
SMALLER_WEIGHTS = (
    (2, "8 bits a weight (an fp8 or int8 checkpoint)"),
    (4, "4 bits a weight (an AWQ or GPTQ checkpoint)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What did not fit.

    problem: with the KV cache of one sequence of `context` tokens, which `sequence` sizes for any number; most: tokens
    that the model itself can take; block: tokens of one block; hosts, stages: of every rank; beside: weights beside the
    layers (bytes) of the last stage now, of that stage when others follow, and of the last one then; can_shrink:
    whether most weights are stored in 16 bits or more.
    """

    problem: Problem
    context: int
    most: int
    block: int
    sequence: Callable[[int], tuple[int, ...]]
    hosts: Sequence[str]
    stages: Sequence[int]
    beside: tuple[int, int, int]
    can_shrink: bool


def remedies(fit: Fit) -> list[str]:
    """Every kind of change that helps by itself, each as small as it can be: tokens, hosts, dtype."""
    found = [_fewer_tokens(fit), _more_hosts(fit), _smaller_weights(fit)]
    return [text for text in found if text]


def _fewer_tokens(fit: Fit) -> str:
    def holds(blocks: int) -> bool:
        return fits(replace(fit.problem, kv=fit.sequence(blocks * fit.block)))

    low, high = 0, min(fit.context, fit.most) // fit.block
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    if low == 0:
        return ""
    return f"max_model_len {low * fit.block} instead of {fit.context}"


def _more_hosts(fit: Fit) -> str:
    """More hosts like the last one, at the end of the pipeline."""
    name = fit.hosts[-1]
    own = sorted({stage for stage, host in zip(fit.stages, fit.hosts, strict=True) if host == name})
    if any(host != name for stage, host in zip(fit.stages, fit.hosts, strict=True) if stage in own):
        return ""  # its tensor groups reach into other hosts
    if any(
        not set(own).isdisjoint(room.num_ranks) and not set(room.num_ranks) <= set(own) for room in fit.problem.rooms
    ):
        return ""  # it shares its memory with other hosts, and so would another one like it
    most = min(MOST_HOSTS, (len(fit.problem.read) - len(fit.problem.stages)) // len(own))
    low, high = 1, most + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(_longer(fit, own, middle)) else (middle + 1, high)
    if low > most:
        return ""
    pipeline = len(fit.problem.stages) + low * len(own)
    return f"{low} more host{'s' if low > 1 else ''} like {name} (pipeline: {pipeline})"


def _longer(fit: Fit, own: Sequence[int], num: int) -> Problem:
    """The problem with `num` hosts more that have the stages and rooms of the last one."""
    stages, rooms = list(fit.problem.stages), list(fit.problem.rooms)
    here = [room for room in rooms if set(room.num_ranks) <= set(own)]
    now, then, last = fit.beside
    plain = replace(stages[-1], fixed=stages[-1].fixed - now)
    stages[-1] = replace(plain, fixed=plain.fixed + then)
    for _ in range(num):
        shift = len(stages) - own[0]
        stages += [plain] * len(own)
        rooms += [Room(limit=r.limit, num_ranks={s + shift: n for s, n in r.num_ranks.items()}) for r in here]
    stages[-1] = replace(plain, fixed=plain.fixed + last)
    return replace(fit.problem, stages=tuple(stages), rooms=tuple(rooms))


def _smaller_weights(fit: Fit) -> str:
    if not fit.can_shrink:
        return ""
    for divisor, what in SMALLER_WEIGHTS:
        held = tuple(size // divisor for size in fit.problem.held)
        if fits(replace(fit.problem, held=held)):
            return what
    return ""
