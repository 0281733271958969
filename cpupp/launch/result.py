"""How a run ended, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cpupp.launch.api import Answer
from cpupp.plan.failures import Failure
from cpupp.plan.gang import State
from cpupp.plan.restart import Attempt
from cpupp.plan.start_times import StartStep, start_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How the run ended: outcome `ok`, `failed`, `not_ready`, `interrupted` or `detached` (it goes on).

    first_failure is the run's first one, of its first attempt, and the consequences are that attempt's; ready_seconds:
    since the launch, of the last attempt; run: its id; not_restarted: why the policy gave no further attempt; start:
    where the time until ready went, of the last attempt.
    """

    outcome: str
    exit_code: int
    first_failure: Failure | None
    consequences: tuple[Failure, ...]
    answer: Answer | None
    folder: Path
    ready_seconds: float | None
    leftovers: tuple[str, ...]
    run: str = ""
    attempts: tuple[Attempt, ...] = ()
    not_restarted: str = ""
    start: tuple[StartStep, ...] = ()


def run_result(
    state: State, *, run: str, answer: Answer | None, folder: Path, started: float, leftovers: tuple[str, ...]
) -> RunResult:
    """The result of a run whose policy is at its end. started: when it was launched, on the policy's clock."""
    failures: tuple[Failure, ...] = ()
    if state.outcome in ("failed", "not_ready"):
        failures = next((attempt.failures for attempt in state.attempts if attempt.failures), ())
    return RunResult(
        outcome=state.outcome,
        exit_code=state.exit_code,
        first_failure=failures[0] if failures else None,
        consequences=failures[1:],
        answer=answer,
        folder=folder,
        ready_seconds=None if state.ready_at is None else state.ready_at - started,
        leftovers=leftovers,
        run=run,
        attempts=state.attempts,
        not_restarted=state.not_restarted,
        start=start_steps(state, started if state.attempt == 1 else state.attempt_at),
    )
