"""A launch with secrets, over real SSH, with ranks that print their whole environment: nobody else shows a value."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpupp.plan.command import CLI
from tests.e2e.runs import Run, launched, write_cluster
from tests.integration.agent_bench import Bench, unique, wait_until
from tests.testbed import processes
from tests.testbed.bed import Bed, hosts
from tests.testbed.fake_engine import fake, make_engine, make_model

TOKEN, KEY, FILED, LITERAL = "hf_0123456789abcdef", "key-ABCDEFGHIJ", "filed/secret+value", "written-in-the-file"
VALUES = (TOKEN, KEY, FILED, LITERAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What there was to see while it served, and the run, which has ended by now."""

    run: Run
    cpupp: list[int]  # pids of agents and keepers
    argv: str  # of every process on the hosts
    own_environments: str  # of agents and keepers
    rank_environments: list[str]  # of the vLLM nodes
    listening: list[str]  # sockets of agents and keepers
    site: dict[str, int]  # path -> mode in the site folders
    site_texts: str  # of the files there but the ranks' raw output


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("secrets", numbered=True)
    folder.chmod(0o755)
    folder.parent.chmod(0o755)
    (folder / "filed").write_text(FILED + "\n")
    (folder / "filed").chmod(0o600)
    python, model = make_engine(folder / "engine"), make_model(folder / "model")
    with hosts(2) as bed, pytest.MonkeyPatch.context() as patch:
        entries = [{"name": h.name, "ssh": h.ssh, "engine": {"env": fake(print_env=True)}} for h in bed]
        entries[1]["engine"] |= {"secrets": {"FILED_TOKEN": f"file:{folder}/filed"}}  # type: ignore[operator]  # a dict
        cluster = write_cluster(
            folder / "c.yaml",
            model,
            entries,
            engine={"python": python, "secrets": {"HF_TOKEN": "env"}, "env": {"OLD_PASSWORD": LITERAL}},
            serve={"api_key_env": "MY_KEY"},
        )
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("MY_KEY", KEY)
        patch.setenv("NOT_LISTED", "launcher")
        before = os.umask(0)
        try:
            with launched(folder / "run", bed, cluster) as run:
                os.umask(before)
                run.wait_for("ready", 120)
                found = look(run, bed)
                run.stop()
        finally:
            os.umask(before)
        yield found


def look(run: Run, bed: Bed) -> Seen:
    pids = [process.pid for host in bed for process in host.processes()]
    argv = {pid: _read(f"/proc/{pid}/cmdline") for pid in pids}
    cpupp = [pid for pid, text in argv.items() if "cpupp-agent" in text or "cpupp-keeper" in text]
    mains = [pid for pid, text in argv.items() if CLI in text and processes.look(pid)]
    environments = {pid: _read(f"/proc/{pid}/environ") for pid in pids}
    sites = {
        Path(f"/proc/{pid}/root{entry.partition('=')[2]}")
        for pid in mains
        for entry in environments[pid].split("\0")
        if entry.startswith("PYTHONPATH=/")
    }
    # What the ranks write there themselves has the modes that they choose; nobody else reaches it.
    everything = [path for site in sites for path in [site, *site.rglob("*")]]
    files = [path for path in everything if not {"tmp", "rpc", "__pycache__"} & set(path.parts[-2:])]
    return Seen(
        run=run,
        cpupp=cpupp,
        argv="\n".join(argv.values()),
        own_environments="\n".join(environments[pid] for pid in cpupp),
        rank_environments=[environments[pid] for pid in mains],
        listening=[f"{pid}: {line}" for pid in cpupp for line in listening(pid)],
        site={str(path): path.lstat().st_mode & 0o777 for path in files if path.is_dir() or path.is_file()},
        site_texts="\n".join(_read(str(p)) for p in files if p.is_file() and p.parent.name != "logs"),
    )


def hidden(value: str) -> str:
    """A value in output, whose length stays what it was."""
    return "<secret>" + "*" * (len(value) - 8)


