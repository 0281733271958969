"""Rank output on disk: whole, in parts, and honest about gaps."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpupp.launch.log_file import LogFile
from cpupp.launch.logs import NodeLog, attempt_folder
from cpupp.rank.agent_mask import Mask


def parts(path: Path) -> list[str]:
    """Names of the parts, in the order in which they were written."""
    closed = sorted(p.name for p in path.parent.iterdir() if p.name != path.name)
    return [*closed, path.name]


def whole(path: Path) -> bytes:
    """All that was written, in order."""
    return b"".join((path.parent / name).read_bytes() for name in parts(path))


def test_a_log_in_parts_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "node-0-a.log"
    log = LogFile(path, part_bytes=1000)
    lines = [b"line %d of many\n" % number for number in range(300)]
    for line in lines:
        log.write(line)
    log.close()
    assert parts(path) == ["node-0-a.001.log", "node-0-a.002.log", "node-0-a.003.log", "node-0-a.004.log", path.name]
    assert whole(path) == b"".join(lines)
    assert all((tmp_path / name).read_bytes().endswith(b"\n") for name in parts(path))
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in parts(path)} == {0o600}


def test_parts_are_counted_on_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "node-0-a.log"
    for number in range(3):
        log = LogFile(path, part_bytes=10)
        log.write(b"writer %d wrote this\n" % number)
        log.close()
    assert parts(path) == ["node-0-a.001.log", "node-0-a.002.log", "node-0-a.003.log", path.name]
    assert whole(path) == b"".join(b"writer %d wrote this\n" % number for number in range(3))


def test_a_line_without_end_does_not_keep_a_part_open(tmp_path: Path) -> None:
    path = tmp_path / "node-0-a.log"
    log = LogFile(path, part_bytes=100)
    for _ in range(50):
        log.write(b"xxxxxxxxxx")
    log.close()
    assert len(parts(path)) == 3
    assert whole(path) == b"x" * 500


@pytest.fixture
def file_limit() -> Iterator[int]:
    """The kernel takes no file beyond this size, as a full disk would not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
    yield 30
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_disk_did_not_take_is_said_in_its_place(tmp_path: Path, file_limit: int) -> None:
    path = tmp_path / "node-0-a.log"
    log = NodeLog(path)
    assert log.feed("twenty-five characters..\nanother line\n") == ["twenty-five characters..", "another line"]
    log.feed("and one more\n")
    assert log.error == "File too large"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    log.feed("here again\n")
    log.close()
    lost = len("twenty-five characters..\nanother line\nand one more\n") - file_limit
    note = f"[cpupp: {lost} bytes are missing here: File too large]"
    assert path.read_text() == f"twenty-five characters..\nanoth\n{note}\nhere again\n"
    assert log.error == ""


def test_a_gap_at_the_end_is_told_when_the_log_is_closed(tmp_path: Path, file_limit: int) -> None:
    path = tmp_path / "node-0-a.log"
    log = NodeLog(path)
    log.feed("twenty-five characters..\nanother line\n")
    # Room for a part of the note alone: it is taken back, and told later as a whole.
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit + 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    log.feed("and one more\n")
    assert path.read_text() == "twenty-five characters..\nanoth"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    log.close()
    lost = len("twenty-five characters..\nanother line\nand one more\n") - file_limit
    assert path.read_text().endswith(f"anoth\n[cpupp: {lost} bytes are missing here: File too large]\n")


def test_output_that_comes_after_the_end_goes_nowhere(tmp_path: Path) -> None:
    log = NodeLog(tmp_path / "node-0-a.log")
    log.close()
    assert log.feed("late\n") == ["late"]
    log.close()


def test_the_first_attempts_logs_stay_where_they_are(tmp_path: Path) -> None:
    assert attempt_folder(tmp_path, 1) == tmp_path
    assert attempt_folder(tmp_path, 2) == tmp_path / "attempt-2"


def test_how_far_a_log_is_behind_what_was_written(tmp_path: Path) -> None:
    log = NodeLog(tmp_path / "node-0-a.log", Mask(["hunter2hunter2"]))
    log.feed("a hunter2hunter2 z\n")
    log.close()
    assert log.shift == len("hunter2hunter2") - len("<secret>")
