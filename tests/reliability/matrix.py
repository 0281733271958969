"""Every fault, on head and follower, before ready, while serving, and while no launcher is there."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.integration.fault_cases import FAULTS, cut, drop, mend
from tests.integration.faults import LEASH_S, Fault, Outcome, make_lanes, play_all, send, signal_launcher
from tests.reliability.alone import ALONE
from tests.reliability.away import AWAY
from tests.testbed.bed import HostOptions, hosts

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}
CODES = {
    "agent": "HOST-LOST",
    "keeper": "KEEPER-LOST",
    "main": "RANK-SIGNAL",
    "core": "RANK-EXIT|RANK-DIED",
    "worker": "RANK-DIED|RANK-EXIT",
}
WHEN = ("starting", "serving", "detached")


def whole_matrix() -> list[Fault]:
    """The short part, and every process on every host at every time."""
    faults = {
        fault.name: fault for fault in [*FAULTS, *AWAY, *ALONE, *_signals(), *_sessions(), *_launchers(), *_links()]
    }
    return list(faults.values())


def _signals() -> Iterator[Fault]:
    for when in WHEN:
        for role, code in CODES.items():
            for index in (0, 1) if role != "core" else (0,):
                for name, number in SIGNALS.items():
                    stopped, detached = number == signal.SIGSTOP, when == "detached"
                    wanted = "RANK-HALTED" if stopped and role in ("main", "core", "worker") else code
                    yield Fault(
                        name=f"{when}: {name} of {role} on {('head', 'follower')[index]}",
                        at=when,
                        strike=send(role, index, number),
                        host=index,
                        code=_detached(wanted) if detached else wanted,
                        exit_code=0 if detached else 1,
                    )


def _sessions() -> Iterator[Fault]:
    for when in ("starting", "serving"):
        for index, host in enumerate(("head", "follower")):
            strike = send("session", index, signal.SIGKILL)
            name = f"{when}: SIGKILL of sshd's session on {host}"
            yield Fault(name=name, at=when, strike=strike, host=index, code="HOST-LOST")


def _detached(code: str) -> str:
    # The loss of an agent is seen by the others only, and a run that is down is told by what its hosts kept.
    return {"HOST-LOST": "PEER-LOST|HOST-LOST"}.get(code, f"{code}|PEER-LOST")


def _launchers() -> Iterator[Fault]:
    for when in ("starting", "serving"):
        for name, number in (("SIGKILL", signal.SIGKILL), ("SIGSEGV", signal.SIGSEGV)):
            yield Fault(
                name=f"{when}: {name} of launcher", at=when, strike=signal_launcher(number), exit_code=-int(number)
            )
        for name, number in (("SIGINT", signal.SIGINT), ("SIGTERM", signal.SIGTERM)):
            yield Fault(
                name=f"{when}: {name} of launcher", at=when, strike=signal_launcher(number), exit_code=128 + int(number)
            )


def _links() -> Iterator[Fault]:
    for when in WHEN:
        for index, host in enumerate(("head", "follower")):
            for name, strike in (("interface down", cut(index)), ("packets dropped", drop(index))):
                detached = when == "detached"
                yield Fault(
                    name=f"{when}: {name} on {host}",
                    at=when,
                    strike=strike,
                    repair=mend,
                    host=None if detached else index,
                    code=None if detached else "HOST-LOST",
                    exit_code=0 if detached else 1,
                    bound_s=LEASH_S,
                )


def run_matrix(folder: Path, only: Sequence[str], num_lanes: int) -> tuple[list[str], int]:
    """Play the matrix (or the faults whose names contain one of `only`); return table lines and how many went wrong."""
    faults = [fault for fault in whole_matrix() if not only or any(word in fault.name for word in only)]
    done: list[str] = []

    def tell(fault: Fault, outcome: Outcome) -> None:
        done.append(fault.name)
        state = "ok" if not outcome.wrong else "WRONG: " + "\n".join(outcome.wrong)
        print(f"{len(done)}/{len(faults)} {fault.name}: down after {outcome.down_s:.1f} s: {state}", flush=True)

    with hosts(2 * num_lanes + 1, every=HostOptions(shm_size="16m")) as bed:
        outcomes = play_all(faults, make_lanes(folder, bed), folder / "runs", tell)
    lines = ["| fault | down after | bound | exit | first failure | |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [_row(fault, outcomes[fault.name]) for fault in faults]
    return lines, sum(bool(outcome.wrong) for outcome in outcomes.values())


def _row(fault: Fault, outcome: Outcome) -> str:
    first = outcome.first
    where = f"{first.get('code', '')} {_host(fault, first)}".strip() if first else "none"
    down, bound = f"{outcome.down_s:.1f} s", f"{fault.bound_s:g} s"
    return f"| {fault.name} | {down} | {bound} | {outcome.exit_code} | {where} | {'wrong' if outcome.wrong else ''} |"


def _host(fault: Fault, first: dict[str, object]) -> str:
    ranks = first.get("ranks")
    listed = ", ".join(map(str, ranks)) if isinstance(ranks, list) else ""
    place = "" if fault.host is None else f"on {('the head', 'the follower')[fault.host]}"
    return " ".join(filter(None, [place, f"(rank {listed})" if listed else ""]))
