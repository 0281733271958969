"""The agent as it travels: the one remote shell text, and the source that follows it on stdin."""

from __future__ import annotations

from functools import cache
from importlib import resources

# The only text of ours that a remote shell ever sees: constant, and read alike by bash, dash, zsh, fish and csh (no
# `$`, `!`, backquote or backslash). -I and -S keep the host's PYTHON* variables, its working folder and its
# site-packages out.
START_AGENT = (
    "exec python3 -ISuc 'import sys;n=int(sys.stdin.buffer.readline());"
    'exec(compile(sys.stdin.buffer.read(n),"cpupp-agent","exec"))\''
)


@cache
def agent_payload() -> bytes:
    """Return what goes to the agent's stdin first: a line with the number of bytes, then its source text.

    The files are read as data: nothing of `cpupp.rank` is imported at the launcher.
    """
    folder = resources.files("cpupp") / "rank"
    sources = {
        entry.name.removesuffix(".py"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.startswith("agent") and entry.name.endswith(".py")
    }
    text = f"{sources['agent_boot']}\nrun({sources!r}, 'agent')\n".encode()
    return b"%d\n" % len(text) + text
