"""The command that lets peers in, in the words of the firewall that a host has."""

from __future__ import annotations

from collections.abc import Sequence


def admit(firewall: str, sources: Sequence[str], sudo: str) -> str:
    """Return the command, to be run on the host, that admits TCP from `sources` (subnets or addresses, one family).

    firewall: as rank/agent_firewall.py tells it; sudo: what a command begins with that needs root. All ports, because
    ranks take those that the kernel gives them.
    """
    v6 = ":" in sources[0]
    if firewall == "ufw":
        return " && ".join(f"{sudo}ufw allow proto tcp from {source}" for source in sources)
    if firewall == "firewalld":
        add = [f"{sudo}firewall-cmd --permanent --zone=trusted --add-source={source}" for source in sources]
        return " && ".join([*add, f"{sudo}firewall-cmd --reload"])
    if firewall.startswith("nft "):
        _, family, table, chain = firewall.split(" ")
        where = f"{'ip6' if v6 else 'ip'} saddr {{ {', '.join(sources)} }} meta l4proto tcp accept"
        return f"{sudo}nft 'insert rule {family} {table} {chain} {where}'"
    return f"{sudo}{'ip6tables' if v6 else 'iptables'} -I INPUT -p tcp -s {','.join(sources)} -j ACCEPT"


def outlives_reboot(firewall: str) -> bool:
    """Whether what `admit` says is still there after the host has started again."""
    return firewall in ("ufw", "firewalld")
