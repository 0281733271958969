"""Logs that others write: parts that are closed meanwhile, records that hosts go on with, bytes that are no text."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from cpupp.errors import CpuppError
from cpupp.launch.run_find import Target
from cpupp.launch.run_logs import FileLog, LogStream, follow, log_streams, nodes_recorded
from cpupp.launch.run_tail import LogView
from cpupp.plan.loglines import merge, pattern
from cpupp.plan.runs import Run
from cpupp.plan.runstate import RunState
from tests.unit.hosts_of_runs import RUN, ScriptedHost, open_hosts


def record(tmp_path: Path, **more: object) -> Run:
    (tmp_path / "logs").mkdir(exist_ok=True)
    values = {"state": RunState.READY, "detached": True, "folder": str(tmp_path), **more}
    return Run(run=RUN, name="pair", **values)  # type: ignore[arg-type]  # values by name


def streams(run: Run, *hosts: ScriptedHost, ask_hosts: bool = True) -> list[LogStream]:
    nodes = {host.node: host.name for host in hosts}
    return log_streams(run, nodes, open_hosts(*hosts), attempt=1, ask_hosts=ask_hosts)


def test_parts_are_read_in_order_across_their_closing(tmp_path: Path) -> None:
    log = tmp_path / "node-0-a.log"
    (tmp_path / "node-0-a.001.log").write_bytes(b"one\n")
    log.write_bytes(b"two\n")
    files = FileLog(tmp_path, 0, "a")
    assert files.read() + files.read() + files.read() == b"one\ntwo\n"
    with log.open("ab") as writer:
        writer.write(b"three\n")
        log.rename(tmp_path / "node-0-a.002.log")
        writer.write(b"four\n")  # buffered until here
    log.write_bytes(b"five\n")
    assert b"".join(iter(files.read, b"")) == b"three\nfour\nfive\n"
    assert files.offset == len(b"one\ntwo\nthree\nfour\nfive\n")
    files.close()


def test_the_log_of_a_host_whose_name_begins_like_another() -> None:
    assert FileLog(Path("/nowhere"), 0, "a").read() == b""


def test_nodes_that_have_logs(tmp_path: Path) -> None:
    for name in ("node-1-b.log", "node-0-a.001.log", "node-0-a.log", "node-x.log", "other"):
        (tmp_path / name).touch()
    assert nodes_recorded(tmp_path) == {0: "a", 1: "b"}
    assert nodes_recorded(tmp_path / "none") == {}


def test_the_host_goes_on_where_the_record_ends_and_nothing_comes_twice(tmp_path: Path) -> None:
    run = record(tmp_path)
    host = ScriptedHost("a", 0, log="first\nzwölf\nthird\n".encode())
    path = tmp_path / "logs" / "node-0-a.log"
    path.write_bytes(host.log[:9])  # through the middle of a character
    (stream,) = streams(run, host)
    assert list(stream.history()) == ["first", "zwölf", "third"]
    host.log += b"fourth\n"
    assert list(stream.history()) == ["fourth"]
    path.write_bytes(host.log + b"fifth\n")  # `stop` fetched the rest, and the host forgot it
    host.site = None
    assert list(stream.history()) == ["fifth"]
    assert stream.ended
    stream.close()


def test_what_is_fetched_between_two_looks_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(tmp_path)
    host = ScriptedHost("a", 0, log=b"one\ntwo\n")
    path = tmp_path / "logs" / "node-0-a.log"
    path.write_bytes(b"one\n")
    (stream,) = streams(run, host)
    assert stream.lines() == ["one"]

    def fetched(**_: object) -> None:
        path.write_bytes(host.log)  # `stop` appends, then lets the host forget
        raise CpuppError("RUN-UNKNOWN", "no output of that run is kept here")

    monkeypatch.setattr(host, "_run_log", fetched)
    assert list(stream.history()) == ["two"]
    stream.close()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (stream,) = streams(record(tmp_path), ScriptedHost("a", 0, log=b"a\xff\x00b\x1b[31mred\x1b[0m\n" + b"x" * 20_000))
    first, *rest = [*stream.history(), *stream.rest()]
    assert first == "a\\udcff\x00bred"
    assert sum(map(len, rest)) == 20_000


def test_a_host_that_cannot_be_asked_leaves_the_others_and_is_named(tmp_path: Path) -> None:
    a, b = ScriptedHost("a", 0, log=b"here\n"), ScriptedHost("b", 1)
    b.down = True
    first, second = streams(record(tmp_path), a, b)
    assert (list(first.history()), list(second.history())) == (["here"], [])
    assert first.error is None
    assert second.error is not None
    assert second.error.where == "b"


def test_following_ends_with_the_run_and_has_the_last_line(tmp_path: Path) -> None:
    a, b = ScriptedHost("a", 0, log=b"a1\n"), ScriptedHost("b", 1, log=b"b1\n")
    got: list[tuple[int, str]] = []

    def write() -> None:
        time.sleep(0.4)
        a.log += b"a2\nlast words"
        a.end()
        b.end()

    writer = threading.Thread(target=write)
    writer.start()
    for index, lines in follow(streams(record(tmp_path), a, b), lambda: True):
        got += [(index, line) for line in lines]
    writer.join()
    assert sorted(got) == [(0, "a1"), (0, "a2"), (0, "last words"), (1, "b1")]


def test_lines_of_several_logs_in_the_order_of_their_times() -> None:
    one = ["starting", "INFO 11-30 10:00:01 [a.py:1] x", "  more of x", "INFO 11-30 10:00:05 [a.py:1] z"]
    two = ["(Worker pid=7) WARNING 11-30 10:00:03 [b.py:2] y", "(Worker pid=7) 2026-11-30T10:00:06,123 end"]
    assert [line for _, line in merge([one, two])] == [one[0], one[1], one[2], two[0], one[3], two[1]]
    assert [index for index, _ in merge([["b", "a"], ["c"]])] == [0, 0, 1]
    back = ["11-30 10:00:09 late", "11-30 10:00:01 early, but written later"]
    assert [line for _, line in merge([back, ["11-30 10:00:10 other"]])] == [*back, "11-30 10:00:10 other"]


def test_a_bad_expression_says_what_is_wrong() -> None:
    with pytest.raises(CpuppError, match="cannot be read") as caught:
        pattern("(")
    assert (caught.value.exit_code, caught.value.code) == (2, "LOGS-GREP")


def view(run: Run, *hosts: ScriptedHost, **wishes: object) -> LogView:
    return LogView(Target(run=run, hosts=open_hosts(*hosts)), **wishes)  # type: ignore[arg-type]  # wishes by name


def lines(of: LogView) -> list[tuple[int, str]]:
    return [item for batch in of.lines(follow=False) for item in batch]


def test_what_of_the_logs_is_wanted(tmp_path: Path) -> None:
    run = record(tmp_path, folder="")
    hosts = ScriptedHost("a", 0, log=b"one\ntwo\nthree\n"), ScriptedHost("b", 1, log=b"eins\nzwei\n")
    assert lines(view(run, *hosts)) == [(0, "one"), (0, "two"), (0, "three"), (1, "eins"), (1, "zwei")]
    assert lines(view(run, *hosts, rank=1)) == [(1, "eins"), (1, "zwei")]
    assert lines(view(run, *hosts, wanted=re.compile("e$"), tail=1)) == [(0, "three")]
    assert lines(view(run, *hosts, tail=1)) == [(0, "three"), (1, "zwei")]
    assert view(run, *hosts).ranks(1) == (1,)
    for wishes in ({"rank": 2}, {"attempt": 2}):
        with pytest.raises(CpuppError) as caught:
            view(run, *hosts, **wishes)
        assert caught.value.exit_code == 2


def test_each_attempt_has_its_logs(tmp_path: Path) -> None:
    run = record(tmp_path, attempt=2, detached=False, state=RunState.FAILED)
    (tmp_path / "logs" / "node-0-a.log").write_text("first try\n")
    (tmp_path / "logs" / "attempt-2").mkdir()
    (tmp_path / "logs" / "attempt-2" / "node-0-a.log").write_text("second try\n")
    assert lines(view(run)) == [(0, "second try")]
    assert lines(view(run, attempt=1)) == [(0, "first try")]
