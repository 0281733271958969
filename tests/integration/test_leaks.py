"""A test run that leaves something behind fails and says what, and which test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.testbed import leaks, sweep
from tests.testbed.host import wait_for
from tests.testbed.models import ROOT

# Others may make files on this machine meanwhile, so each inner run looks at its own alone.
FILES = {"shared memory": ["/dev/shm/left-by-a-test"], "temporary file": ["/tmp/cpupp-left"]}
# What the test does -> what the run says of it, and with which evidence.
LEAKS = {
    "orphan": (
        "subprocess.run(['sh', '-c', 'setsid sleep 987 >/dev/null 2>&1 & sleep 1'], check=True)",
        "processes that this test left behind (killed now)",
        "sleep 987",
    ),
    "child": ("global child; child = subprocess.Popen(['sleep', '4'])", "the tests left behind", "sleep 4"),
    "shared memory": ("Path('/dev/shm/left-by-a-test').touch()", "the tests left behind", "/dev/shm/left-by-a-test"),
    "temporary file": ("Path('/tmp/cpupp-left').touch()", "the tests left behind", "/tmp/cpupp-left"),
    "host": ("global bed; bed = hosts(1); bed.__enter__()", "the tests left behind", "link cb-"),
    "nothing": ("pass", "1 passed", ""),
}


def inner_run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of one test that does what LEAKS says."""
    test = f"""
        import subprocess
        from pathlib import Path
        from tests.testbed import leaks
        from tests.testbed.bed import hosts

        leaks.ORPHAN_GRACE_S = 0.1
        leaks.files = lambda: {{path for path in map(Path, {FILES.get(name, [])!r}) if path.exists()}}

        def test_that_leaves_something():
            {LEAKS[name][0]}
    """
    folder.mkdir()
    (folder / "test_leaky.py").write_text(textwrap.dedent(test), encoding="utf-8")
    return subprocess.run(
        # The outer run's own conftest, for a test outside of its folder.
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(folder)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != leaks.SHARED_MACHINE},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """Every inner run, side by side: most of their time is waiting."""
    folder = tmp_path_factory.mktemp("leaks")
    try:
        with ThreadPoolExecutor(len(LEAKS)) as pool:
            done = pool.map(lambda name: inner_run(name, folder / name.replace(" ", "-")), LEAKS)
            return dict(zip(LEAKS, done, strict=True))
    finally:
        for file in (file for files in FILES.values() for file in files):
            Path(file).unlink(missing_ok=True)


@pytest.mark.parametrize("name", LEAKS)
def test_what_a_test_leaves_is_found(name: str, runs: dict[str, subprocess.CompletedProcess[str]]) -> None:
    _, title, evidence = LEAKS[name]
    done = runs[name]
    assert title in done.stdout
    assert evidence in done.stdout
    assert done.returncode == (0 if name == "nothing" else 1)
    if bed := re.search(r"bed (\w+):", done.stdout):
        wait_for(lambda: sweep.leftovers(bed.group(1)) == [], "end of the bed")


def test_sigterm_ends_a_run_like_ctrl_c(tmp_path: Path) -> None:
    text = """
        import time
        from pathlib import Path

        def test_that_takes_long(tmp_path):
            try:
                Path({started!r}).touch()
                time.sleep(1000)
            finally:
                Path({unwound!r}).touch()
    """
    started, unwound = tmp_path / "started", tmp_path / "unwound"
    test = textwrap.dedent(text).format(started=str(started), unwound=str(unwound))
    (tmp_path / "test_long.py").write_text(test, encoding="utf-8")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL) as run:
        wait_for(started.exists, "start of the test")
        run.terminate()
        assert run.wait(30) == pytest.ExitCode.INTERRUPTED
    assert unwound.exists()
