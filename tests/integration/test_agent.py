"""The agent's operations on this machine, with a scripted Python child in the place of vLLM."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cpupp.errors import CpuppError
from cpupp.launch.transport import LocalTransport
from cpupp.rank import agent_net, agent_site
from tests.integration.agent_bench import Bench, shm, unique, wait_dead, wait_until
from tests.testbed import processes


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench() as made:
        yield made


def test_a_node_runs_and_ends_in_order(bench: Bench) -> None:
    pid = bench.start("print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)")
    bench.wait_event("gone")
    kinds = [event["event"] for event in bench.events]
    assert kinds[0] == "spawned"
    assert kinds[-2:] == ["exited", "gone"]
    assert bench.wait_event("spawned") == {"event": "spawned", "node": 0, "pid": pid}
    assert bench.wait_event("exited") == {"event": "exited", "node": 0, "code": 3, "stopped": False}
    assert bench.output() == "out\nerr\n"
    answer = bench.session.request("stop")
    assert answer == {"stuck": [], "site_removed": True}
    assert not bench.site.exists()


def test_a_signal_is_a_negative_code(bench: Bench) -> None:
    bench.start("os.kill(os.getpid(), signal.SIGSEGV)")
    assert bench.wait_event("exited")["code"] == -signal.SIGSEGV


NASTY = {
    "SPACES": "  two  words ",
    "QUOTES": """it's "quoted" `back` """,
    "DOLLAR": "$HOME ${PATH} $(id) !!",
    "PIPE": "0-1|2-3; rm -rf x & y > z",
    "LINES": "one\ntwo\r\n\tthree\n",
    "EMPTY": "",
    "BRACES": "{site} {0} %s",
    "UNICODE": "größe 名前 \udcff\udcfe",
    "BACKSLASH": "\\n \\\\ \\",
}


def test_environment_and_arguments_arrive_byte_for_byte(bench: Bench) -> None:
    bench.prepare()
    code = (
        "import os,sys;os.write(1,repr((sorted(os.environb.items()),[os.fsencode(a) for a in sys.argv[1:]])).encode())"
    )
    argv = [sys.executable, "-c", code, *NASTY.values()]
    bench.session.request("start", node=0, argv=argv, env=NASTY)
    bench.wait_event("gone")
    environment, arguments = eval(bench.output())
    wanted = {name.encode(): value.encode("utf-8", "surrogateescape") for name, value in NASTY.items()}
    assert {name: value for name, value in environment if name in wanted} == wanted
    assert arguments == list(wanted.values())


def test_only_site_values_know_the_site_and_prefixes_are_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    del bench
    monkeypatch.setenv("VLLM_STRAY", "1")
    monkeypatch.setenv("LD_PRELOADED_NOT", "1")
    monkeypatch.setenv("KEPT_BY_HOST", "yes")
    with Bench() as fresh:
        site = fresh.prepare(files={"pkg/inner/x.py": "print('hé')\n"})
        fresh.start(
            """
            names = ("VLLM_STRAY", "LD_PRELOADED_NOT", "KEPT_BY_HOST", "TMPDIR", "USER_VALUE")
            print([os.environ.get(name) for name in names])
            """,
            drop_env=["VLLM_", "LD_PRELOAD"],
            env={"USER_VALUE": "{site}"},
            site_env={"TMPDIR": "{site}/tmp:{site}"},
        )
        fresh.wait_event("gone")
        assert eval(fresh.output()) == [None, None, "yes", f"{site}/tmp:{site}", "{site}"]
        assert (site / "pkg/inner/x.py").read_text(encoding="utf-8") == "print('hé')\n"


def test_the_site_folder_is_private_and_short_enough_for_sockets(bench: Bench) -> None:
    site = bench.prepare()
    assert stat.S_IMODE(site.stat().st_mode) == 0o700
    assert stat.S_IMODE(site.parent.stat().st_mode) == 0o700
    assert (site / "tmp").is_dir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(site / "rpc" / "01234567-89ab-cdef-0123-456789abcdef"))


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "a//b", ""])
def test_files_stay_inside_the_site(bench: Bench, name: str) -> None:
    with pytest.raises(CpuppError, match="leaves the site folder"):
        bench.prepare(files={name: "x"})


def test_places_that_hold_no_site_after_all_are_not_left(bench: Bench) -> None:
    before = {place for place in agent_site.places() if Path(place).exists()}
    with pytest.raises(CpuppError):
        bench.prepare(files={"../x": "x"})
    assert {place for place in agent_site.places() if Path(place).exists()} <= before


