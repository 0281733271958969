"""Run folders are 0700 and their files 0600, whatever the umask is; secrets are hidden in all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpupp.errors import CpuppError
from cpupp.launch.logs import open_logs
from cpupp.launch.records import RunRecord
from cpupp.rank.agent_mask import SHOWN, Mask

TOKEN = "hf_0123456789"


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in folder.rglob("*")}


def test_a_run_is_private(umask: int, tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "state" / "runs" / "run")
    record.write("plan.json", {"a": 1})
    record.event("Begin")
    for log in open_logs(record.logs, {0: "a"}).values():
        log.feed("hello\n")
        log.close()
    record.close()
    found = modes(tmp_path)
    folders = {"state", "state/runs", "state/runs/run", "state/runs/run/logs"}
    assert {name for name, mode in found.items() if mode == 0o700} == folders
    assert {mode for name, mode in found.items() if name not in folders} == {0o600}
    assert len(found) == len(folders) + 3


def test_a_folder_that_others_could_read_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(0o755)
    (folder / "events.ndjson").touch(0o644)
    RunRecord(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert modes(folder) == {"events.ndjson": 0o600}


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path) -> None:
    mask = Mask([TOKEN])
    record = RunRecord(tmp_path / "run", mask)
    record.write("result.json", {"lines": [f"said {TOKEN}"]})
    record.write("spec.yaml", f"token: {TOKEN}\n")
    record.event("Logged", line=f"said {TOKEN}")
    log = open_logs(record.logs, {0: "a"}, mask)[0]
    lines = [line for piece in ("said hf_01", "234", f"56789\n{TOKEN[:-1]}") for line in log.feed(piece)]
    log.close()
    record.close()
    assert lines == [f"said {SHOWN}"]
    assert log.tail() == (f"said {SHOWN}", SHOWN)
    texts = {path.name: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert texts["node-0-a.log"] == f"said {SHOWN}\n{SHOWN}"
    assert len(texts) == 4
    assert all(SHOWN in text and TOKEN[:-1] not in text for text in texts.values())


def test_what_cannot_be_written_is_told_once_or_ends_a_start(tmp_path: Path) -> None:
    told: list[str] = []
    record = RunRecord(tmp_path, tell=told.append)
    (tmp_path / "a.json.new").mkdir()  # as a full disk
    record.write("a.json", 1)
    record.write("a.json", 2)
    assert [text.partition(",")[0] for text in told] == ["the record of this run cannot be written"]
    with pytest.raises(CpuppError, match="the run's folder cannot be written: Is a directory") as caught:
        record.write("a.json", 3, must=True)
    assert caught.value.code == "STATE-FOLDER"
    record.close()
