"""Who is who, against real OpenSSH: host certificates, user certificates, agents, passphrases, new host keys."""

from __future__ import annotations

import os
import pty
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.ssh_bench import (
    client_config,
    keygen,
    known_hosts_of,
    log_in,
    new_key,
    no_login,
    openssh,
    public,
    put_first,
    ssh_agent,
)
from tests.testbed.bed import Bed, HostOptions, hosts


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with authorities for hosts (`host`, `old`: RSA) and users (`user`), and the server's files."""
    folder = tmp_path_factory.mktemp("authorities")
    new_key(folder / "host")
    new_key(folder / "user")
    keygen("-t", "rsa", "-N", "", "-f", folder / "old")
    new_key(folder / "key")
    (folder / "key-cert.pub").touch()
    return folder


@pytest.fixture(scope="module")
def bed(authorities: Path) -> Iterator[Bed]:
    # sshd reads its certificate when it starts; the test replaces host b's and starts its sshd again.
    trust = f"TrustedUserCAKeys {authorities}/user.pub"
    with hosts(HostOptions(sshd_config=[trust, "MaxAuthTries 6"]), HostOptions(port=2222)) as made:
        yield made


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def config(bed: Bed, tmp_path: Path) -> Path:
    return client_config(bed, tmp_path)


def certify(bed: Bed, authorities: Path, *options: str, authority: str = "host") -> None:
    """Let host b's sshd show a certificate. `HOST` in the options is its address."""
    host = bed[1]
    words = [option.replace("HOST", host.address) for option in options]
    keygen("-s", authorities / authority, "-I", "test", *words, host.folder / "host_key.pub")
    settings = host.folder / "sshd_config"
    line = f"HostCertificate {host.folder}/host_key-cert.pub\n"
    if line not in settings.read_text(encoding="utf-8"):
        settings.write_text(line + settings.read_text(encoding="utf-8"), encoding="utf-8")
    host.restart_sshd()


YEAR = ("-V", "-1d:+365d")
# What the certificate says, and what known_hosts says beside it; why it is refused, empty when it is not.
CERTIFICATES = {
    "good": (("-h", "-n", "other,HOST", *YEAR), "host", "", ""),
    "other host": (("-h", "-n", "other", *YEAR), "host", "", "is for other, not for"),
    "pattern": (("-h", "-n", "*", *YEAR), "host", "", "is for *, not for"),
    "expired": (("-h", "-n", "HOST", "-V", "-2d:-1d"), "host", "", "has expired"),
    "early": (("-h", "-n", "HOST", "-V", "+1d:+2d"), "host", "", "is not valid yet"),
    "user's": (("-n", "HOST", *YEAR), "host", "", "is a user's certificate"),
    "rsa": (("-h", "-n", "HOST", *YEAR), "old", "", ""),
    "sha1": (("-h", "-n", "HOST", "-t", "ssh-rsa", *YEAR), "old", "", "is signed with SHA-1"),
    "option": (("-h", "-n", "HOST", "-O", "critical:x@y=1", *YEAR), "host", "", "critical options that are not known"),
    "revoked": (("-h", "-n", "HOST", *YEAR), "host", "@revoked * CA\n", "signed by one"),
    "expired, known": (("-h", "-n", "HOST", "-V", "-2d:-1d"), "host", "[HOST]:2222 KEY\n", ""),
}


@pytest.mark.parametrize("case", CERTIFICATES)
def test_host_certificates_count_as_for_openssh(bed: Bed, authorities: Path, config: Path, case: str) -> None:
    options, authority, more, why = CERTIFICATES[case]
    certify(bed, authorities, *options, authority=authority)
    host = bed[1]
    text = f"@cert-authority [HOST]:2222 CA\n{more}".replace("HOST", host.address)
    text = text.replace("CA", public(authorities / authority)).replace("KEY", public(host.folder / "host_key"))
    known_hosts_of(config).write_text(text, encoding="ascii")
    assert openssh(config, "b") == (not why)
    if why:
        added: list[str] = []
        error = no_login(config, "b", accept_new=added.append)
        assert error.code == "SSH-HOST-KEY"
        assert why in error.message
        assert added == []
    else:
        log_in(config, "b")


def test_a_certificate_that_was_changed(bed: Bed, authorities: Path, config: Path) -> None:
    from cpupp.launch.host_certificate import read_certificate

    certify(bed, authorities, "-h", "-n", "HOST", *YEAR)
    import base64

    blob = base64.b64decode((bed[1].folder / "host_key-cert.pub").read_text(encoding="ascii").split()[1])
    assert read_certificate(blob).problem == ""
    longer = blob.replace(bed[1].address.encode(), bed[1].address.encode()[:-1] + b"*")
    assert read_certificate(longer).problem == "has a wrong signature"
    for end in range(0, len(blob), 7):
        with pytest.raises(ValueError):  # noqa: PT011  # whatever it says: no other error, and no certificate
            read_certificate(blob[:end])


