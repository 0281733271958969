"""docs/reliability.md: its parts between markers, the rows of its tables, and what was measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

from tests.testbed.fake_engine import VLLM
from tests.testbed.models import ROOT

PAGE = ROOT / "docs" / "reliability.md"


def write_part(part: str, lines: list[str]) -> None:
    """Replace what stands between the page's markers of that part."""
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {part} -->\n).*?(<!-- /{part} -->)", re.DOTALL)
    assert pattern.search(text), f"{PAGE} has no markers of {part}"
    body = "\n".join(lines)
    PAGE.write_text(pattern.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text), encoding="utf-8")


def write_rows(lines: list[str]) -> None:
    """Replace the rows of tables that begin with the same cell as one of `lines`."""
    new = {_first_cell(line): line for line in lines if line.startswith("| ") and "---" not in line}
    text = PAGE.read_text(encoding="utf-8").split("\n")
    PAGE.write_text("\n".join(new.get(_first_cell(line), line) for line in text), encoding="utf-8")


def _first_cell(line: str) -> str:
    return line.split("|")[1].strip() if line.startswith("| ") else ""


def load() -> str:
    """How busy the machine was, at the end of a part."""
    return f"Load average of the machine over the last 15 minutes: {os.getloadavg()[2]:.0f}, on {os.cpu_count()} CPUs."


def machine() -> str:
    """Machine and versions, in a sentence."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr.split(",")[0].strip()
    return (
        f"Measured on one machine of {os.cpu_count()} CPUs ({_cpu()}) and {memory:.0f} GiB, Linux "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}, {ssh}; scripted vLLM {VLLM}."
    )


def _cpu() -> str:
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return str(names[0]) if names else platform.machine()
