"""Failures: what went wrong, in words, and which of several is the cause of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

_CONSEQUENCE = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|EngineDeadError|Engine core (proc|initialization)|"
    r"Socket closed|gloo|recvBytes|TCPStore|Worker proc .* died",
    re.IGNORECASE,
)
_RAISED = re.compile(r"(?:^|\]\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .*)$")
_WORKER_DIED = re.compile(r"Worker proc \S+?(?P<rank>\d+)? died unexpectedly \(exit code: (?P<code>-?\d+)\)")
_SIGNAL_MEANING = {
    signal.SIGKILL: "probably out of memory (see `dmesg` on that host)",
    signal.SIGILL: "illegal instruction: this build of vLLM does not fit the CPU",
    signal.SIGBUS: "bus error: /dev/shm is probably full",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong on one vLLM node or host. last_lines are its own log's, oldest first.

    host: empty when it is the launcher itself.
    """

    host: str
    node_rank: int | None
    ranks: tuple[int, ...]
    code: str
    message: str
    hint: str = ""
    last_lines: tuple[str, ...] = ()


def order_failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Put the cause first: who only tells of a lost peer, or just ended, comes after who tells more.

    Among equals the one that was heard of first stays first.
    """

    def weight(failure: Failure) -> int:
        if failure.code == "LAUNCHER-STOPPED":
            return -1
        if failure.code == "RANK-STOPPED":
            return 3
        if failure.code == "RANK-EXCEPTION":
            return 2 if _CONSEQUENCE.search(failure.message) else 0
        if failure.code in ("RANK-EXIT", "READY-COMPLETION", "ASK-FAILED"):
            return 2 if any(_CONSEQUENCE.search(line) for line in failure.last_lines[-8:]) else 1
        return 0

    return tuple(sorted(failures, key=weight))


def with_words(failure: Failure, tails: Mapping[int, tuple[str, ...]]) -> Failure:
    """The failure with its node's last lines, and with the exception itself where there is one."""
    lines = tails.get(failure.node_rank, ()) if failure.node_rank is not None else ()
    if failure.code == "RANK-EXCEPTION":
        raised = [match[1] for line in lines if (match := _RAISED.search(line))]
        if raised:
            failure = replace(failure, message=f"a worker raised {raised[0]}")
    return with_signal(replace(failure, last_lines=lines))


def with_signal(failure: Failure) -> Failure:
    """The failure with the way in which a worker ended, out of its node's last lines: only its parent learns that.

    The parent may end before anybody sees the worker missing. A worker that was killed is the cause all the same.
    """
    died = next(filter(None, map(_WORKER_DIED.search, failure.last_lines)), None)
    told = any(name.name in failure.message for name in signal.Signals)
    if died is None or told or failure.code not in ("RANK-EXIT", "RANK-DIED"):
        return failure
    how = f"a worker process {exit_text(int(died['code']))}"
    if failure.code == "RANK-DIED" or int(died["code"]) >= 0:
        return replace(failure, message=f"{failure.message}: {how}")
    ranks = tuple(rank for rank in failure.ranks if str(rank) == died["rank"]) or failure.ranks
    return replace(failure, code="RANK-DIED", ranks=ranks, message=f"{how}; its vLLM node {failure.message}")


def exit_text(code: int, why: str = "") -> str:
    """What an exit code of a vLLM node means, in words. why: the kernel's own, where it could be read."""
    if code >= 0:
        return f"exited with code {code}" + (" although nobody stopped it" if code == 0 else "")
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"killed by signal {-code}"
    meaning = why or _SIGNAL_MEANING.get(name)
    return f"killed by {name.name}" + (f": {meaning}" if meaning else "")
