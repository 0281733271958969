"""The long reliability tests, as root; each writes its part of docs/reliability.md.

python -m tests.reliability matrix [--only WORD]...     # some 15 minutes
python -m tests.reliability cycles [--count 200]        # some 30 minutes
python -m tests.reliability many [--hosts 32]           # minutes
python -m tests.reliability soak [--minutes 20]         # real vLLM
python -m tests.reliability                             # all of it
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.reliability.cycles import run_cycles
from tests.reliability.many import run_many
from tests.reliability.matrix import run_matrix
from tests.reliability.page import load, machine, write_part, write_rows
from tests.reliability.soak import run_soak

PARTS = ("matrix", "cycles", "many", "soak")


def main() -> int:
    """Run the parts that are asked for; return 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all")
    parser.add_argument("--only", action="append", default=[], help="faults whose names contain this; their rows alone")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--lanes", type=int, default=3, help="pairs of hosts side by side")
    options = parser.parse_args()
    _compile_once()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="cpupp-reliability-", dir="/var/tmp") as name:
        folder = Path(name)
        for part in options.parts or PARTS:
            began = time.monotonic()
            if part == "matrix":
                lines, broken = run_matrix(folder / part, options.only, options.lanes)
            elif part == "cycles":
                lines, broken = run_cycles(folder / part, options.count, options.seed, options.lanes)
            elif part == "many":
                lines, broken = run_many(folder / part, options.hosts)
            else:
                lines, broken = run_soak(folder / part, options.minutes)
            print("\n".join(lines), f"\n{part}: {broken} wrong, {time.monotonic() - began:.0f} s", flush=True)
            wrong += broken
            if options.only:
                write_rows(lines)
            else:
                write_part(part, [*lines, "", load()])
                write_part("machine", [machine()])
    return int(wrong > 0)


def _compile_once() -> None:
    """Let Python keep compiled modules, as it does where cpupp is installed: hundreds of processes import them."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


if __name__ == "__main__":
    sys.exit(main())
