"""The agent's source: runs on any python3 >= 3.8 with nothing installed, and starts by one harmless shell text."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from cpupp.launch.bundle import START_AGENT, agent_payload
from tests.testbed.need import need_tool

FILES = sorted(Path("cpupp/rank").glob("agent*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_syntax_is_that_of_python_3_8(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= sys.stdlib_module_names
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").split(".")[0] in sys.stdlib_module_names


def test_the_payload_counts_its_bytes() -> None:
    length, _, text = agent_payload().partition(b"\n")
    assert int(length) == len(text)
    compile(text, "agent", "exec")


def test_the_shell_text_has_nothing_that_a_shell_would_read() -> None:
    assert not set(START_AGENT) & set("$!`\\*?~{}#&|<>\n")
    assert START_AGENT.count("'") == 2


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "csh", "tcsh", "ksh"])
def test_login_shells_start_it(shell: str) -> None:
    need_tool(shell)
    done = subprocess.run(
        [shell, "-c", START_AGENT], input=agent_payload(), capture_output=True, timeout=60, check=True
    )
    assert done.stdout.startswith(b'@cpupp {"event": "hello", "protocol": 1, "python": "3.')
    assert b"the launcher closed the connection" in done.stderr


def test_an_old_python_is_told_so() -> None:
    text = agent_payload().partition(b"\n")[2].replace(b"OLDEST = (3, 8)", b"OLDEST = (99, 0)")
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, timeout=60, check=False)
    assert done.returncode == 78
    assert b"cpupp needs python3 >= 3.8 on the host, " in done.stderr
