"""One agent on one host, as the launcher sees it: requests with replies, events, heartbeats, and an end in time."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cpupp.errors import CpuppError, CpuppErrors, ExitCode
from cpupp.launch.bundle import agent_payload
from cpupp.launch.transport import Connection, ConnectionLostError, LocalTransport, Transport
from cpupp.plan.cluster import ClusterSpec, HostSpec
from cpupp.plan.failures import exit_text

PROTOCOL = 1
MARK = b"@cpupp "
NOISE_KEPT = 4096  # bytes of what the host's shell printed before the agent's hello, kept for messages
LONGEST_LINE = 64 << 20

T = TypeVar("T")
EventHandler = Callable[[str, dict[str, Any]], None]


class AgentSession:
    """The connection to the agent of one host.

    on_event(host, event), which may be replaced at any time, is called by the session's reading thread for every event
    of the agent (output, report, spawned, process_exited, exited, keeper_lost, gone), in order, and once with
    `{"event": "lost", "reason": ...}` when the connection ends before `close`. It must return quickly; it must not call
    `request` and wait. leash_s: how long either side waits for a sign of the other; heartbeat_s: how often this side
    gives one.
    """

    def __init__(
        self,
        host: str,
        transport: Transport,
        on_event: EventHandler | None = None,
        *,
        leash_s: float = 20.0,
        heartbeat_s: float = 3.0,
        grace_s: float = 5.0,
    ) -> None:
        self.host = host
        self.transport = transport
        self.leash_s = leash_s
        self.heartbeat_s = heartbeat_s
        self.grace_s = grace_s
        self.hello: dict[str, Any] = {}
        self.lost_reason = ""
        self.on_event = on_event or (lambda host, event: None)
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._state = threading.Lock()
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self, timeout_s: float = 30.0) -> None:
        """Connect, start the agent, wait for its hello. Raises CpuppError."""
        connection = self.transport.connect(self.host)
        try:
            rest = self._greet(connection, timeout_s)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        for target, name in ((self._read, "read"), (self._beat, "beat")):
            arguments = (rest,) if name == "read" else ()
            thread = threading.Thread(target=target, args=arguments, name=f"{name}-{self.host}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self.request("configure", leash_s=self.leash_s, grace_s=self.grace_s)

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""
        return self._connection is not None and not self._ended.is_set()

    def request(self, op: str, *, timeout: float = 60.0, **params: Any) -> Any:
        """Make a request and return the reply's data. Thread-safe; many may be in flight.

        Raises CpuppError: the agent's own code and words; HOST-LOST when the connection ends; HOST-SLOW after
        `timeout` seconds (the agent may still be at it).
        """
        number, future = self._begin(op, params)
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise CpuppError(
                "HOST-SLOW",
                f"no answer to {op!r} within {timeout:g} s",
                hint="the host may be overloaded, or one of its disks may hang",
                where=self.host,
                exit_code=ExitCode.UNREACHABLE,
            ) from None
        finally:
            with self._state:
                self._pending.pop(number, None)

    def detach(self, timeout_s: float = 30.0, **params: Any) -> None:
        """Leave what runs on the host to itself: the agent stays and guards it, this connection ends.

        params: of the operation, `record` and `patterns`. Raises CpuppError, and then the agent is on its leash still.
        """
        assert self._connection is not None
        self.request("detach", timeout=timeout_s, **params)
        self._closing.set()
        self._connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self.heartbeat_s)

    def close(self, timeout_s: float = 12.0) -> None:
        """Stop what runs on the host, end the agent, close the connection. Never raises, never takes longer.

        When the agent does not answer, its leash ends everything without us.
        """
        if self._connection is None:
            return
        end = time.monotonic() + timeout_s
        if not self._ended.is_set() and not self._closing.is_set():
            with contextlib.suppress(CpuppError):
                self.request("stop", timeout=timeout_s, grace=self.grace_s)
        self._closing.set()
        self._connection.send_end()
        self._ended.wait(max(0.0, end - time.monotonic()))
        self._connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.1, end - time.monotonic()))

    def __enter__(self) -> AgentSession:
        if self._connection is None:
            self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, op: str, params: dict[str, Any]) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._state:
            if self._connection is None or self._ended.is_set() or self._closing.is_set():
                raise self._lost_error(op)
            number = next(self._numbers)
            self._pending[number] = future
        line = json.dumps({"id": number, "op": op, **params}).encode("ascii") + b"\n"
        try:
            with self._sending:
                self._connection.send(line)
        except ConnectionLostError:
            with self._state:
                self._pending.pop(number, None)
            raise self._lost_error(op) from None
        return number, future

    def _lost_error(self, op: str) -> CpuppError:
        reason = self.lost_reason or "the connection is closed"
        return CpuppError("HOST-LOST", f"{op}: {reason}", where=self.host, exit_code=ExitCode.UNREACHABLE)

    def _greet(self, connection: Connection, timeout_s: float) -> bytes:
        """Send the agent's source and read up to its hello; return the bytes after it."""
        end = time.monotonic() + timeout_s
        noise = b""
        # A shell that ends at once breaks the pipe; what it printed says more than that.
        with contextlib.suppress(ConnectionLostError):
            connection.send(agent_payload())
        while time.monotonic() < end:
            try:
                data = connection.receive(max(0.01, end - time.monotonic()))
            except ConnectionLostError:
                data = b""
            if data == b"":
                raise self._no_agent(connection, noise)
            noise += data or b""
            start = noise.find(MARK + b"{")
            if start >= 0 and b"\n" in noise[start:]:
                line, _, rest = noise[start:].partition(b"\n")
                self.hello = json.loads(line[len(MARK) :])
                return rest
            if start < 0:
                noise = noise[-NOISE_KEPT:]
        raise CpuppError(
            "AGENT-START",
            f"the agent did not answer within {timeout_s:g} s{_quoted(connection.last_words() or noise)}",
            where=self.host,
            hint="a start-up file of the login shell may wait for input",
            exit_code=ExitCode.UNREACHABLE,
        )

    def _no_agent(self, connection: Connection, noise: bytes) -> CpuppError:
        status = connection.exit_status(2.0)
        words = _quoted(connection.last_words() or noise)
        shown = "without an exit status" if status is None else f"with exit status {status}"
        if status in (78, 126, 127):  # 78: the agent's own word for a Python that is too old
            return CpuppError(
                "SSH-NO-PYTHON",
                f"cannot run python3 on {self.transport.target} (exit status {status}){words}",
                where=self.host,
                hint="install python3 (3.8 or newer) there, on the PATH of non-interactive shells",
                exit_code=ExitCode.UNREACHABLE,
            )
        return CpuppError(
            "AGENT-START",
            f"the agent on {self.transport.target} ended {shown} before it answered{words}",
            where=self.host,
            # The agent's own first line went to somebody else.
            hint="a start-up file of the login shell there reads the input that is the agent's"
            if "readline()" in words or "invalid literal for int()" in words
            else "run `python3 -V` there by hand, over the same connection",
            exit_code=ExitCode.UNREACHABLE,
        )

    def _read(self, rest: bytes) -> None:
        reason = "the session's reading thread failed"
        try:
            reason = self._read_to_end(rest)
        finally:
            self._end(reason)

    def _read_to_end(self, rest: bytes) -> str:
        """Take in lines until the connection ends; return why it did."""
        assert self._connection is not None
        heard = time.monotonic()
        while True:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._take(line)
            try:
                data = self._connection.receive(1.0)
            except ConnectionLostError as error:
                return str(error)
            if data == b"" or len(rest) > LONGEST_LINE:
                return self._how_it_ended()
            if data:
                heard = time.monotonic()
                rest += data
            elif time.monotonic() - heard > self.leash_s:
                return f"no sign of life for {self.leash_s:g} s"

    def _how_it_ended(self) -> str:
        assert self._connection is not None
        status = self._connection.exit_status(1.0)
        words = _quoted(self._connection.last_words())
        if status is not None and status < 0:
            return f"the agent was {exit_text(status)}{words}"
        return f"the agent ended{'' if status is None else f' with exit status {status}'}{words}"

    def _take(self, line: bytes) -> None:
        if not line.startswith(MARK):
            return  # a background job of the login shell may print at any time
        try:
            message = json.loads(line[len(MARK) :])
        except ValueError:
            return
        if "event" in message:
            self.on_event(self.host, message)
            return
        with self._state:
            future = self._pending.pop(message.get("id"), None)
        if future is None:
            return
        if message.get("ok"):
            future.set_result(message.get("data"))
        else:
            error = message.get("error", {})
            future.set_exception(
                CpuppError(
                    error.get("code", "AGENT-FAILED"),
                    error.get("message", ""),
                    where=self.host,
                    exit_code=ExitCode.RANK_FAILED,
                )
            )

    def _end(self, reason: str) -> None:
        with self._state:
            self.lost_reason = reason
            self._ended.set()
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(self._lost_error("request"))
        if self._closing.is_set():
            return
        # Told first: a connection whose packets are lost takes seconds to close, and the other hosts wait for the word.
        self.on_event(self.host, {"event": "lost", "reason": reason})
        if self._connection is not None:
            self._connection.close()  # a sender may be stuck in it

    def _beat(self) -> None:
        """Give a sign of life every few seconds; the replies are the host's."""
        while not self._closing.wait(self.heartbeat_s) and not self._ended.is_set():
            with contextlib.suppress(CpuppError):
                self._begin("ping", {})


