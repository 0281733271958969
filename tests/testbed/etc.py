"""The configuration files of a test host."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.testbed.host import Host


def sshd_config(host: Host) -> str:
    """The host's sshd_config: Debian's habits, keys only, everything of this bed's own."""
    environment = " ".join(shlex.quote(f"{key}={value}") for key, value in host.options.env.items())
    lines = [
        # sshd takes the first value that it reads, so what the test asks for comes first.
        *host.options.sshd_config,
        f"Port {host.port}",
        "ListenAddress 0.0.0.0",
        f"HostKey {host.folder}/host_key",
        "PidFile none",
        "LogLevel VERBOSE",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "StrictModes yes",
        "UseDNS no",
        "PrintMotd no",
        "AcceptEnv LANG LC_*",
        "Subsystem sftp internal-sftp",
        *([f"SetEnv {environment}"] if environment else []),
    ]
    return "\n".join(lines) + "\n"


def private_etc(host: Host) -> dict[str, str]:
    """Texts of the files in /etc that the host has for itself, by name: users and names."""

    def of_machine(name: str) -> list[str]:
        return Path("/etc", name).read_text(encoding="utf-8").splitlines()

    user, home = host.user, host.home
    passwd, shadow, group = of_machine("passwd"), of_machine("shadow"), of_machine("group")
    if user == "root":
        # A home of its own, or two hosts would share what they write there.
        passwd = [re.sub(r"^(root:.*):/root:", rf"\1:{home}:", line) for line in passwd]
    else:
        passwd.append(f"{user}:x:4242:4242::{home}:/bin/bash")
        group.append(f"{user}:x:4242:")
    # "*" is: no password. "!" would be: locked, and sshd without PAM refuses that.
    shadow = [line for line in shadow if not line.startswith(f"{user}:")] + [f"{user}:*:19000:0:99999:7:::"]
    names = [*host.options.etc_hosts, "127.0.0.1 localhost", f"127.0.1.1 {host.hostname}"]  # as Debian writes them
    texts = {"passwd": passwd, "shadow": shadow, "group": group, "hosts": names}
    return {name: "\n".join(lines) + "\n" for name, lines in texts.items()}