def listening(pid: int) -> list[str]:
    """The sockets of a process that wait for somebody: TCP and Unix that listen, UDP that hears anyone."""
    held = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    waiting = {"tcp": "0A", "udp": "07", "unix": "00010000"}
    for name, inode in (("tcp", 9), ("tcp6", 9), ("udp", 9), ("udp6", 9), ("unix", 6)):
        for line in _read(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            state = fields[3] == waiting[name.rstrip("6")]
            if state and f"socket:[{fields[inode]}]" in held:
                found.append(line)
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def test_the_ranks_have_what_the_plan_lists(seen: Seen) -> None:
    head = next(text for text in seen.rank_environments if "VLLM_API_KEY=" in text)
    assert f"VLLM_API_KEY={KEY}\0" in head
    assert all(f"HF_TOKEN={TOKEN}\0" in text for text in seen.rank_environments)
    assert sum(f"FILED_TOKEN={FILED}\0" in text for text in seen.rank_environments) >= 1
    assert f"FILED_TOKEN={FILED}\0" not in head
    names = {entry.partition("=")[0] for entry in head.split("\0")}
    assert {"PATH", "HOME"} <= names
    assert not names & {"NOT_LISTED", "MY_KEY", "SSH_CONNECTION", "MAIL"}


def test_no_other_process_has_a_value(seen: Seen) -> None:
    assert len(seen.cpupp) >= 4
    assert [value for value in VALUES if value in seen.argv or value in seen.own_environments] == []


def test_no_page_record_or_log_shows_a_value(seen: Seen) -> None:
    texts = {str(path): path.read_text() for path in seen.run.state.rglob("*") if path.is_file()}
    texts |= {"stdout": seen.run.stdout, "stderr": seen.run.stderr}
    assert len(texts) >= 8
    assert [(name, value) for name, text in texts.items() for value in VALUES if value in text] == []
    assert f"env HF_TOKEN='{hidden(TOKEN)}'" in seen.run.stderr
    for log in seen.run.logs().values():
        assert f"env HF_TOKEN='{hidden(TOKEN)}'" in log
        assert f"env OLD_PASSWORD='{hidden(LITERAL)}'" in log


def test_the_file_s_own_secret_is_warned_of(seen: Seen) -> None:
    assert "engine.env.OLD_PASSWORD holds a secret in the cluster file" in " ".join(seen.run.stderr.split())


def test_nothing_of_cpupp_listens(seen: Seen) -> None:
    assert seen.listening == []


def test_folders_and_files_are_the_user_s_alone(seen: Seen) -> None:
    modes = {str(path): path.lstat().st_mode & 0o777 for path in seen.run.state.rglob("*")}
    assert [(path, oct(mode)) for path, mode in {**modes, **seen.site}.items() if mode & 0o077] == []
    assert len(seen.site) > 20
    assert [value for value in VALUES if value in seen.site_texts] == []


def test_what_a_detached_host_keeps_shows_no_value() -> None:
    code = """
        out = lambda text: os.write(1, text.encode())
        token = os.environ["HF_TOKEN"]
        say('main')
        for cut in range(len(token)):
            out(token[:cut]); time.sleep(0.01); out(token[cut:] + "\\n")
        time.sleep(1.0)
        out("before " + token + " detached\\n")
        time.sleep(600)
    """
    with Bench() as bench:
        run = unique("secrets")
        bench.prepare(run=run)
        main = bench.start(code, secrets={"HF_TOKEN": TOKEN})
        bench.pid_of("main")
        assert bench.session.request("detach") == {}
        wait_until(lambda: "detached" in _read(str(bench.site / "logs" / "node0.log")), "the copy is complete", 20)
        piece = bench.session.request("run_log", run=run, node=0, offset=0, size=65536)["data"]
        lines = piece.splitlines()
        assert len(lines) == 2 + len(TOKEN)
        assert set(lines[1:-1]) == {hidden(TOKEN)}
        os.kill(main, signal.SIGKILL)
        wait_until(lambda: not bench.site.exists(), "the site is removed", 20)
        (kept,) = (bench.site.parent / "ended").glob(f"{run}-*")
        try:
            texts = [path.read_text() for path in kept.rglob("*") if path.is_file()]
            assert any("<secret>" in text for text in texts)
            assert [text for text in texts if TOKEN in text] == []
            assert not list(kept.rglob("*.raw"))
        finally:
            shutil.rmtree(kept)
