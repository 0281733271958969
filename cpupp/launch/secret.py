"""Values of secrets, read at the launcher before anything connects; and the mask that hides them from then on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpupp.errors import CpuppError, CpuppErrors
from cpupp.plan.cluster import ClusterSpec
from cpupp.plan.command import RankCommand
from cpupp.plan.secret import API_KEY_ENV, literal_secrets, secret_sources
from cpupp.rank.agent_mask import SHORTEST, Mask

LONGEST = 65536
"""Bytes of a secret's file that are read; its first line must end within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """values: host -> variable -> value; mask: hides them and what the file holds; notes: for the user."""

    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    mask: Mask = field(default_factory=Mask)
    notes: tuple[str, ...] = ()

    def of(self, command: RankCommand) -> dict[str, str]:
        """The variables with secrets of one vLLM node."""
        return {name: self.values[command.host][name] for name in command.secrets}

    def api_key(self, head: str) -> str:
        """The key of the API, empty when it does not come from a secret."""
        return self.values.get(head, {}).get(API_KEY_ENV, "")


def literal_mask(spec: ClusterSpec) -> Mask:
    """A mask of what is written in the cluster file and looks like a secret."""
    return Mask(value for values in literal_secrets(spec).values() for value in values)


def read_secrets(spec: ClusterSpec, environment: Mapping[str, str]) -> Secrets:
    """Find the value of every secret of the cluster. environment: the launcher's own.

    Raises CpuppErrors, one error for each source that is missing, empty or cannot be a secret. No error holds a value.
    """
    wanted = {host.name: secret_sources(spec, host) for host in spec.hosts}
    found: dict[tuple[str, str], str] = {}
    errors: dict[str, CpuppError] = {}
    notes: dict[str, None] = {}
    for name, source in (item for sources in wanted.values() for item in sources.items()):
        try:
            found[name, source] = value = _value(name, source, environment)
        except CpuppError as error:
            errors[error.message] = error
        else:
            notes |= dict.fromkeys(_notes(name, source, value))
    if errors:
        raise CpuppErrors(list(errors.values()))
    mask = literal_mask(spec)
    mask.add(found.values())
    values = {host: {n: found[n, source] for n, source in sources.items()} for host, sources in wanted.items()}
    return Secrets(values=values, mask=mask, notes=tuple(notes))


def _value(name: str, source: str, environment: Mapping[str, str]) -> str:
    kind, _, place = source.partition(":")
    value = environment.get(place) if kind == "env" else _first_line(name, place)
    what = f"secret {name}: the variable {place}" if kind == "env" else f"secret {name}: the first line of {place}"
    if not value:
        message = f"{what} is {'not set where cpupp is started' if value is None else 'empty'}"
        hint = f"read -rs {place}; export {place}" if kind == "env" else "the file's first line is the secret"
        raise CpuppError("SECRET-MISSING", message, hint=hint)
    if "\0" in value:
        raise CpuppError("SECRET-VALUE", f"{what} holds a NUL character", hint="no process can have it")
    if name == API_KEY_ENV and not (value.isascii() and value.isprintable() and " " not in value):
        hint = "use visible ASCII characters: clients send it in an HTTP header"
        raise CpuppError("SECRET-VALUE", f"{what} cannot be the key of an API", hint=hint)
    return value


def _first_line(name: str, place: str) -> str:
    try:
        with Path(place).expanduser().open("rb") as file:
            line = file.readline(LONGEST)
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user's home
        why = getattr(error, "strerror", None) or str(error)
        hint = "a relative path starts where cpupp is started"
        raise CpuppError("SECRET-MISSING", f"secret {name}: {place}: {why}", hint=hint) from None
    return line.decode("utf-8", "surrogateescape").rstrip("\r\n")


def _notes(name: str, source: str, value: str) -> Iterator[str]:
    kind, _, place = source.partition(":")
    if kind == "file":
        path = Path(place).expanduser()
        if path.stat().st_mode & 0o077:
            yield f"others can read {place}, which holds the secret {name}: chmod 600 {place}"
    if len(value) < SHORTEST:
        yield f"the secret {name} has fewer than {SHORTEST} characters: in logs it cannot be told from other text"
