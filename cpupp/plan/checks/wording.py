"""Phrases that several checks share."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from cpupp.errors import CpuppError
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Finding, error
from cpupp.plan.partition import GIB


def from_error(problem: CpuppError) -> Finding:
    """An error of the plan as a finding."""
    cause = "the plan is impossible as it stands"
    return error("", problem.message, evidence=problem.code, cause=cause, fix=problem.hint)


def place_of(fact: HostFacts) -> str:
    """Where the model is on a host, as rsync and scp take it: user@address:/path."""
    address = f"[{fact.ssh_address}]" if ":" in fact.ssh_address else fact.ssh_address
    at = f"{fact.user}@{address}" if address else fact.name
    return f"{at}:{shlex.quote(fact.model.path)}"


def sudo(fact: HostFacts) -> str:
    """What a command begins with that needs root there: nothing where cpupp's user is root."""
    return "" if fact.user == "root" else "sudo "


def there(host: str, command: str, *, for_good: bool = True) -> str:
    """A command to paste on a host, and whether a reboot undoes it."""
    return f"on {host}{'' if for_good else ', until its next reboot'}: {command}"


def table(values: Mapping[str, str]) -> str:
    """`a: 1, b: 2`."""
    return ", ".join(f"{name}: {value}" for name, value in values.items())


def gib(size: int) -> str:
    """Bytes as GiB with one digit."""
    return f"{size / GIB:.1f} GiB"


def age(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `2 days`."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