def test_an_authority_for_other_hosts_is_none(bed: Bed, authorities: Path, config: Path) -> None:
    certify(bed, authorities, "-h", "-n", "HOST", *YEAR)
    known_hosts_of(config).write_text(f"@cert-authority elsewhere {public(authorities / 'host')}\n", encoding="ascii")
    assert not openssh(config, "b")
    assert "certificate" not in no_login(config, "b").message


def test_a_list_of_revoked_keys(bed: Bed, config: Path, tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    key = bed[0].folder / "host_key.pub"
    put_first(config, f"Host a\n  RevokedHostKeys {revoked}\n")
    assert no_login(config, "a").code == "SSH-CONFIG"  # cannot be read: nobody gets through
    revoked.write_text("# nothing\n", encoding="ascii")
    log_in(config, "a")
    revoked.write_bytes(key.read_bytes())
    assert "is revoked by" in no_login(config, "a").message
    keygen("-k", "-f", revoked, key)
    assert "is revoked by" in no_login(config, "a").message


def unknown_to_server(config: Path, bed: Bed, folder: Path, *, named: bool = True) -> Path:
    """A key that no server knows by itself takes the place of the bed's."""
    key = new_key(folder / "mine")
    text = config.read_text(encoding="utf-8")
    line = f"  IdentityFile {key}" if named else ""
    config.write_text(text.replace(f"  IdentityFile {bed.key}", line), encoding="utf-8")
    return key


def test_certificates_of_the_user(bed: Bed, authorities: Path, config: Path, tmp_path: Path) -> None:
    key = unknown_to_server(config, bed, tmp_path)
    assert no_login(config, "a").code == "SSH-AUTH"
    keygen("-s", authorities / "user", "-I", "me", "-n", "root", *YEAR, f"{key}.pub")
    beside = tmp_path / "mine-cert.pub"
    log_in(config, "a")
    beside.rename(tmp_path / "elsewhere")
    assert no_login(config, "a").code == "SSH-AUTH"
    put_first(config, f"Host a\n  CertificateFile {tmp_path}/elsewhere\n")
    log_in(config, "a")


@pytest.mark.parametrize("alone", [False, True], ids=["with its key", "alone"])
def test_a_certificate_in_the_agent(bed: Bed, authorities: Path, config: Path, tmp_path: Path, alone: bool) -> None:
    key = unknown_to_server(config, bed, tmp_path, named=False)
    keygen("-s", authorities / "user", "-I", "me", "-n", "root", *YEAR, f"{key}.pub")
    put_first(config, f"Host a\n  IdentitiesOnly no\n  IdentityAgent {tmp_path}/agent\n")
    copy = tmp_path / "copy.pub"  # no certificate beside it
    copy.write_bytes((tmp_path / "mine.pub").read_bytes())
    with ssh_agent(tmp_path / "agent", key):
        env = {**os.environ, "SSH_AUTH_SOCK": str(tmp_path / "agent")}
        if alone:
            subprocess.run(["ssh-add", "-q", "-d", copy], env=env, check=True, capture_output=True)
        listed = subprocess.run(["ssh-add", "-l"], env=env, check=True, capture_output=True, text=True).stdout
        assert len(listed.splitlines()) == 2 - alone
        log_in(config, "a")


def test_a_key_whose_certificate_is_worthless(bed: Bed, authorities: Path, config: Path, tmp_path: Path) -> None:
    keygen("-s", authorities / "user", "-I", "me", "-n", "root", "-V", "-2d:-1d", bed.key.with_suffix(".pub"))
    try:
        log_in(config, "a")
    finally:
        bed.key.with_name("id_ed25519-cert.pub").unlink()


def test_eight_keys_in_the_agent(bed: Bed, config: Path, tmp_path: Path) -> None:
    keys = [new_key(tmp_path / f"key{number}") for number in range(8)]
    unknown_to_server(config, bed, tmp_path, named=False)
    put_first(config, f"Host a\n  IdentitiesOnly no\n  IdentityAgent {tmp_path}/agent\n")
    with ssh_agent(tmp_path / "agent", *keys, bed.key):
        log_in(config, "a")
        # The same with a name for the key: it goes first, and is the agent's.
        put_first(config, f"Host a\n  IdentitiesOnly yes\n  IdentityFile {bed.key}\n")
        before = bed[0].sshd_log.count("Failed publickey")
        log_in(config, "a")
        assert bed[0].sshd_log.count("Failed publickey") == before
        put_first(config, "Host a\n  IdentityAgent none\n  IdentityFile none\n")
        # The first IdentityAgent counts, and none is none; the file is still read.
        log_in(config, "a")


def test_new_keys_are_added_once_asked_for(bed: Bed, config: Path, tmp_path: Path) -> None:
    known = known_hosts_of(config)
    known.unlink()
    told: list[str] = []
    assert "--accept-new" in no_login(config, "a").hint
    log_in(config, "a", accept_new=told.append)
    log_in(config, "a", accept_new=told.append)
    assert len(told) == 1
    assert f"added its ssh-ed25519 key {keygen('-lf', bed[0].folder / 'host_key.pub').split()[1]}" in told[0]
    assert stat.S_IMODE(known.stat().st_mode) == 0o600
    put_first(config, "Host b\n  HashKnownHosts yes\n")
    known.write_text(known.read_text(encoding="ascii").rstrip("\n"), encoding="ascii")
    log_in(config, "b", accept_new=told.append)
    first, second = known.read_text(encoding="ascii").splitlines()
    assert first.startswith(f"{bed[0].address} ssh-ed25519 ")
    assert second.startswith("|1|")
    assert openssh(config, "a")
    assert openssh(config, "b")


def test_no_changed_key_is_ever_accepted(bed: Bed, config: Path) -> None:
    known = known_hosts_of(config)
    for kind, code in (("ssh-ed25519", "SSH-HOST-KEY-CHANGED"), ("ecdsa", "SSH-HOST-KEY")):
        other = new_key(config.parent / f"other-{kind}", *(() if kind == "ssh-ed25519" else ("-t", "ecdsa")))
        text = f"{bed[0].address} {public(other)}\n"
        known.write_text(text, encoding="ascii")
        # A host that is known by a key of another kind is no new host either.
        put_first(config, "Host a\n  StrictHostKeyChecking no\n")
        assert no_login(config, "a", accept_new=lambda words: None).code == code
        assert known.read_text(encoding="ascii") == text


def test_a_host_whose_keys_the_config_keeps_nowhere(bed: Bed, config: Path) -> None:
    put_first(config, "Host a\n  UserKnownHostsFile /dev/null\n  StrictHostKeyChecking no\n")
    error = no_login(config, "a", accept_new=lambda words: None)
    assert error.code == "SSH-HOST-KEY"
    assert "UserKnownHostsFile" in error.hint


def test_a_passphrase_is_asked_for_once(bed: Bed, config: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.write_bytes(bed.key.read_bytes())
    locked.chmod(0o600)
    keygen("-p", "-N", "secret words", "-f", locked)
    home = tmp_path / "home" / ".ssh"
    home.mkdir(parents=True)
    text = config.read_text(encoding="utf-8").replace(str(bed.key), str(locked))
    (home / "config").write_text(text, encoding="utf-8")
    cluster = tmp_path / "cluster.yaml"
    lines = "".join(f"  - {{name: {name}, ssh: {target}}}\n" for name, target in (("a", "a"), ("b", "b"), ("c", "far")))
    put_first(home / "config", f"Host far\n  HostName {bed[1].address}\n  Port 2222\n  ProxyJump a\n")
    cluster.write_text(f"name: x\nmodel: {{path: /none}}\nparallel: {{pipeline: 3}}\nhosts:\n{lines}", encoding="utf-8")
    argv = [sys.executable, "-m", "cpupp", "doctor", str(cluster)]
    env = {**os.environ, "HOME": str(home.parent), "TERM": "dumb"}

    shown = on_a_terminal(argv, env, ["wrong", "secret words"])
    assert shown.count(f"passphrase for {locked}: ") == 2
    assert shown.count("wrong; passphrase") == 1
    assert "secret words" not in shown
    assert shown.count("SSH-AUTH") == shown.count("no key was accepted") == 0

    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert f"{locked} needs its passphrase: ssh-add it" in " ".join(done.stdout.split())
    assert "passphrase for" not in done.stdout + done.stderr


def on_a_terminal(argv: list[str], env: dict[str, str], answers: list[str]) -> str:
    """Run a command on a terminal of its own, type one answer for each `passphrase for`; return what it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(argv[0], argv, env)
    shown = ""
    end = time.monotonic() + 60
    asked = 0
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        shown += data.decode("utf-8", "replace")
        while (
            asked < len(answers)
            and shown.count(": ", shown.rfind("passphrase for"))
            and (shown.count("passphrase for") > asked)
        ):
            time.sleep(0.1)
            os.write(terminal, answers[asked].encode() + b"\n")
            asked += 1
    os.close(terminal)
    os.waitpid(pid, 0)
    return shown.replace("\r\n", "\n")
