"""The contract between launcher and ranks, there and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpupp.plan.handoff import (
    ErrorReport,
    GroupReport,
    HandoffError,
    PeerReport,
    PluginReport,
    RankHandoff,
    Report,
    decode_report,
    encode_report,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
HANDOFFS = st.builds(
    RankHandoff,
    run=TEXT,
    attempt=st.integers(1, 9),
    node_rank=st.integers(0, 99),
    mode=TEXT,
    backend=TEXT,
    reports=TEXT,
    host=TEXT,
    no_shm=st.booleans(),
    num_nodes=st.integers(1, 32),
    shares_cores=st.booleans(),
)
REPORTS = st.one_of(
    st.builds(PluginReport, pid=st.integers(1), vllm=TEXT, mode=TEXT),
    st.builds(ErrorReport, pid=st.integers(1), where=TEXT, message=TEXT),
    st.builds(PeerReport, pid=st.integers(1), node_rank=st.integers(-1, 99), silent_s=st.floats(0, 99), message=TEXT),
    st.builds(
        GroupReport,
        rank=st.integers(0, 9),
        pid=st.integers(1),
        kind=TEXT,
        ranks=st.lists(st.integers(0, 9)),
        backend=TEXT,
        links=st.just([[0, 1, "shm"], [1, 0, "gloo"]]),
        reason=TEXT,
    ),
)


@given(HANDOFFS)
def test_handoff_round_trip(handoff: RankHandoff) -> None:
    text = handoff.encode()
    assert text.isascii()
    assert "\n" not in text
    assert RankHandoff.decode(text) == handoff


@given(REPORTS)
def test_report_round_trip(report: Report) -> None:
    line = encode_report(report)
    assert "\n" not in line
    assert decode_report(line) == report


GOOD = RankHandoff(
    run="r", attempt=1, node_rank=0, mode="links", backend="auto", reports="/r", host="a", no_shm=False
).encode()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "handoff version 2 is not 1"),
        ({"attempt": "1"}, "attempt = '1' is not int"),
        ({"attempt": True}, "attempt = True is not int"),
        ({"no_shm": 1}, "no_shm = 1 is not bool"),
        ({"no_shm": "true"}, "no_shm = 'true' is not bool"),
        ({"extra": 1}, r"unknown \['extra'\]"),
    ],
)
def test_a_strange_handoff_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(HandoffError, match=text):
        RankHandoff.decode(json.dumps({**json.loads(GOOD), **change}))


def test_a_handoff_without_a_field_is_refused() -> None:
    data = json.loads(GOOD)
    del data["no_shm"]
    with pytest.raises(HandoffError, match=r"missing \['no_shm'\]"):
        RankHandoff.decode(json.dumps(data))


@pytest.mark.parametrize("line", ["", "no", "[]", "{}", '{"report": "x"}', '{"report": []}', '{"report": "plugin"}'])
def test_a_strange_report_is_refused(line: str) -> None:
    with pytest.raises(HandoffError):
        decode_report(line)
