"""Which checks of the catalogue are run: those named by `--only` and `--skip`, by code or by a beginning."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from cpupp.errors import CpuppError, ExitCode
from cpupp.plan.findings import Check


def chosen_codes(checks: Mapping[str, Check], only: Iterable[str], skip: Iterable[str]) -> tuple[str, ...]:
    """Return the codes to run, in the catalogue's order.

    only, skip: texts of codes with commas between. A code means that check alone, anything else all codes that begin
    so (`NET`); capitals do not matter. Raises CpuppError for a word that is neither, and when nothing is left.
    """
    wanted = _codes(checks, "--only", only) or set(checks)
    unwanted = _codes(checks, "--skip", skip)
    if wanted <= unwanted:  # an empty report would pass for a healthy cluster
        raise _refusal("--skip leaves out every check that --only asks for", "leave one of the two out")
    return tuple(code for code in checks if code in wanted - unwanted)


def nothing_without_file() -> CpuppError:
    """None of the chosen checks looked at anything, which an empty report would hide."""
    return _refusal("the chosen checks look at a cluster, not at a machine alone", "give a cluster file")


def needs_of(checks: Mapping[str, Check], codes: Iterable[str]) -> frozenset[str]:
    """What must be measured, beyond the facts of a plan, for these checks."""
    return frozenset(need for code in codes for need in checks[code].needs)


def _codes(checks: Mapping[str, Check], option: str, texts: Iterable[str]) -> set[str]:
    found: set[str] = set()
    words = [part.strip().upper() for text in texts for part in text.split(",")]
    if words and not any(words):
        raise _refusal(f"{option} names no check", f"the checks are {', '.join(checks)}")
    for word in filter(None, words):
        matching = {word} & set(checks) or {code for code in checks if code.startswith(word)}
        if not matching:
            raise _refusal(f"{option}: there is no check {word}", _near(checks, word))
        found |= matching
    return found


def _refusal(message: str, hint: str) -> CpuppError:
    return CpuppError("DOCTOR-CODE", message, where="doctor", hint=hint, exit_code=ExitCode.USAGE)


def _near(checks: Mapping[str, Check], word: str) -> str:
    near = difflib.get_close_matches(word, checks, n=4, cutoff=0.5)
    near += [code for code in checks if word in code and code not in near]
    return f"did you mean {', '.join(near)}?" if near else f"the checks are {', '.join(checks)}"
