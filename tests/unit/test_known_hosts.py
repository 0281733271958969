"""known_hosts lines: patterns, negation, ports, hashes, markers, and broken text."""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path

import pytest

from cpupp.launch.known_hosts import algorithms_for, find_keys, fingerprint, host_names, key_line

KEY = base64.b64encode(b"\0\0\0\x0bssh-ed25519 key").decode()


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("names", "name", "found"),
    [
        ("host", "host", True),
        ("HOST", "host", True),
        ("a,host,b", "host", True),
        ("ho?t", "host", True),
        ("*.lan", "x.lan", True),
        ("*.lan,!x.lan", "x.lan", False),
        ("!x.lan,*.lan", "y.lan", True),
        ("[host]:2222", "[host]:2222", True),
        ("[host]:2222", "host", False),
        ("host", "[host]:2222", False),
        ("[10.0.0.*]:2222", "[10.0.0.7]:2222", True),
        ("h", "ho", False),
        (hashed("host"), "host", True),
        (hashed("[host]:2222"), "[host]:2222", True),
        (hashed("host"), "other", False),
        ("|1|broken", "host", False),
    ],
)
def test_names(tmp_path: Path, names: str, name: str, found: bool) -> None:
    path = tmp_path / "known"
    path.write_text(f"\n# comment host ssh-ed25519 {KEY}\n{names} ssh-ed25519 {KEY} me@here\n", encoding="ascii")
    keys = find_keys(name, [tmp_path / "missing", path])
    assert [(key.file, key.line, key.kind, key.marker) for key in keys] == [(path, 3, "ssh-ed25519", "")] * found


def test_markers_and_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "known"
    lines = [f"@revoked host ssh-rsa {KEY}", "host ssh-rsa", "host ssh-rsa !!!", f"@cert-authority * ssh-rsa {KEY}"]
    path.write_text("\n".join(lines), encoding="ascii")
    assert [(key.line, key.marker) for key in find_keys("host", [path])] == [(1, "@revoked"), (4, "@cert-authority")]


def test_names_to_look_up() -> None:
    assert host_names("Host", 22, "") == ("host",)
    assert host_names("10.0.0.1", 2222, "") == ("[10.0.0.1]:2222", "10.0.0.1")
    assert host_names("10.0.0.1", 2222, "Alias") == ("alias",)


def test_known_algorithms_come_first(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(f"host ssh-rsa {KEY}\n", encoding="ascii")
    offered = ["ssh-ed25519", "rsa-sha2-512", "rsa-sha2-256"]
    assert algorithms_for(find_keys("host", [path]), offered) == ["rsa-sha2-512", "rsa-sha2-256", "ssh-ed25519"]
    assert algorithms_for([], offered) == offered


def test_texts() -> None:
    blob = base64.b64decode(KEY)
    assert key_line("host", "ssh-ed25519", blob) == f"host ssh-ed25519 {KEY}"
    assert fingerprint(blob).startswith("SHA256:")
    assert "=" not in fingerprint(blob)
