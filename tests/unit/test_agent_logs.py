"""The log of a detached vLLM node: nothing lost, whatever the pieces and wherever the parts end."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from cpupp.rank.agent_logs import LogStore, complete, last_lines, parts, raw_path, read_log
from cpupp.rank.agent_oom import killed_process


@settings(deadline=None, max_examples=20)
@given(
    pieces=st.lists(st.binary(max_size=50), max_size=8),
    part=st.integers(10, 60),
    begin=st.integers(0, 70),
    reopened=st.integers(0, 8),
)
def test_parts_hold_every_byte_at_its_offset(pieces: list[bytes], part: int, begin: int, reopened: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/node0.log"
        store = LogStore(log, begin, part)
        for number, piece in enumerate(pieces):
            if number == reopened:
                store.close()
                store = LogStore(log, begin, part)
            store.write(piece)
        store.close()
        text = b"".join(pieces)
        sizes = [Path(path).stat().st_size for path in parts(log)]
        assert sum(sizes) == begin + len(text) == store.size
        assert all(size == part for size in sizes[:-1])
        if sizes:
            found = b""
            while (read := read_log(log, begin + len(found), 7, begin)).data:
                found += read.data
            assert found == text
            assert read_log(log, -3, 100, begin).data == text[-3:]
            assert read_log(log, 0, 1000, begin) == (text, store.size, store.size)


@settings(deadline=None, max_examples=20)
@given(text=st.binary(max_size=200), copied=st.integers(0, 200), part=st.integers(20, 300))
def test_what_a_dead_agent_did_not_copy_is_copied_from_the_ranks_own_file(text: bytes, copied: int, part: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/node3.log"
        Path(raw_path(log)).write_bytes(text)
        store = LogStore(log, 0, part)
        store.write(text[:copied])
        store.close()
        complete(log, part)
        assert not Path(raw_path(log)).exists()
        assert not text or read_log(log, 0, 1000).data == text


def test_other_files_are_no_parts(tmp_path: Path) -> None:
    for name in ("node1.log", "node1.log.keeper", "node1.raw", "node11.001.log", "node1.002.log", "node1.010.log"):
        (tmp_path / name).write_text(name + "\n", encoding="utf-8")
    log = str(tmp_path / "node1.log")
    assert [Path(path).name for path in parts(log)] == ["node1.002.log", "node1.010.log", "node1.log"]
    assert last_lines(log, 2) == ["node1.010.log", "node1.log"]
    assert last_lines(str(tmp_path / "node7.log")) == []


def test_the_kernels_word_for_a_kill() -> None:
    machine = (
        "3,1042,77123456,-;Out of memory: Killed process 4711 (VLLM::Worker) total-vm:9GB, anon-rss:7GB\n SUBSYSTEM=x"
    )
    group = "3,1043,77123457,-;Memory cgroup out of memory: Killed process 4712 (python3) total-vm:1kB"
    assert killed_process(machine) == {
        4711: "Out of memory: Killed process 4711 (VLLM::Worker) total-vm:9GB, anon-rss:7GB"
    }
    assert list(killed_process(group)) == [4712]
    assert killed_process("6,1,2,-;oom_reaper: reaped process 4711 (python3), now anon-rss:0kB") == {}