def _quoted(words: str | bytes) -> str:
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else words
    text = text.strip()
    return f": {text[-1000:]}" if text else ""


def open_sessions(spec: ClusterSpec, on_event: EventHandler | None = None, **options: Any) -> dict[str, AgentSession]:
    """Open a session to every host of the cluster file, all at once, in the file's order.

    Raises CpuppErrors with one error for each host that failed; the other sessions are closed then. `options` are those
    of `connect_all`.
    """
    sessions, errors = connect_all(spec, on_event, **options)
    if errors:
        run_all({name: session.close for name, session in sessions.items()})
        raise CpuppErrors(errors)
    return sessions


def connect_all(
    spec: ClusterSpec,
    on_event: EventHandler | None = None,
    *,
    ssh_config: Path | None = None,
    accept_new: Callable[[str], None] | None = None,
    leash_s: float = 20.0,
    grace_s: float = 5.0,
) -> tuple[dict[str, AgentSession], list[CpuppError]]:
    """Open a session to every host, all at once; return those that opened and the errors of those that did not.

    accept_new: None to refuse a host whose SSH key is not known, else its key is added to known_hosts and this is told.
    """
    opener = partial(
        open_session,
        on_event=on_event,
        ssh_config=ssh_config,
        accept_new=accept_new,
        leash_s=leash_s,
        grace_s=grace_s,
    )
    return run_all({host.name: partial(opener, host, spec.deadlines.connect) for host in spec.hosts})


