"""Secret values are hidden in whole texts and in texts that come in pieces, wherever they are cut."""

from __future__ import annotations

import itertools
import json
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpupp.rank.agent_mask import SHOWN, FileMask, Mask

TOKEN = "hf_0123456789"


def in_pieces(mask: Mask, text: str, cuts: list[int]) -> str:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    stream = mask.stream()
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    return "".join(map(stream.feed, pieces)) + stream.end()


def test_a_value_is_hidden_wherever_it_stands() -> None:
    assert Mask([TOKEN]).text(f"a{TOKEN}b {TOKEN}") == f"a{SHOWN}b {SHOWN}"


@pytest.mark.parametrize(
    "value", ['quote"back\\slash', "tab\tand\nline-of-its-own", "emoji-\N{SNOWMAN}-value", "a b/c?d=e&f"]
)
def test_a_value_is_hidden_as_others_write_it(value: str) -> None:
    mask = Mask([value])
    for text in (value, json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)):
        assert SHOWN in mask.text(text)
        assert value[-7:].strip() not in mask.text(text)
    assert mask.text(urllib.parse.quote(value, safe="")) == SHOWN


def test_lines_of_a_value_are_hidden_alone() -> None:
    assert Mask(["first-line\nsecond-line"]).text("> second-line") == f"> {SHOWN}"


def test_a_short_value_is_not_hidden() -> None:
    assert Mask(["1234567", ""]).text("1234567") == "1234567"


def test_values_that_overlap_are_hidden_whole() -> None:
    assert Mask(["abcdefgh", "efghijkl"]).text("xabcdefghijklx") == f"x{SHOWN}x"


def test_json_values() -> None:
    data = {"a": [TOKEN, 1, None], TOKEN: {"b": f"x{TOKEN}"}}
    assert Mask([TOKEN]).data(data) == {"a": [SHOWN, 1, None], SHOWN: {"b": f"x{SHOWN}"}}


def test_nothing_waits_that_cannot_become_a_value() -> None:
    stream = Mask([TOKEN]).stream()
    assert stream.feed("no secret here") == "no secret here"
    assert stream.feed("half hf_012") == "half "
    assert stream.feed("x\n") == "hf_012x\n"
    assert stream.end() == ""


def test_an_end_in_the_middle_of_a_value_does_not_give_it_away() -> None:
    stream = Mask([TOKEN]).stream()
    assert stream.feed("said " + TOKEN[:-1]) + stream.end() == f"said {SHOWN}"


def test_an_endless_value_is_not_kept() -> None:
    stream = Mask(["aaaaaaaa"]).stream()
    shown = "".join(stream.feed("aaaaa") for _ in range(1000))
    assert shown + stream.feed("b") == f"{SHOWN}b"


@given(
    st.lists(st.sampled_from(["abcabcabc", "bcabcabcd", "aaaaaaaa", "cccccccccc", "abcdabcdabcd"]), max_size=4),
    st.text("abcd", max_size=60),
    st.lists(st.integers(0, 60), max_size=20),
)
def test_pieces_show_what_the_whole_text_shows(values: list[str], text: str, cuts: list[int]) -> None:
    mask = Mask(values)
    whole, pieces = mask.text(text + "\n"), in_pieces(mask, text + "\n", cuts)
    assert pieces == whole
    assert not any(value in pieces for value in values)


def copied(values: list[str], data: bytes, sizes: list[int]) -> bytes:
    """What a copy holds that takes at most so many bytes at a time, of what there is to be seen at that time."""
    mask, copy, seen = FileMask(Mask(values)), b"", 0
    for size in sizes:
        seen = min(len(data), seen + size)
        taken = mask.show(data[len(copy) : seen])[: max(1, size // 2)]  # as when a disk is nearly full
        copy += taken
        mask.advance(len(taken))
    return copy + mask.show(data[len(copy) :], last=True)


@given(
    st.lists(st.sampled_from(["abcabcabc", "bcabcabcd", "aaaaaaaa", "dddddddddd", "ab\N{SNOWMAN}cdabcd"]), max_size=4),
    st.text("abcd\N{SNOWMAN}", max_size=60),
    st.lists(st.integers(0, 20), max_size=20),
)
def test_a_copy_in_pieces_has_the_same_length_and_no_value(values: list[str], text: str, sizes: list[int]) -> None:
    data = (text + "\n").encode()
    copy = copied(values, data, sizes)
    assert len(copy) == len(data)
    assert not any(value.encode() in copy for value in values)
    hidden = bytearray(data)
    raw = Mask(values).raw
    for start, end in raw.spans(data.decode("latin-1")):
        hidden[start:end] = SHOWN.encode().ljust(end - start, b"*")
    assert copy == bytes(hidden)
