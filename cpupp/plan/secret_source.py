"""How a cluster file says where a secret comes from."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_source(text: str) -> bool:
    """Whether a value under `secrets` is `env`, `env:NAME` or `file:PATH`."""
    return text == "env" or is_outer_source(text)


def is_outer_source(text: str) -> bool:
    """Whether a text is `env:NAME` or `file:PATH`."""
    kind, _, rest = text.partition(":")
    return bool(rest) and "\0" not in rest and (kind == "file" or (kind == "env" and is_variable(rest)))


def is_variable(text: str) -> bool:
    """Whether a text is a name of an environment variable."""
    return _NAME.fullmatch(text) is not None


def normal_source(name: str, text: str) -> str:
    """The source of the secret `name` in full: `env` is the variable of the same name."""
    return f"env:{name}" if text == "env" else text
