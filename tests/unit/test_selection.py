"""Which checks are run: by code, by a beginning, and what a slip of the pen is told."""

from __future__ import annotations

import pytest

from cpupp.errors import CpuppError, ExitCode
from cpupp.plan.checks import CHECKS
from cpupp.plan.diagnose import diagnose
from cpupp.plan.findings import SEVERITIES
from cpupp.plan.selection import chosen_codes
from tests.unit.factory import cluster, machines


def test_all_without_a_choice() -> None:
    assert chosen_codes(CHECKS, (), ()) == tuple(CHECKS)


def test_a_code_is_that_check_and_a_beginning_all_that_begin_so() -> None:
    assert chosen_codes(CHECKS, ["CPU"], ()) == ("CPU",)
    assert set(chosen_codes(CHECKS, ["net"], ())) == {code for code in CHECKS if code.startswith("NET-")}
    assert chosen_codes(CHECKS, ["shm,cpu", "MODEL"], ["CPU"]) == ("SHM", "MODEL")


@pytest.mark.parametrize(("word", "near"), [("NET-LOOPBAK-NAME", "NET-LOOPBACK-NAME"), ("ISA", "CPU-ISA")])
def test_an_unknown_code_is_told_the_near_ones(word: str, near: str) -> None:
    with pytest.raises(CpuppError, match=f"there is no check {word}") as caught:
        chosen_codes(CHECKS, (), [word])
    assert near in caught.value.hint


@pytest.mark.parametrize("option", ["only", "skip"])
def test_an_empty_choice_is_refused(option: str) -> None:
    words = {"only": (), "skip": (), option: (" , ",)}
    with pytest.raises(CpuppError) as caught:
        chosen_codes(CHECKS, words["only"], words["skip"])
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_choice_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(CpuppError, match="leaves out every check"):
        chosen_codes(CHECKS, ["SHM"], ["SHM"])


def test_only_the_chosen_checks_speak_and_an_unreached_host_always() -> None:
    spec = cluster("a", "b", pipeline=2)
    facts = machines("a", "b")
    assert {f.code for f in diagnose(spec, facts, None, ("CPU", "SHM")).findings} == {"CPU", "SHM"}
    failures = {"b": ("connection refused", "is sshd running?")}
    found = {(f.code, f.severity) for f in diagnose(spec, {"a": facts["a"]}, failures, ("CPU",)).findings}
    assert ("HOST-REACH", "error") in found


def test_every_check_has_what_the_docs_say_of_it() -> None:
    for entry in CHECKS.values():
        assert all((entry.about, entry.why, entry.fix, entry.severities))
        assert set(entry.severities) <= set(SEVERITIES) - {"ok"}
        assert not any(text.endswith(".") for text in (entry.about, entry.why, entry.fix))
