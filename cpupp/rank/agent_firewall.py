"""Which firewall this host has, so that a remedy can be given in its own words. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess

SBIN = "/usr/sbin:/sbin:/usr/local/sbin"  # what the shell of a plain user leaves out
CHAIN = re.compile(r"\bchain (\S+) \{")
TABLE = re.compile(r"^table (\S+) (\S+) \{")


def firewall() -> str:
    """Return `ufw`, `firewalld`, `nft FAMILY TABLE CHAIN` (a chain of input), `nft`, `iptables`, or an empty string."""
    with contextlib.suppress(OSError), open("/etc/ufw/ufw.conf", encoding="utf-8", errors="replace") as file:
        if re.search(r"^ENABLED=yes", file.read(), re.MULTILINE):
            return "ufw"
    if os.path.isdir("/run/firewalld") or os.path.exists("/run/firewalld.pid"):
        return "firewalld"
    path = os.environ.get("PATH", "") + ":" + SBIN
    nft = shutil.which("nft", path=path)
    chain = _input_chain(nft) if nft else ""
    if chain:
        return "nft " + chain
    if shutil.which("iptables", path=path):
        return "iptables"
    return "nft" if nft else ""


def _input_chain(nft: str) -> str:
    """Return `FAMILY TABLE CHAIN` of the first chain that filters what comes in; empty for who may not see them."""
    try:
        done = subprocess.run([nft, "list", "chains"], capture_output=True, timeout=2, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    table = chain = ""
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        table = " ".join(TABLE.findall(line)[0]) if TABLE.findall(line) else table
        chain = CHAIN.findall(line)[0] if CHAIN.findall(line) else chain
        if "type filter hook input" in line and table.split(" ")[0] in ("inet", "ip"):
            return f"{table} {chain}"
    return ""
