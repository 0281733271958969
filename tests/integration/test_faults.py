"""Whatever breaks, whenever: the gang goes down in time, the first failure is the right one, and nothing is left.

The cases run side by side on pairs of test hosts, once for the module; each test then looks at one outcome. The whole
matrix is `python -m tests.reliability`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.fault_cases import FAULTS
from tests.integration.faults import Fault, Lane, Outcome, make_lanes, play_all
from tests.testbed.bed import HostOptions, hosts

NUM_LANES = 4


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Lane]]:
    with hosts(2 * NUM_LANES, every=HostOptions(shm_size="16m")) as bed:
        yield make_lanes(tmp_path_factory.mktemp("faults"), bed)


@pytest.fixture(scope="module")
def outcomes(lanes: list[Lane], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every fault, played side by side."""
    return play_all(FAULTS, lanes, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_gang_goes_down_as_one(fault: Fault, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[fault.name].wrong == []
