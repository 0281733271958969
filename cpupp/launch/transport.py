"""Ways to a host: start the agent there and hold the two ends of its pipes.

`LocalTransport` is this machine, `SshTransport` (launch/ssh.py) is OpenSSH on another. Both run the same constant text.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from pathlib import Path
from typing import Protocol

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.bundle import START_AGENT

STDERR_KEPT = 8192  # bytes of the remote side's last words that are kept for messages


class ConnectionLostError(Exception):
    """The connection ended while it was being used; the text says how."""


class Connection(Protocol):
    """The pipes of one running agent. One thread may send while another receives."""

    def send(self, data: bytes) -> None:
        """Write all bytes. Raises ConnectionLostError."""

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next bytes, empty at the end, None when none came within the time. Raises ConnectionLostError."""

    def exit_status(self, timeout_s: float) -> int | None:
        """Return the remote command's exit status (negative: signal), None when it is unknown."""

    def last_words(self) -> str:
        """Return the end of what the remote side wrote to stderr."""

    def send_end(self) -> None:
        """Close the agent's stdin, which ends it."""

    def close(self) -> None:
        """Drop the connection at once. Never raises."""


class Transport(Protocol):
    """A way to one host."""

    @property
    def target(self) -> str:
        """The host as the user knows it, for messages."""

    def connect(self, host: str) -> Connection:
        """Reach the host and run `START_AGENT` there. Raises CpuppError naming `host`."""


class LocalTransport:
    """This machine: the agent is a child process in a session of its own, so that Ctrl-C does not reach it."""

    target = "this machine"

    def __init__(self, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        self._cwd = cwd
        self._env = env

    def connect(self, host: str) -> Connection:
        """Start the agent through /bin/sh. Raises CpuppError LOCAL-START."""
        environment = dict(os.environ if self._env is None else self._env)
        # They describe how the user came to the launcher, not how the launcher came to this host.
        for name in ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY"):
            environment.pop(name, None)
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", START_AGENT],
                cwd=self._cwd,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise CpuppError(
                "LOCAL-START", f"cannot start /bin/sh: {error}", where=host, exit_code=ExitCode.UNREACHABLE
            ) from None
        return LocalConnection(process)


class LocalConnection:
    """The pipes of an agent on this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self.process = process
        self._in, self._out, self._err = process.stdin, process.stdout, process.stderr
        os.set_blocking(self._in.fileno(), False)
        self._words = b""
        self._err_open = True

    def send(self, data: bytes) -> None:
        """Write all bytes. Raises ConnectionLostError."""
        view = memoryview(data)
        try:
            while view:
                # A stopped agent fills the pipe; `close` must still get through, so no write may block for ever.
                if select.select([], [self._in], [], 0.5)[1]:
                    with contextlib.suppress(BlockingIOError):
                        view = view[os.write(self._in.fileno(), view) :]
        except (OSError, ValueError) as error:
            raise ConnectionLostError(f"the agent's stdin is closed ({error})") from None

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next bytes, empty at the end, None after the time-out. Raises ConnectionLostError."""
        end = time.monotonic() + timeout_s
        while True:
            sources = [self._out, self._err] if self._err_open else [self._out]
            try:
                ready, _, _ = select.select(sources, [], [], max(0.0, end - time.monotonic()))
                if self._err in ready:
                    self._keep_words(os.read(self._err.fileno(), 65536))
                if self._out in ready:
                    return os.read(self._out.fileno(), 1 << 17)
            except (OSError, ValueError) as error:
                raise ConnectionLostError(f"the agent's stdout is closed ({error})") from None
            if not ready:
                return None

    def exit_status(self, timeout_s: float) -> int | None:
        """Return the agent's exit status, None when it still runs after the time-out."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """Return the end of the agent's stderr."""
        while self._err_open and not self._err.closed and select.select([self._err], [], [], 0)[0]:
            self._keep_words(os.read(self._err.fileno(), 65536))
        return self._words.decode("utf-8", "replace").strip()

    def _keep_words(self, data: bytes) -> None:
        self._err_open = self._err_open and bool(data)
        self._words = (self._words + data)[-STDERR_KEPT:]

    def send_end(self) -> None:
        """Close the agent's stdin."""
        with contextlib.suppress(OSError, ValueError):
            self._in.close()

    def close(self) -> None:
        """Close all pipes; the agent ends by itself, and a thread waits for it so that no zombie stays."""
        self.send_end()
        if self.exit_status(0.5) is None:
            threading.Thread(target=self.process.wait, name="agent-end", daemon=True).start()
        for pipe in (self._out, self._err):
            pipe.close()