def open_session(
    host: HostSpec,
    timeout_s: float,
    *,
    on_event: EventHandler | None = None,
    ssh_config: Path | None = None,
    accept_new: Callable[[str], None] | None = None,
    leash_s: float = 20.0,
    grace_s: float = 5.0,
) -> AgentSession:
    """Open a session to one host; timeout_s: for the connection, and then for its agent. Raises CpuppError."""
    from cpupp.launch.ssh import SshTransport
    from cpupp.launch.ssh_network import CONNECT_TIMEOUT_S, network_of

    transport: Transport = LocalTransport()
    if host.ssh is not None:
        network = network_of(ssh_config, min(timeout_s, CONNECT_TIMEOUT_S))
        transport = SshTransport(host.ssh, network=network, accept_new=accept_new)
    session = AgentSession(host.name, transport, on_event, leash_s=leash_s, grace_s=grace_s)
    session.open(timeout_s)
    return session


def run_all(tasks: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], list[CpuppError]]:
    """Run one task for each host, all at once; return results and errors in the order of `tasks`."""
    with ThreadPoolExecutor(max(1, len(tasks)), thread_name_prefix="host") as pool:
        futures = {name: pool.submit(task) for name, task in tasks.items()}
    results: dict[str, T] = {}
    errors: list[CpuppError] = []
    for name, future in futures.items():
        try:
            results[name] = future.result()
        except CpuppError as error:
            error.where = error.where or name
            errors.append(error)
    return results, errors
