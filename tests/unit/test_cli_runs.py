"""`ps`, `status`, `logs` and `stop` as commands, on records of runs that have ended: no host is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.hosts_of_runs import RUN
from tests.unit.test_cli import ROOT, envelope, run


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder with one run that failed."""
    folder = tmp_path / "cpupp" / "runs" / f"pair-{RUN}"
    (folder / "logs").mkdir(parents=True)
    values: dict[str, Any] = {
        "run": RUN,
        "name": "pair",
        "started": 1000.0,
        "launcher": {"pid": 1, "start": 0, "boot_id": "", "hostname": "h", "user": "me"},
        "detached": False,
        "hosts": [{"name": "a", "ssh": "me@127.0.0.1:1", "local": False}],
        "attempt": 1,
        "status": "failed",
        "url": "http://a:8000/v1",
        "served_name": "m",
    }
    (folder / "run.json").write_text(json.dumps(values))
    ranks = [{"rank": 0, "host": "a", "node_rank": 0, "stage": 0, "tp_index": 0}]
    (folder / "plan.json").write_text(json.dumps({"plan": {"ranks": ranks}}))
    failure = {"host": "a", "node_rank": 0, "ranks": [0], "code": "RANK-EXIT", "message": "exited with code 3"}
    (folder / "result.json").write_text(json.dumps({"outcome": "failed", "first_failure": failure, "leftovers": []}))
    (folder / "logs" / "node-0-a.log").write_bytes(b"first line\nsecond \xff\x1b[2J line\nlast")
    return tmp_path


def cpupp(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(*words, XDG_STATE_HOME=str(state))


def test_without_any_run(tmp_path: Path) -> None:
    done = cpupp(tmp_path, "ps")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no run lives\n")
    assert envelope(cpupp(tmp_path, "ps", "--json"))["data"] == {"runs": []}
    assert cpupp(tmp_path, "stop").returncode == 0
    for verb in ("status", "logs"):
        done = cpupp(tmp_path, verb)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no run is recorded here" in done.stderr


@pytest.mark.parametrize("words", [["ps"], ["status"], ["logs"], ["stop"], ["stop", "--all"]], ids=" ".join)
def test_records_that_cannot_be_read_are_not_no_records(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "cpupp").write_text("no folder")
    done = cpupp(tmp_path, *words)
    assert (done.returncode, done.stdout) == (3, "")
    assert "the records of runs cannot be read: Not a directory" in done.stderr
    cluster = tmp_path / "c.yaml"
    cluster.write_text("name: c\nmodel: {path: m, num_layers: 2}\nhosts:\n  - {name: a, local: true}\n")
    if words not in (["stop", "--all"], ["ps"]):  # a cluster file's hosts know their runs, too
        asked = cpupp(tmp_path, *words, str(cluster))
        assert "no run of cluster c is on its hosts" in asked.stderr or words == ["stop"]
        assert asked.returncode == (0 if words == ["stop"] else 2)


def test_a_run_that_is_not_known_lists_those_that_are(state: Path) -> None:
    done = cpupp(state, "status", "other")
    assert done.returncode == 2
    assert f"       {RUN}  pair  failed\n" in done.stderr
    assert "--file FILE" in done.stderr
    error = envelope(cpupp(state, "stop", "other", "--json"))["errors"][0]
    assert error["code"] == "RUN-UNKNOWN"


def test_a_failed_run_is_shown_from_its_record(state: Path) -> None:
    done = cpupp(state, "status")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"pair {RUN}: failed, started ")
    assert "error: rank 0 on a: exited with code 3\n" in done.stdout
    data = envelope(cpupp(state, "status", "pair", "--json"))
    assert (data["ok"], data["errors"][0]["code"], data["data"]["state"]) == (False, "RANK-EXIT", "failed")
    rank = data["data"]["ranks"][0]
    assert (rank["rank"], rank["alive"], rank["state"], rank["pid"]) == (0, False, "ended", None)
    assert cpupp(state, "ps").stdout == ""
    assert [found["run"] for found in envelope(cpupp(state, "ps", "--all", "--json"))["data"]["runs"]] == [RUN]


def test_stopping_what_has_ended_is_no_error(state: Path) -> None:
    done = cpupp(state, "stop", RUN[:9])
    assert (done.returncode, done.stdout) == (0, f"pair {RUN}: already failed\n")
    assert cpupp(state, "stop", "--all").stderr == "nothing to stop\n"


def test_what_a_failed_run_keeps_on_its_hosts_is_fetched_by_stop_all(state: Path) -> None:
    record = next(state.glob("cpupp/runs/*/run.json"))
    record.write_text(record.read_text().replace('"detached": false', '"detached": true'))
    done = cpupp(state, "stop", "--all")
    assert done.returncode == 5  # its host was asked, and is not there
    assert "nothing to stop" not in done.stderr


def test_a_run_that_cannot_even_be_tried_does_not_hide_the_others(state: Path) -> None:
    record = next(state.glob("cpupp/runs/*/run.json"))
    live = record.read_text().replace('"detached": false', '"detached": true')
    record.write_text(live)
    other = state / "cpupp" / "runs" / "other"
    other.mkdir()
    damaged = {**json.loads(live), "run": "1129-000000-dead", "hosts": []}
    (other / "run.json").write_text(json.dumps(damaged))
    done = cpupp(state, "stop", "--all", "--json")
    answer = envelope(done)
    assert [found["run"] for found in answer["data"]["runs"]] == [RUN]
    assert {error["code"] for error in answer["errors"]} == {"RUN-HOSTS", "HOST-UNREACHABLE"}
    assert not answer["ok"]
    assert "names no hosts" in cpupp(state, "stop", "--all").stderr


def test_logs_are_lines_for_people(state: Path) -> None:
    assert cpupp(state, "logs").stdout == "[a 0] first line\n[a 0] second \\udcff line\n[a 0] last\n"
    assert cpupp(state, "logs", "-f", "--grep", "^last").stdout == "[a 0] last\n"
    assert cpupp(state, "logs", "--rank", "7").returncode == 2
    assert cpupp(state, "logs", "--grep", "(").returncode == 2


def test_a_reader_that_goes_away_ends_the_log(state: Path) -> None:
    log = next(state.glob("cpupp/runs/*/logs/*.log"))
    log.write_bytes(b"x" * 100 + b"\n" + b"line\n" * 2_000_000)
    with subprocess.Popen(
        [sys.executable, "-m", "cpupp", "logs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={"XDG_STATE_HOME": str(state), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize("words", [["status", "--watch", "--json"], ["stop", "--all", "x"], ["logs", "--tail", "-1"]])
def test_what_makes_no_sense_together(state: Path, words: list[str]) -> None:
    done = cpupp(state, *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
