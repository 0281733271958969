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
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.reliability.cycles import run_cycles
from tests.reliability.many import run_many
from tests.reliability.matrix import run_matrix
from tests.reliability.soak import run_soak
from tests.testbed.models import ROOT

PAGE = ROOT / "docs" / "reliability.md"
PARTS = ("matrix", "cycles", "many", "soak")


def main() -> int:
    """Run the parts that are asked for; return 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all")
    parser.add_argument("--only", action="append", default=[], help="faults whose names contain this; writes nothing")
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
            if not options.only:
                write_part(part, lines)
    return int(wrong > 0)


def _compile_once() -> None:
    """Let Python keep compiled modules, as it does where cpupp is installed: hundreds of processes import them."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def write_part(part: str, lines: list[str]) -> None:
    """Replace what stands between the page's markers of that part."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {part} -->\n).*?(<!-- /{part} -->)", re.DOTALL)
    assert pattern.search(text), f"{PAGE} has no markers of {part}"
    body = "\n".join(lines)
    PAGE.write_text(pattern.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
