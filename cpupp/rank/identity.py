"""Which ranks of a group share memory: proved by an exchange in which every rank always takes part.

Names prove nothing: two containers of one machine can have one hostname each, two machines can have the same hostname,
and vLLM's own check compares strings that agree across hosts (vllm #46716) or differ on one (0.29 and later). So each
rank says which kernel booted it and which device its /dev/shm is, writes a file of random content there, and reads the
files of the others. Two ranks share memory when all three agree, in both directions.

A local failure is a field of the exchange, never a reason to leave it: all ranks see the same rows and come to the
same verdict (vllm #33628, #34169: a rank that decides alone leaves its peers waiting).
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

SHM_DIR = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Exchange = Callable[[bytes], list[bytes]]
"""Gives this rank's row (the same length on all ranks), returns the rows of all ranks in group order."""


class Obstacle(IntEnum):
    """Why a rank cannot use shared memory. The numbers travel in the exchange."""

    NONE = 0
    FORCED = 1
    ARCHITECTURE = 2
    NO_FOLDER = 3
    READ_ONLY = 4
    NO_ROOM = 5
    NOT_PERMITTED = 6
    ATTACH = 7
    INTERNAL = 8

    @property
    def text(self) -> str:
        """The obstacle in words, to follow 'rank 3 cannot use shared memory: '."""
        return {
            Obstacle.NONE: "nothing is wrong",
            Obstacle.FORCED: "the cluster file forces gloo",
            Obstacle.ARCHITECTURE: "its CPU is not x86-64, whose total store order the shared-memory links need",
            Obstacle.NO_FOLDER: "it has no /dev/shm",
            Obstacle.READ_ONLY: "its /dev/shm is read-only",
            Obstacle.NO_ROOM: "there is no room in its /dev/shm",
            Obstacle.NOT_PERMITTED: "it may not write to its /dev/shm",
            Obstacle.ATTACH: "it could not map the segment of another rank",
            Obstacle.INTERNAL: "an unexpected error, see its log",
        }[self]

    @classmethod
    def of(cls, error: BaseException) -> Obstacle:
        """The obstacle that an error of a system call means."""
        by_number = {
            errno.EROFS: cls.READ_ONLY,
            errno.ENOSPC: cls.NO_ROOM,
            errno.EDQUOT: cls.NO_ROOM,
            errno.ENOMEM: cls.NO_ROOM,
            errno.EACCES: cls.NOT_PERMITTED,
            errno.EPERM: cls.NOT_PERMITTED,
            errno.ENOENT: cls.NO_FOLDER,
            errno.ENOTDIR: cls.NO_FOLDER,
        }
        number = error.errno if isinstance(error, OSError) else None
        return by_number.get(number, cls.INTERNAL) if number is not None else cls.INTERNAL


