"""Host certificates, checked by OpenSSH's rules: signed by a known authority, for this host, now."""

from __future__ import annotations

import struct
from collections.abc import Container
from dataclasses import dataclass

SUFFIX = "-cert-v01@openssh.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCertificate:
    """What a certificate says; `problem` is what makes it worthless whoever looks at it, empty when nothing does.

    key: blob of the host key that it is about; authority: blob of the key that signed it; principals: names of hosts;
    valid_after, valid_before: seconds since 1970, the second exclusive.
    """

    key: bytes
    authority: bytes
    principals: tuple[str, ...]
    valid_after: int
    valid_before: int
    problem: str


def read_certificate(blob: bytes) -> HostCertificate:
    """Read a certificate and verify its signature. Raises ValueError for what is no certificate that can be read."""
    import base64

    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        (length,) = struct.unpack_from(">I", blob)
        line = blob[4 : 4 + length] + b" " + base64.b64encode(blob)
        certificate = serialization.load_ssh_public_identity(line)
    except (UnsupportedAlgorithm, struct.error) as error:
        raise ValueError(str(error)) from None
    if not isinstance(certificate, serialization.SSHCertificate):
        raise ValueError("a plain key, not a certificate")
    problem = ""
    if certificate.type is not serialization.SSHCertificateType.HOST:
        problem = "is a user's certificate, not a host's"
    elif certificate.critical_options:
        names = ", ".join(sorted(name.decode("utf-8", "replace") for name in certificate.critical_options))
        problem = f"has critical options that are not known: {names}"
    elif _signature_kind(blob) == b"ssh-rsa":
        problem = "is signed with SHA-1"
    else:
        try:
            certificate.verify_cert_signature()
        except (InvalidSignature, UnsupportedAlgorithm, ValueError, AssertionError):
            problem = "has a wrong signature"
    return HostCertificate(
        key=_blob(certificate.public_key()),
        authority=_blob(certificate.signature_key()),
        principals=tuple(name.decode("utf-8", "replace") for name in certificate.valid_principals),
        valid_after=certificate.valid_after,
        valid_before=certificate.valid_before,
        problem=problem,
    )


def refusal(certificate: HostCertificate, host: str, now: float, revoked: Container[bytes] = ()) -> str:
    """Return why the certificate does not prove that a server is `host`, empty when it does.

    host: the name without a port, or the HostKeyAlias; now: seconds since 1970. That the authority may speak for the
    host is for the caller to check. Where versions of OpenSSH differ, the stricter rule holds: a certificate without
    principals is for no host (10.3 and newer), and a principal is no pattern (older ones).
    """
    if certificate.problem:
        return certificate.problem
    if certificate.key in revoked or certificate.authority in revoked:
        return "is about a revoked key, or signed by one"
    if now < certificate.valid_after:
        return "is not valid yet"
    if now >= certificate.valid_before:
        return "has expired"
    if host.lower() not in certificate.principals:
        return f"is for {', '.join(certificate.principals) or 'no host at all'}, not for {host}"
    return ""


def _signature_kind(blob: bytes) -> bytes:
    """The kind of the signature, which `cryptography` verifies but does not tell."""
    place = 0

    def string() -> bytes:
        nonlocal place
        (length,) = struct.unpack_from(">I", blob, place)
        place += 4 + length
        return blob[place - length : place]

    kind = string()
    for _ in range(1 + (1 if kind.startswith(b"ssh-ed25519") else 2)):  # nonce, key
        string()
    place += 8 + 4  # serial number, type
    string(), string()  # key id, principals
    place += 8 + 8  # validity
    for _ in range(4):  # critical options, extensions, reserved, authority
        string()
    signature = string()
    (length,) = struct.unpack_from(">I", signature)
    return signature[4 : 4 + length]


def _blob(key: object) -> bytes:
    import base64

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    text: bytes = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)  # type: ignore[attr-defined]
    return base64.b64decode(text.split()[1])