def test_a_symlink_or_a_foreign_folder_holds_no_site(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    (home / ".cache" / "cpupp").symlink_to(tmp_path)
    with Bench(LocalTransport(env={**os.environ, "HOME": str(home)})) as bench:
        site = bench.prepare()
        assert not site.is_relative_to(home)
        assert list(tmp_path.iterdir()) == [home]


def test_what_a_crashed_agent_left_is_swept_by_the_next(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path)}
    with Bench(LocalTransport(env=environment)) as first:
        site = first.prepare()
        name = f"cpupp-nonce-{unique('x')}"
        first.session.request(
            "probe", name="a", engine_python="python3", model_path="/x", nonce={"name": name, "value": "v"}
        )
        with Bench(LocalTransport(env=environment)) as other:
            other.session.request("ping")
            assert site.exists()
            assert shm(name).exists()
        os.kill(first.agent, signal.SIGKILL)
        first.wait_event("lost")
        assert site.exists()
        with Bench(LocalTransport(env=environment)):
            wait_until(lambda: not site.exists() and not shm(name).exists(), "the sweep")


def test_half_a_character_and_bytes_that_are_no_text_survive(bench: Bench) -> None:
    bench.start("""
        for piece in (b"\\xe5\\x90", b"\\x8d\\xff\\n", b"\\xe5"):
            os.write(1, piece)
            time.sleep(0.3)
    """)
    bench.wait_event("gone")
    assert bench.output().encode("utf-8", "surrogateescape") == b"\xe5\x90\x8d\xff\n\xe5"
    assert "名" in bench.output()


def test_reports_are_passed_on_line_by_line(bench: Bench) -> None:
    bench.prepare()
    bench.start(
        """
        file = open(os.environ["REPORTS"], "a", buffering=1)
        file.write('{"report": 1}\\n{"rep')
        file.flush(); time.sleep(0.3)
        file.write('ort": 2}\\n')
        """,
        reports="{site}/reports-7.ndjson",
        site_env={"REPORTS": "{site}/reports-7.ndjson"},
    )
    bench.wait_event("gone")
    assert [event["line"] for event in bench.events if event["event"] == "report"] == ['{"report": 1}', '{"report": 2}']


def test_ten_megabytes_on_stderr_arrive_whole(bench: Bench) -> None:
    bench.start("for i in range(160): os.write(2, (b'%05d' % i) * 13107 + b'\\n')")
    bench.wait_event("gone", timeout=60)
    lines = bench.output().splitlines()
    assert [line[:5] for line in lines] == [f"{i:05d}" for i in range(160)]
    assert all(len(line) == 5 * 13107 for line in lines)


def test_a_launcher_that_does_not_read_stalls_neither_ranks_nor_the_stop() -> None:
    held = threading.Event()
    with Bench() as bench:
        seen = bench.session.on_event
        done = bench.prepare() / "done"

        def slow(host: str, event: dict[str, object]) -> None:
            if event["event"] == "output":
                held.wait(60)
            seen(host, event)

        bench.session.on_event = slow
        bench.start(f"os.write(2, b'x' * (10 << 20)); open({str(done)!r}, 'w').close(); time.sleep(600)")
        wait_until(done.exists, "the burst is written")
        pid = processes.descendants(bench.agent)
        threading.Timer(1.0, os.kill, (bench.agent, signal.SIGTERM)).start()
        wait_dead(bench.agent, *pid)
        assert not bench.site.exists()
        held.set()


def test_a_program_that_cannot_run_is_an_error_in_its_own_words(bench: Bench) -> None:
    bench.prepare()
    with pytest.raises(CpuppError, match=r"No such file or directory: b?'/nonexistent/python'") as caught:
        bench.session.request("start", node=0, argv=["/nonexistent/python", "x"])
    assert caught.value.code == "START-FAILED"
    with pytest.raises(CpuppError, match="Permission denied"):
        bench.session.request("start", node=0, argv=["/etc/passwd"])
    bench.start("print('then it works')")
    bench.wait_event("gone")


