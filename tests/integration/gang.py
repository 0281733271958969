"""Ranks for tests: real processes with real gloo groups, kept alive between tests because torch takes seconds to load.

    with Gang([2, 2]) as gang:                      # four ranks on two hosts with a /dev/shm of their own each
        gang.run(some_function, arg, ranks=3)       # some_function(rank, arg) on ranks 0 to 2, in one world

A host is a mount namespace with a fresh tmpfs on /dev/shm; the first host is this machine as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.testbed import need

ROOT = Path(__file__).parents[2]
KEY = b"cpupp tests"
ANSWER_SECONDS = 600.0  # importing vLLM on a busy machine takes minutes; only a hang takes longer
EXIT_SECONDS = 10.0


class RankError(Exception):
    """A function failed on a rank; holds that rank's traceback."""


class Gang:
    """sizes: number of ranks on each host; shm_size: of the tmpfs on the /dev/shm of the hosts but the first.

    load: a module that each host loads before it forks its ranks.
    """

    def __init__(self, sizes: list[int], shm_size: str = "256m", load: str = "torch.distributed") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cpupp-gang-", dir="/var/tmp")
        self._calls = 0
        address = f"{self._folder.name}/socket"
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._ranks: dict[int, Connection] = {}
        with Listener(address, "AF_UNIX", authkey=KEY) as listener:
            first = 0
            for host, count in enumerate(sizes):
                argv = [sys.executable, "-m", "tests.integration.gang", address, str(first), str(count), load]
                if host:
                    need.need_root()
                    mount = f'mount -t tmpfs -o size={shm_size} tmpfs /dev/shm && exec "$@"'
                    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", *argv]
                self._hosts.append(subprocess.Popen(argv, cwd=ROOT, start_new_session=True))
                first += count
            self._pids: list[int] = []
            for _ in range(first):
                connection = listener.accept()
                rank, pid = connection.recv()
                self._ranks[rank] = connection
                self._pids.append(pid)

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> None:
        """Start `function(rank, *args)` on the first `ranks` ranks, in a world of its own."""
        self._calls += 1
        size = len(self._ranks) if ranks is None else ranks
        store = f"{self._folder.name}/store{self._calls}"
        for rank in range(size):
            self._ranks[rank].send((store, size, function.__module__, function.__qualname__, args))

    def answer(self, rank: int) -> Any:
        """The result of `start` on this rank. Raises RankError with the traceback from there."""
        if not self._ranks[rank].poll(ANSWER_SECONDS):
            self.close()
            raise RankError(f"rank {rank} did not answer within {ANSWER_SECONDS:.0f} s")
        good, result = self._ranks[rank].recv()
        if not good:
            raise RankError(f"rank {rank}:\n{result}")
        return result

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """`start`, then the answers of all ranks."""
        self.start(function, *args, ranks=ranks)
        size = len(self._ranks) if ranks is None else ranks
        results: list[Any] = []
        failures: list[RankError] = []
        for rank in range(size):
            try:
                results.append(self.answer(rank))
            except RankError as error:
                failures.append(error)
        if failures:
            raise RankError("\n".join(map(str, failures)))
        return results

    def close(self) -> None:
        """End all ranks: they exit when their connection closes, or are killed."""
        for connection in self._ranks.values():
            connection.close()
        for host in self._hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.wait(EXIT_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
            host.wait()
        # Intel's OpenMP leaves these behind when its process does not take it apart
        for pid in [*self._pids, *(host.pid for host in self._hosts)]:
            for path in Path("/dev/shm").glob(f"__KMP_REGISTERED_LIB_{pid}_*"):
                path.unlink(missing_ok=True)
        self._folder.cleanup()


def _serve(address: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = Client(address, "AF_UNIX", authkey=KEY)
    connection.send((rank, os.getpid()))
    while True:
        try:
            store, size, module, name, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            function = getattr(importlib.import_module(module), name)
            dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
            dist.barrier()  # else a rank that is done at once leaves while others still connect to it
            answer = True, function(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        connection.send(answer)


def main() -> None:
    """The process of one host: loads torch once, forks the ranks, ends when they have ended."""
    address, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    importlib.import_module(sys.argv[4])  # before the fork, so that the ranks share the seconds it takes

    for rank in range(first, first + count):
        if os.fork() == 0:
            with _leaving():
                _serve(address, rank)
    with _leaving():
        for _ in range(count):
            os.wait()


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """End the process after the block, without the seconds in which Python takes torch apart."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
