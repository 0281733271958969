"""The command as users run it: exit codes, the envelope alone on stdout, no traceback, nothing heavy imported."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cpupp
from tests.unit.test_config import FIVE_ERRORS, FIVE_MISTAKES, GOOD

ROOT = Path(cpupp.__file__).parents[1]


def run(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m cpupp`."""
    return subprocess.run(
        [sys.executable, "-m", "cpupp", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def envelope(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The envelope, which is all of stdout."""
    data = json.loads(done.stdout)
    assert list(data) == ["cpupp", "command", "ok", "data", "errors"]
    assert data["cpupp"] == 1
    assert isinstance(data, dict)
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a good and a bad cluster file."""
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "pair.yaml").write_text(FIVE_MISTAKES)
    return tmp_path


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cpupp {cpupp.__version__}\n", "")


def test_help_is_quick_and_names_the_verbs() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = run("--help")
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert done.returncode == 0
    for verb in ("launch", "plan", "doctor", "ps", "status", "logs", "stop", "bench"):
        assert f"  {verb} " in done.stdout
    assert spent < 0.35


def test_importing_the_command_loads_nothing_heavy() -> None:
    heavy = ("torch", "vllm", "paramiko", "pydantic", "yaml", "rich")
    code = f"import sys, cpupp.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "words",
    [["plan"], ["plan", "x", "y"], ["nonsense"], ["launch", "x", "--timeout", "soon"], ["plan", "x", "--nope"], []],
)
def test_usage_errors_are_two(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == "" or not words


def test_a_plan_on_stdout(folder: Path) -> None:
    done = run("plan", "good.yaml", "--offline", cwd=folder)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("cluster pair: pipeline 2 x tensor 1 = 2 ranks on 2 hosts, 2 vLLM nodes\n")
    assert "\x1b" not in done.stdout


def test_a_plan_as_json(folder: Path) -> None:
    done = run("plan", "good.yaml", "--offline", "--json", cwd=folder)
    data = envelope(done)
    assert (data["command"], data["ok"], data["errors"]) == ("plan", True, [])
    plan = data["data"]
    assert {"ranks", "groups", "commands", "warnings"} <= set(plan)
    assert set(plan["ranks"][0]) >= {"rank", "host", "node_rank", "local_rank", "stage", "tp_index", "cores", "layers"}
    assert set(plan["groups"][0]) == {"name", "kind", "ranks", "backend", "reason", "links", "memory", "stock"}
    assert set(plan["groups"][0]["links"][0]) == {"ranks", "transport", "reason"}
    assert set(plan["commands"][0]) >= {"host", "node_rank", "argv", "env"}


def test_five_mistakes_exit_three(folder: Path) -> None:
    for words in (
        ["plan", "pair.yaml"],
        ["plan", "pair.yaml", "--offline"],
        ["launch", "pair.yaml"],
        ["doctor", "pair.yaml"],
        ["bench", "comm", "pair.yaml"],
    ):
        done = run(*words, cwd=folder)
        assert (done.returncode, done.stdout, done.stderr) == (3, "", FIVE_ERRORS)


def test_five_mistakes_as_json(folder: Path) -> None:
    done = run("launch", "pair.yaml", "--json", cwd=folder)
    data = envelope(done)
    assert done.returncode == 3
    assert done.stderr == ""
    assert (data["command"], data["ok"], data["data"]) == ("launch", False, None)
    assert [error["where"] for error in data["errors"]] == [f"pair.yaml:{line}" for line in (4, 8, 9, 12, 13)]
    assert all(set(error) == {"code", "message", "where", "hint"} for error in data["errors"])


def test_no_such_file(tmp_path: Path) -> None:
    done = run("plan", "none.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "error: none.yaml: no such file\n  hint: give the path of a cluster file; examples/demo.yaml is the smallest\n"
    )


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "Traceback" in run("--debug", "plan", "none.yaml", cwd=tmp_path).stderr


def test_an_unreachable_host_is_five_and_named(folder: Path) -> None:
    text = GOOD.replace("me@10.0.0.1:22", "me@127.0.0.1:1").replace("me@10.0.0.2", "me@127.0.0.1:2")
    (folder / "far.yaml").write_text(text)
    done = run("plan", "far.yaml", cwd=folder)
    assert (done.returncode, done.stdout) == (5, "")
    assert "error: a: " in done.stderr
    assert "error: b: " in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_reports_an_unreachable_host_and_is_four(folder: Path) -> None:
    (folder / "far.yaml").write_text(
        GOOD.replace("me@10.0.0.1:22", "me@127.0.0.1:1").replace("10.0.0.2", "127.0.0.1:1")
    )
    done = run("doctor", "far.yaml", "--json", cwd=folder)
    data = envelope(done)
    assert (done.returncode, data["ok"]) == (4, False)
    findings = data["data"]["findings"]
    assert {f["host"] for f in findings if f["code"] == "HOST-REACH" and f["severity"] == "error"} == {"a", "b"}
    assert set(findings[0]) == {"code", "severity", "host", "title", "evidence", "cause", "fix"}
    assert data["data"]["groups"] == []  # nothing is known of them


def test_doctor_of_this_machine() -> None:
    done = run("doctor", "--json")
    data = envelope(done)
    assert done.returncode in (0, 4)  # an engine may be missing here
    assert {"HOST-REACH", "CPU", "MEMORY", "SHM"} <= {f["code"] for f in data["data"]["findings"]}
    assert "MODEL" not in {f["code"] for f in data["data"]["findings"]}


def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m cpupp plan good.yaml --offline | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_closed_stdout_is_no_error(folder: Path) -> None:
    command = f"exec 1>&-; {sys.executable} -m cpupp plan good.yaml --offline; echo $? >&2"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=folder, check=True, env=environment
    )
    assert done.stderr == "0\n"


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
def test_a_signal_while_connecting_ends_at_once(folder: Path, name: str, code: int) -> None:
    import signal
    import socket

    # A listener that never answers: the SSH banner does not come.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        text = GOOD.replace("me@10.0.0.1:22", f"me@127.0.0.1:{port}").replace("me@10.0.0.2", f"me@127.0.0.1:{port}")
        (folder / "silent.yaml").write_text(text)
        process = subprocess.Popen(
            [sys.executable, "-m", "cpupp", "launch", "silent.yaml"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        silent.settimeout(30)
        connection, _ = silent.accept()  # it is connecting now
        start = time.monotonic()
        process.send_signal(getattr(signal, f"SIG{name}"))
        stdout, stderr = process.communicate(timeout=30)
        connection.close()
    assert (process.returncode, stdout) == (code, "")
    assert stderr == f"error: interrupted by SIG{name}: nothing was started\n"
    assert time.monotonic() - start < 3


def test_an_interrupt_while_the_imports_run_leaves_no_traceback() -> None:
    code = "import sys\nfrom cpupp.__main__ import main\n"
    code += "class Stop:\n    def find_spec(*_):\n        raise KeyboardInterrupt\n"
    code += "sys.meta_path.insert(0, Stop)\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sixty_four_hosts_are_planned_within_a_second(tmp_path: Path) -> None:
    hosts = "".join(f"  - {{name: h{n}, ssh: me@10.1.0.{n + 1}}}\n" for n in range(64))
    head = "name: big\nmodel: {path: /models/x, num_layers: 128}\nparallel: {pipeline: 64}\nhosts:\n"
    (tmp_path / "big.yaml").write_text(head + hosts)
    # Compiled once, as what pip installs is: an environment may forbid Python to keep compiled modules.
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    # CPU time, which other work on the machine does not stretch as it stretches the wall clock; where two threads share
    # a core it still does, so the best of some counts.
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("plan", "big.yaml", "--offline", cwd=tmp_path, **kept)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0
        spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        if spent < 1.0:
            break
    assert spent < 1.0
    assert "64 ranks on 64 hosts" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 400


@pytest.mark.parametrize("words", [("--version",), ("plan", "--help"), ("plan", "examples/demo.yaml", "--offline")])
def test_output_that_a_full_disk_swallowed_is_no_success(words: tuple[str, ...]) -> None:
    argv = [sys.executable, "-m", "cpupp", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "stdout cannot be written to: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
