"""Plans and commands as they may be shown and recorded: `<secret>` where a secret's value stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from cpupp.plan.command import RankCommand
from cpupp.plan.plan import Plan
from cpupp.plan.secret import looks_secret

SHOWN = "<secret>"


def shown_env(command: RankCommand) -> dict[str, str]:
    """The environment of a command, secrets by name among it."""
    return {**_hidden(command.env), **dict.fromkeys(command.secrets, SHOWN)}


def shown_argv(argv: Iterable[str]) -> tuple[str, ...]:
    """A command line without the values of flags whose names look secret."""
    return tuple(flag + SHOWN if value else flag for flag, value in _split(argv))


def literal_values(command: RankCommand) -> tuple[str, ...]:
    """The secrets that stand in a command itself, because the cluster file holds them."""
    env = [value for name, value in command.env.items() if value and looks_secret(name)]
    return (*env, *(value for _, value in _split(command.argv) if value))


def _split(argv: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each word as what may be shown of it, and the secret behind that."""
    secret = False
    for word in argv:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            secret = looks_secret(flag)
            yield (flag + equals, value) if secret else (word, "")
        else:
            yield ("", word) if secret else (word, "")


def shown_command(command: RankCommand) -> RankCommand:
    """A command as it is recorded."""
    return replace(command, env=shown_env(command), argv=shown_argv(command.argv))


def shown_plan(plan: Plan) -> Plan:
    """A plan as it is recorded."""
    hosts = tuple(replace(host, env=_hidden(host.env)) for host in plan.hosts)
    args = {name: SHOWN if value and looks_secret(name) else value for name, value in plan.args.items()}
    return replace(plan, hosts=hosts, args=args)


def _hidden(env: Mapping[str, str]) -> dict[str, str]:
    return {name: SHOWN if value and looks_secret(name) else value for name, value in env.items()}
