"""Tokens, paths and routes of an SSH config."""

from __future__ import annotations

import getpass
import hashlib
import socket
from pathlib import Path

import pytest

from cpupp.errors import CpuppError
from cpupp.launch.ssh_config import resolve, route
from cpupp.launch.ssh_tokens import expand, expand_path, make_tokens

TOKENS = make_tokens(alias="n", host="h.lan", port=2222, user="r", jump="j", key_alias="")


def test_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.gethostname()
    expected = f"% {Path.home()} h.lan j n {here.split('.')[0]} {here} n 2222 r {getpass.getuser()}"
    assert expand("%% %d %h %j %k %L %l %n %p %r %u", TOKENS) == expected
    assert expand("%C", TOKENS) == hashlib.sha1(f"{here}h.lan2222rj".encode()).hexdigest()
    assert expand("%%h", TOKENS) == "%h"
    for wrong in ("%x", "50%"):
        with pytest.raises(ValueError, match="unknown token"):
            expand(wrong, TOKENS)
    monkeypatch.setenv("PLACE", "/here")
    assert expand_path("${PLACE}/%n", TOKENS) == Path("/here/n")
    assert expand_path('"~/%n"', TOKENS) == Path.home() / "n"


@pytest.mark.parametrize("openssh", [True, False], ids=["ssh -G", "paramiko"])
def test_a_config_is_read_alike_with_and_without_openssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openssh: bool
) -> None:
    if not openssh:
        monkeypatch.setattr("shutil.which", lambda name: None)
    config = tmp_path / "config"
    config.write_text(
        "Host x\n HostName 10.0.0.9\n Port 2222\n User me\n IdentityFile ~/k\n ProxyJump a,u@b:99\n"
        " HostKeyAlias it\n IdentitiesOnly yes\n ConnectTimeout 7\n HashKnownHosts yes\n"
        "Host y\n ProxyCommand nc %h %p\n",
        encoding="utf-8",
    )
    x = resolve("x", config)
    assert (x.host, x.port, x.user, x.key_alias) == ("10.0.0.9", 2222, "me", "it")
    assert (x.identity_files, x.keys_named, x.identities_only) == ((Path.home() / "k",), True, True)
    assert (x.proxy_jump, x.connect_timeout_s, x.hash_known_hosts) == (("a", "u@b:99"), 7.0, True)
    assert [(hop.user, hop.host, hop.port) for hop in route("x", config)][1:] == [
        ("u", "b", 99),
        ("me", "10.0.0.9", 2222),
    ]
    y = resolve("root@y", config)
    assert (y.user, y.port, y.proxy_command) == ("root", 22, "nc y 22")
    assert not y.keys_named
    assert y.known_hosts_file == Path.home() / ".ssh/known_hosts"


def test_jumps_in_a_circle(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host a\n ProxyJump b\nHost b\n ProxyJump a\n", encoding="utf-8")
    with pytest.raises(CpuppError, match="runs in a circle") as caught:
        route("a", config)
    assert caught.value.code == "SSH-CONFIG"