def test_the_home_of_argv0_is_expanded(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_text("#!/bin/sh\necho from home $1\n", encoding="utf-8")
    program.chmod(0o755)
    with Bench(LocalTransport(env={**os.environ, "HOME": str(tmp_path)})) as bench:
        bench.prepare()
        bench.session.request("start", node=0, argv=["~/tool", "~"])
        bench.wait_event("gone")
        assert bench.output() == "from home ~\n"


def test_cores_bind_the_node_alone(bench: Bench) -> None:
    core = max(os.sched_getaffinity(0))
    bench.start("print(os.sched_getaffinity(0))", cores=[core])
    bench.wait_event("gone")
    assert bench.output() == f"{{{core}}}\n"
    assert os.sched_getaffinity(bench.agent) == os.sched_getaffinity(0)


def test_two_nodes_and_a_second_attempt(bench: Bench) -> None:
    first = bench.prepare()
    pids = [bench.start(f"print('node {n}', flush=True); time.sleep(600)", node=n) for n in range(2)]
    wait_until(lambda: bench.output(0) == "node 0\n" and bench.output(1) == "node 1\n", "both speak")
    with pytest.raises(CpuppError, match="was started already"):
        bench.start("pass", node=1)
    with pytest.raises(CpuppError, match="still run here"):
        bench.prepare()
    bench.session.request("stop", grace=5)
    wait_dead(*pids)
    assert not first.exists()
    assert {event["node"]: event["stopped"] for event in bench.events if event["event"] == "exited"} == {
        0: True,
        1: True,
    }
    bench.events.clear()
    assert bench.prepare() != first
    bench.start("print('again')", node=1)
    bench.wait_event("gone", node=1)
    assert bench.output(1) == "again\n"


def test_attempts_follow_each_other_at_once_and_cost_no_descriptor(bench: Bench) -> None:
    def attempt() -> None:
        bench.prepare()
        bench.start("pass")
        bench.wait_event("gone")
        bench.events.clear()

    def descriptors() -> int:
        return len(list(Path(f"/proc/{bench.agent}/fd").iterdir()))

    attempt()
    before = descriptors()
    for _ in range(5):
        attempt()
    wait_until(lambda: descriptors() <= before, "the descriptors that it reads files by are closed")


def test_the_death_of_a_worker_is_told_while_the_node_lives(bench: Bench) -> None:
    bench.start("""
        worker = child("say('worker'); time.sleep(600)")
        time.sleep(600)
    """)
    worker = bench.pid_of("worker")
    wait_until(lambda: bool(processes.look(worker)), "the worker")
    threading.Event().wait(1.5)  # the keeper looks every second
    os.kill(worker, signal.SIGKILL)
    event = bench.wait_event("process_exited")
    assert event == {"event": "process_exited", "node": 0, "pid": worker, "code": -9}


class _Page(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        self.wfile.write(self.headers["X-Test"].encode() + b" " + body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_http_answers_any_status_and_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
    server = HTTPServer(("127.0.0.1", 0), _Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    ask: dict[str, Any] = {"method": "POST", "headers": {"X-Test": "header"}, "body": "größe"}
    try:
        with Bench() as bench:
            answer = bench.session.request("http", url=url + "/x", **ask)
            assert (answer["status"], answer["body"]) == (200, "header größe")
            answer = bench.session.request("http", url=url + "/missing", **ask)
            assert answer["status"] == 404
            with pytest.raises(CpuppError, match="refused") as caught:
                bench.session.request("http", method="GET", url="http://127.0.0.1:1/health")
            assert caught.value.code == "HTTP-FAILED"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_unknown_operation_lists_the_known(bench: Bench) -> None:
    with pytest.raises(CpuppError, match="unknown operation 'fly'; known: ping"):
        bench.session.request("fly")
    with pytest.raises(CpuppError, match="start before prepare"):
        bench.session.request("start", node=0, argv=["x"])


def test_many_requests_in_flight(bench: Bench) -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(20):
                bench.session.request("routes", targets={"me": "127.0.0.1"})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_the_tail_of_the_output(bench: Bench) -> None:
    bench.start("print('a' * 100, flush=True); print('end', flush=True); time.sleep(600)")
    wait_until(lambda: "end" in bench.output(), "output")
    assert bench.session.request("tail", node=0, size=4) == "end\n"


def test_another_process_on_our_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as ours:
        port = ours.getsockname()[1]
        assert agent_net.stranger(port, [os.getpid()]) == ""
        assert agent_net.stranger(port, []).startswith(f"pid {os.getpid()} (")
        listen = (
            f"import socket, sys; s = socket.create_server(('127.0.0.1', {port}), reuse_port=True); "
            "print('up', flush=True); sys.stdin.read()"
        )
        with subprocess.Popen([sys.executable, "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"up\n"
            assert agent_net.stranger(port, [os.getpid()]).startswith(f"pid {other.pid} (")
            assert agent_net.stranger(port, [os.getpid(), other.pid]) == ""
            other.communicate()
        assert agent_net.stranger(port, [os.getpid()]) == ""
    assert agent_net.stranger(port, []) == ""


def test_a_port_that_a_rank_has_is_told_with_its_run(bench: Bench) -> None:
    site = bench.prepare("brave-owl")
    bench.start(
        """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        os.write(1, f"port={server.getsockname()[1]}\\n".encode())
        time.sleep(600)
        """,
        site_env={"PYTHONPATH": str(site)},
    )
    port = bench.pid_of("port")
    (found,) = agent_net.check_ports([port])
    assert not found["free"]
    assert found["holder"].endswith(" of cpupp's run brave-owl")
