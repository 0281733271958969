"""Phrases that several checks share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from cpupp.errors import CpuppError
from cpupp.plan.cluster import ClusterSpec, parse_ssh
from cpupp.plan.facts import HostFacts
from cpupp.plan.findings import Finding, error
from cpupp.plan.partition import GIB


def from_error(problem: CpuppError) -> Finding:
    """An error of the plan as a finding."""
    cause = "the plan is impossible as it stands"
    named = re.fullmatch(r"host ([\w.-]+): (.*)", problem.message, re.DOTALL)
    host, title = (named[1], named[2]) if named else ("", problem.message)
    return error(host, title, evidence=f"{problem.code} of the plan", cause=cause, fix=problem.hint)


def copied(spec: ClusterSpec, source: HostFacts, target: HostFacts, *, instead: bool = False) -> str:
    """The command that copies the model from host to host by way of this machine, which reaches both as the file says.

    instead: of what the target has there, which is kept beside it.
    """
    place = shlex.quote(target.model.path)
    aside = f"mv {place} {shlex.quote(target.model.path.rstrip('/') + '.before')} && " if instead else ""
    read = f"tar -C {shlex.quote(source.model.path)} -chf - ."
    write = f"{aside}mkdir -p {place} && tar -C {place} -xf -"
    return f"on this machine: {_on(spec, source.name, read)} | {_on(spec, target.name, write)}"


def _on(spec: ClusterSpec, name: str, command: str) -> str:
    """The command as this machine runs it on a host."""
    host = next(host for host in spec.hosts if host.name == name)
    found = None if host.local or host.ssh is None else parse_ssh(host.ssh)
    if found is None:
        return f"({command})" if "&&" in command else command
    user, address, port = found
    way = [*(["-p", str(port)] if port else []), f"{user}@{address}" if user else address]
    return f"ssh {shlex.join(way)} {shlex.quote(command)}"


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
