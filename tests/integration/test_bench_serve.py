"""`cpupp bench serve` as users run it: two real sshd hosts, a scripted vLLM, the plain client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import assert_quiet
from tests.integration.test_runs import Place, place  # noqa: F401  # a fixture
from tests.testbed.models import ROOT

BRIEF = ("--concurrency", "1,3", "--output-tokens", "4", "--client", "auto")


def bench(place: Place, *words: str, code: int = 0) -> dict[str, Any]:  # noqa: F811
    """The envelope of the verb."""
    envelope: dict[str, Any] = json.loads(place.cpupp("bench", "serve", *words, "--json", code=code).stdout)
    return envelope


def test_a_run_that_serves_is_measured_and_lives_on(place: Place) -> None:  # noqa: F811
    run = place.detached("one")
    found = bench(place, *BRIEF)["data"]
    assert (found["client"], found["stream"], found["ratios"], found["starts"]) == ("plain", True, [], [])
    assert [(row["concurrency"], row["requests"], row["failed"]) for row in found["results"]] == [(1, 4, 0), (3, 6, 0)]
    for row in found["results"]:
        assert row["output_tokens_per_second"] == row["output_tokens_per_second_turns"][0] > 0
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p90"] <= row["ttft_ms"]["p99"]
        # Each request is one step here, and so is the one that warms up.
        assert [(s["rank"], s["stage"], s["host"], s["steps"]) for s in row["stages"]] == [
            (0, 0, "a", row["requests"] + 1),
            (1, 1, "b", row["requests"] + 1),
        ]
        for stage in row["stages"]:
            parts = [stage[name] for name in ("compute_ms", "wire_ms", "wait_ms", "idle_ms")]
            assert sum(parts) == pytest.approx(stage["step_ms"], abs=0.01)

    (error,) = bench(place, run, "--client", "vllm", code=3)["errors"]
    assert (error["code"], error["where"]) == ("BENCH-NO-CLIENT", "a")
    assert place.data("stop", run, "--grace", "0")["runs"][0]["state"] == "stopped", "it was alive until now"
    (error,) = bench(place, run, code=1)["errors"]
    assert error["code"] == "BENCH-NO-API"
    assert_quiet(place.bed)


def test_a_file_is_launched_and_by_hand_beside_it(place: Place) -> None:  # noqa: F811
    words = ("--against", "by-hand", "--rounds", "1", "--turns", "1", *BRIEF)
    found = bench(place, str(place.cluster("both")), *words)["data"]
    assert [(start["round"], start["side"]) for start in found["starts"]] == [
        (1, "cpupp"),
        (1, "by_hand"),
    ]
    assert all(start["ready_seconds"] > 0 and not start["error"] for start in found["starts"])
    assert [(row["side"], row["concurrency"]) for row in found["results"]] == [
        ("cpupp", 1),
        ("cpupp", 3),
        ("by_hand", 1),
        ("by_hand", 3),
    ]
    assert all(len(row["output_tokens_per_second_turns"]) == 1 for row in found["results"])
    assert [bool(row["stages"]) for row in found["results"]] == [True, True, False, False], "by hand nothing is ours"
    assert [(r["what"], r["concurrency"]) for r in found["ratios"] if r["what"] != "prefill"] == [
        ("ready", None),
        ("output", 1),
        ("output", 3),
    ]
    for ratio in found["ratios"]:
        assert ratio["ratio"] == pytest.approx(ratio["cpupp"] / ratio["by_hand"], abs=0.01)
    assert_quiet(place.bed)


@pytest.mark.parametrize("turns", [0, 2])
def test_ctrl_c_takes_the_server_down_and_shows_what_was_measured(place: Place, turns: int) -> None:  # noqa: F811
    name = f"cut{turns}"
    argv = [sys.executable, "-m", "cpupp", "bench", "serve", str(place.cluster(name)), "--json"]
    argv += ["--concurrency", "1", "--waves", "4" if turns else "1000", "--turns", "1000", "--client", "plain"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes, text=True, cwd=ROOT, env=place.env(name)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            if ("tokens/s" if turns else "ready after") in line:
                break
        time.sleep(0.5)  # in the middle of the load
        os.kill(process.pid, signal.SIGINT)
        envelope = json.loads(process.stdout.read())
        assert process.wait(60) == 130
    assert (envelope["ok"], [error["code"] for error in envelope["errors"]]) == (False, ["INTERRUPTED"])
    if turns:
        (row,) = envelope["data"]["results"]
        assert row["output_tokens_per_second"] > 0
    else:
        assert envelope["data"] is None
    assert_quiet(place.bed)
    (result,) = Path(place.folder / name / "cpupp" / "runs").glob("*/result.json")
    assert json.loads(result.read_text())["leftovers"] == []
