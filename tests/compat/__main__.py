"""Run the two-host pipeline with several versions of vLLM: stock where stock is known to fail, then through cpupp.

    python -m tests.compat [VERSION...]         # as root; each version takes minutes and some GB of .cache/compat

A stock run must die of the very fault that plan/versions.py names. A run through cpupp must give, token for token, the
answers of the same version with pipeline 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.compat.engines import engine, model_for
from tests.e2e.runs import (
    PROMPTS,
    Engine,
    differences,
    greedy,
    launched,
    ssh_hosts,
    stock_answers,
    write_cluster,
)
from tests.testbed.bed import Bed, hosts

OURS = ("links", "fallback")
FAULTS = {
    "0.18.0": "module 'torch.distributed' has no attribute 'recv_tensor_dict'",
    "0.27.1": "assert self.intermediate_tensors is not None",
    "0.32.0": "assert self.intermediate_tensors is not None",
}
"""What kills the first request of a stock eager pipeline over two hosts (plan/versions.py says which fault it is)."""
NEEDS_SHM_OP = ("0.18.0",)
VERSIONS = ("0.18.0", "0.20.0", "0.27.1", "0.29.0", "0.32.0")
NUM_PROMPTS = 5
FAIL_S = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: what was started, what came of it, and whether that is as it should be."""

    version: str
    what: str
    found: str
    good: bool


def main(versions: Sequence[str]) -> int:
    """Run all versions, print a table, and return 1 if anything is not as it should be."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="cpupp-compat-", dir="/var/tmp") as name:
        for version in versions:
            for outcome in run_version(version, Path(name) / version):
                print(f"{outcome.version:8} {outcome.what:22} {outcome.found}", flush=True)
                outcomes.append(outcome)
    bad = [outcome for outcome in outcomes if not outcome.good]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} as they should be")
    return 1 if bad else 0


def run_version(version: str, folder: Path) -> Iterator[Outcome]:
    """All runs of one version, eager, on two test hosts over SSH."""
    folder.mkdir(parents=True)
    made, model = engine(version), model_for(version)
    (folder / "one").mkdir()
    want = stock_answers(folder / "one", model, eager=True, cores=(0,), port=8124, engine=made, num_prompts=NUM_PROMPTS)
    with hosts(2) as bed:
        if version in FAULTS:
            yield stock_dies(version, made, model, folder, bed)
        for mode in OURS:
            cluster = cluster_file(folder / mode, made, model, bed, mode)
            with launched(folder / mode, bed, cluster) as run:
                run.wait_for("ready")
                got = [greedy(bed[0].address, prompt) for prompt in PROMPTS[:NUM_PROMPTS]]
                run.stop()
            wrong = differences(got, want)
            found = "answers as with pipeline 1" if not wrong else f"other answers: {wrong[0]}"
            yield Outcome(version, f"cpupp, {mode}", found, not wrong)


def stock_dies(version: str, made: Engine, model: Path, folder: Path, bed: Bed) -> Outcome:
    """Stock communication over two hosts: the first request must meet the known fault."""
    fault = FAULTS[version]
    with launched(folder / "stock", bed, cluster_file(folder / "stock", made, model, bed, "stock")) as run:
        deadline = time.monotonic() + FAIL_S
        while run.process.poll() is None and not any(e["event"] == "ready" for e in run.events()):
            assert time.monotonic() < deadline, run.stderr[-3000:]
            time.sleep(0.5)
        code = run.stop()
    if any(fault in log for log in run.logs().values()):
        return Outcome(version, "stock", f"exit {code}: {fault}", code != 0)
    if version in NEEDS_SHM_OP and "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        return Outcome(
            version, "stock", "answers here: the AVX2 build has no SHM op, and only with it stock dies", True
        )
    return Outcome(version, "stock", f"exit {code}, but not of: {fault}", False)


def cluster_file(folder: Path, made: Engine, model: Path, bed: Bed, mode: str) -> Path:
    """The cluster file of one run, in a folder of its own."""
    folder.mkdir()
    keys = {"python": made.python, "communicator": mode}
    return write_cluster(folder / "c.yaml", model, ssh_hosts(bed), engine=keys)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    sys.exit(main(parser.parse_args().versions))
