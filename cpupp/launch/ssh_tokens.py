"""The `%` tokens, `~` and `${VARIABLES}` in values of an SSH config, as ssh_config(5) defines them."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

_TOKEN = re.compile(r"%(.?)")
_VARIABLE = re.compile(r"\$\{\w+\}")


def make_tokens(*, alias: str, host: str, port: int, user: str, jump: str, key_alias: str) -> dict[str, str]:
    """Return the value of every token by its letter. alias: the host as written; host: what to connect to."""
    here, name = socket.gethostname(), getpass.getuser()
    whole = f"{here}{host}{port}{user}"
    return {
        "%": "%",
        # OpenSSH added the jump (%j) in 9.8; without a jump both give the same hash.
        "C": hashlib.sha1(f"{whole}{jump}".encode(), usedforsecurity=False).hexdigest(),
        "d": str(Path.home()),
        "h": host,
        "i": str(os.getuid()),
        "j": jump,
        "k": key_alias or alias,
        "L": here.partition(".")[0],
        "l": here,
        "n": alias,
        "p": str(port),
        "r": user,
        "u": name,
    }


def expand(text: str, tokens: Mapping[str, str]) -> str:
    """Replace the tokens. Raises ValueError for one that there is not."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in tokens:
            raise ValueError(f"unknown token {match[0]} in {text!r}")
        return tokens[match[1]]

    return _TOKEN.sub(value, text)


def expand_path(text: str, tokens: Mapping[str, str]) -> Path:
    """Replace tokens, `${VARIABLE}` and a leading `~`. Raises ValueError; a variable that is not set stays as it is."""
    text = _VARIABLE.sub(lambda match: os.path.expandvars(match[0]), text.strip('"'))
    return Path(expand(text, tokens)).expanduser()
