"""For every test: the marker of its layer, and the proof that it left nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import leaks
from tests.testbed.processes import OrphanWatch

TESTS = Path(__file__).parent
LAYERS = ("unit", "integration", "e2e")

# A test host has a /tmp of its own, so what tests and hosts share (tmp_path) must live elsewhere.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")


def pytest_configure() -> None:
    """Let SIGTERM, with which a CI ends a run, unwind the tests as Ctrl-C does. By itself it skips every clean-up."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A job in the background inherits an ignored SIGINT, and so would the commands that the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A forked child that a test terminates shall just die.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of the folder that it is in."""
    for item in items:
        for layer in LAYERS:
            if item.path.is_relative_to(TESTS / layer):
                item.add_marker(layer)


@pytest.fixture(scope="session", autouse=True)
def orphan_watch() -> Iterator[OrphanWatch]:
    """Knows the processes that tests start and lose. At the very end, everything must be gone."""
    watch = OrphanWatch()
    watch.start()
    before = leaks.files()
    yield watch
    left = [f"process {process}" for process in leaks.end_orphans(watch)]
    left += [f"process {process}" for process in leaks.own_children()]
    left += leaks.beds_left()
    files = [f"file {path}" for path in leaks.new_files(before)]
    if os.environ.get(leaks.SHARED_MACHINE):
        print("".join(f"\nnew while the tests ran, by us or by others: {file}" for file in files))
    else:
        left += files
    watch.stop()
    if left:
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def no_orphans(orphan_watch: OrphanWatch) -> Iterator[None]:
    """Names the test that lost a process, so that nobody has to search for it."""
    yield
    if left := leaks.end_orphans(orphan_watch):
        lines = "\n  ".join(map(str, left))
        pytest.fail(f"processes that this test left behind (killed now):\n  {lines}", pytrace=False)
