"""The split of a decode step: one line for people, values for the envelope."""

from __future__ import annotations

from typing import Any

from cpupp.plan.steps import StepSplit


def step_text(step: StepSplit) -> str:
    """`48.1 ms: 61 % compute, 1 % wire, 30 % waiting, 8 % engine`."""
    parts = (
        ("compute", step.compute_ms),
        ("wire", step.wire_ms),
        ("waiting", step.wait_ms),
        ("engine", step.idle_ms),
    )
    shares = ", ".join(f"{value / step.step_ms if step.step_ms else 0.0:.0%} {name}" for name, value in parts)
    return f"{step.step_ms:.1f} ms: {shares}"


def step_data(step: StepSplit | None) -> dict[str, Any] | None:
    """The split as JSON values."""
    if step is None:
        return None
    return {
        "steps": step.steps,
        **{name: round(getattr(step, name), 3) for name in ("batch", "step_ms")},
        **{name: round(getattr(step, name), 3) for name in ("compute_ms", "wire_ms", "wait_ms", "idle_ms")},
    }