_ROW = struct.Struct("<16s16s16sQQBBH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One rank's row: kernel, device and inode of its /dev/shm, nonce (name and content), flags, threads.

    device, inode: 0 when the rank could not put its nonce there.
    """

    boot_id: bytes
    token: bytes
    secret: bytes
    device: int
    inode: int
    obstacle: Obstacle
    demanded: bool
    threads: int

    def encode(self) -> bytes:
        """The row as bytes, always of the same length."""
        return _ROW.pack(
            self.boot_id,
            self.token,
            self.secret,
            self.device & 0xFFFFFFFFFFFFFFFF,
            self.inode & 0xFFFFFFFFFFFFFFFF,
            self.obstacle,
            self.demanded,
            min(self.threads, 0xFFFF),
        )

    @classmethod
    def decode(cls, row: bytes) -> Identity:
        """Read what `encode` wrote."""
        boot_id, token, secret, device, inode, obstacle, demanded, threads = _ROW.unpack(row)
        return cls(
            boot_id=boot_id,
            token=token,
            secret=secret,
            device=device,
            inode=inode,
            obstacle=Obstacle(obstacle),
            demanded=bool(demanded),
            threads=threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What all ranks concluded, equal on all of them. Numbers are positions in the group.

    subsets: disjoint, ascending, every position once; ranks of one subset share memory. identities: the rows.
    """

    subsets: tuple[tuple[int, ...], ...]
    identities: tuple[Identity, ...]

    def subset_of(self, position: int) -> tuple[int, ...]:
        """The positions that share memory with this one, itself included."""
        return next(s for s in self.subsets if position in s)

    @property
    def tag(self) -> str:
        """Eight hex digits that all ranks know and no other group has: part of the segments' names."""
        mixed = bytes(len(self.identities[0].token))
        for identity in self.identities:
            mixed = bytes(a ^ b for a, b in zip(mixed, identity.token, strict=True))
        return mixed[:4].hex()


def exchange_over(group: dist.ProcessGroup) -> Exchange:
    """An exchange over a gloo group: one all_gather of uint8 tensors of equal size, no pickle."""

    def exchange(row: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, mine, group=group)
        return [r.numpy().tobytes() for r in rows]

    return exchange


def prove(
    exchange: Exchange,
    position: int,
    *,
    prefix: str,
    obstacle: Obstacle = Obstacle.NONE,
    demanded: bool = False,
    threads: int = 1,
    shm_dir: Path = SHM_DIR,
    boot_id_file: Path = BOOT_ID,
) -> Verdict:
    """Take part in the exchange and return the verdict, equal on all ranks.

    position: this rank's place in the group; prefix: start of the nonce file's name (`cpupp-<run>-<attempt>`);
    obstacle: a reason known beforehand why this rank cannot use shared memory; demanded: the user insists on it.
    The nonce file is gone when this returns or raises. Raises what the exchange raises (a peer that died).
    """
    token, secret = secrets.token_bytes(16), secrets.token_bytes(16)
    nonce = shm_dir / f"{prefix}-n-{token.hex()}"
    try:
        device, inode, found = _write_nonce(nonce, secret)
        mine = Identity(
            boot_id=_boot_id(boot_id_file, token),
            token=token,
            secret=secret,
            device=device,
            inode=inode,
            obstacle=obstacle or architecture_obstacle() or found,
            demanded=demanded,
            threads=threads,
        )
        identities = [Identity.decode(row) for row in exchange(mine.encode())]
        seen = bytes(
            i == position or _reads(other, mine, shm_dir / f"{prefix}-n-{other.token.hex()}")
            for i, other in enumerate(identities)
        )
        matrix = exchange(seen)
    finally:
        with suppress(OSError):  # a folder that went away or turned read-only: the verdict matters, not the file
            nonce.unlink(missing_ok=True)
    return Verdict(subsets=_subsets(matrix), identities=tuple(identities))


def architecture_obstacle() -> Obstacle:
    """ARCHITECTURE on machines without total store order."""
    return Obstacle.NONE if platform.machine() in ("x86_64", "AMD64") else Obstacle.ARCHITECTURE


def _boot_id(path: Path, fallback: bytes) -> bytes:
    try:
        return bytes.fromhex(path.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return fallback  # unknown: equal to nobody's


def _write_nonce(nonce: Path, secret: bytes) -> tuple[int, int, Obstacle]:
    """Device and inode of the folder (0 without the file), and what was in the way.

    Without a free page the file stays empty. It is a proof all the same, as nobody else has its name: ranks that share
    a full /dev/shm must be seen to share it, for the plan takes their whole group to gloo.
    """
    device = inode = 0
    try:
        where = nonce.parent.stat()
        fd = os.open(nonce, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        device, inode = where.st_dev, where.st_ino
        try:
            os.write(fd, secret)
        finally:
            os.close(fd)
    except OSError as error:
        return device, inode, Obstacle.of(error)
    return device, inode, Obstacle.NONE


def _reads(other: Identity, mine: Identity, nonce: Path) -> bool:
    if (other.boot_id, other.device, other.inode) != (mine.boot_id, mine.device, mine.inode):
        return False
    try:
        fd = os.open(nonce, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)  # as a segment is opened: same permission needed
    except OSError:
        return False
    try:
        return os.read(fd, len(other.secret) + 1) in (other.secret, b"")
    except OSError:
        return False
    finally:
        os.close(fd)


def _subsets(matrix: Sequence[bytes]) -> tuple[tuple[int, ...], ...]:
    subsets: list[list[int]] = []
    for i in range(len(matrix)):
        for subset in subsets:
            if all(matrix[i][j] and matrix[j][i] for j in subset):
                subset.append(i)
                break
        else:
            subsets.append([i])
    return tuple(tuple(s) for s in subsets)
