"""The two servers that `cpupp bench serve FILE` measures: a launch of cpupp's own, and vLLM as started by hand."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cpupp.errors import CpuppError, ExitCode
from cpupp.launch.api import STRANGER, HeadApi
from cpupp.launch.contract import LaunchOptions, Ready, Session
from cpupp.launch.logs import open_logs
from cpupp.launch.result import RunResult
from cpupp.launch.secret import Secrets
from cpupp.launch.session import run_all
from cpupp.launch.site import shim_files
from cpupp.launch.start import PATIENCE, Start, prepare_request
from cpupp.launch.stop import stop_hosts
from cpupp.launch.supervisor import Supervisor
from cpupp.plan.command import RankCommand
from cpupp.plan.failures import exit_text
from cpupp.plan.plan import Plan
from cpupp.plan.restart import Restart
from cpupp.plan.shown import literal_values

GRACE_S = 2.0
POLL_S = 0.25
FIRST_ANSWER_S = 300.0
SHOWN_LINES = 12
Tell = Callable[[str], None]


class Server(Protocol):
    """One server, from its start to its end."""

    healthy_s: float | None

    def start(self) -> float:
        """Return when it serves: seconds since its launch. Raises CpuppError when it does not."""

    def error(self) -> CpuppError | None:
        """Why it has ended by itself, None while it serves."""

    def stop(self) -> None:
        """Take everything down and wait for it. May be called twice, from two threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What both servers are made of. started: monotonic time from which seconds count; timeout: until it serves."""

    plan: Plan
    commands: Sequence[RankCommand]
    sessions: MutableMapping[str, Any]
    run: str
    folder: Path
    secrets: Secrets
    started: float
    timeout: float
    tell: Tell


class Launched:
    """What `cpupp launch` does, in a thread. A failure is final: no restart."""

    def __init__(self, parts: Parts, *, file: str, spec: bytes) -> None:
        self.healthy_s: float | None = None
        self._view = _View(parts.tell)
        self._result: RunResult | None = None
        self._fault: Exception | None = None
        options = LaunchOptions(
            run=parts.run,
            folder=parts.folder,
            timeout=parts.timeout,
            grace=GRACE_S,
            started=parts.started,
            file=file,
            spec=spec,
            secrets=parts.secrets,
        )
        plan = replace(parts.plan, restart=Restart(policy="never", max=0, backoff=0.0))
        self._supervisor = Supervisor(plan, parts.commands, parts.sessions, options, self._view)
        self._thread = threading.Thread(target=self._run, daemon=True, name="cpupp-launch")

    def _run(self) -> None:
        try:
            self._result = self._supervisor.run()
        except Exception as error:  # a fault of ours, told by whoever waits
            self._fault = error

    def start(self) -> float:
        """Return when the run is ready."""
        self._thread.start()
        while not self._view.is_ready.wait(POLL_S):
            if (error := self.error()) is not None:
                raise error
        return self._view.seconds

    def error(self) -> CpuppError | None:
        """The run's first failure once it is over."""
        if self._thread.is_alive():
            return None
        if self._fault is not None:
            raise self._fault
        result = self._result
        assert result is not None
        first = result.first_failure
        if first is None:
            return CpuppError("BENCH-ENDED", f"the run ended: {result.outcome}", exit_code=ExitCode.RANK_FAILED)
        code = ExitCode(result.exit_code)
        return _failure(first.code, first.message, first.last_lines, first.host, first.hint, code)

    def stop(self) -> None:
        """End the run as SIGTERM does."""
        if self._thread.is_alive():
            self._supervisor.interrupt(signal.SIGTERM)
            self._thread.join()
        if self._result is not None and self._result.leftovers:
            self._view.tell("left behind: " + "; ".join(self._result.leftovers))


class _View:
    """Waits for readiness and passes on what a user must know; the log of each vLLM node is in the run's folder."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.is_ready = threading.Event()
        self.seconds = 0.0

    def phase(self, node_rank: int, host: str, phase: str, seconds: float) -> None:
        """Not shown."""

    def milestone(self, name: str, coming: str, limit_s: float | None, seconds: float) -> None:
        """Not shown."""

    def log(self, node_rank: int, host: str, line: str) -> None:
        """Not shown."""

    def ready(self, ready: Ready) -> None:
        """It serves."""
        self.seconds = ready.seconds
        self.is_ready.set()

    def note(self, text: str) -> None:
        """Pass it on."""
        self.tell(text)


class ByHand:
    """The commands of plan/by_hand.py, all started at the same moment, and asked until the first answer.

    Agents hold them as they hold all that cpupp starts, so that nothing stays on any host.
    """

    def __init__(self, parts: Parts) -> None:
        self.healthy_s: float | None = None
        self._parts = parts
        self._lock = threading.Lock()
        self._stopped = False
        self._error: CpuppError | None = None
        self._logs = open_logs(parts.folder / "logs", {c.node_rank: c.host for c in parts.commands}, parts.secrets.mask)
        for session in parts.sessions.values():
            session.on_event = self._take

    def start(self) -> float:
        """Return when the first completion has come. `healthy_s` is set as soon as /health has answered."""
        parts, plan = self._parts, self._parts.plan
        tasks = {host: partial(self._start_on, host, session) for host, session in parts.sessions.items()}
        _, errors = run_all(tasks)
        if errors:
            raise errors[0]
        began = time.monotonic()
        api = HeadApi(plan, parts.sessions[plan.head], parts.secrets.api_key(plan.head))
        while True:
            if (error := self.error()) is not None:
                raise error
            if api.healthy():
                self.healthy_s = self.healthy_s or time.monotonic() - began
                if self._answers(api):
                    return time.monotonic() - began
            if time.monotonic() > began + parts.timeout:
                message = f"no answer within {parts.timeout:g} s"
                raise CpuppError("BENCH-BY-HAND", message, where="by hand", exit_code=ExitCode.NOT_READY)
            time.sleep(POLL_S)

    def error(self) -> CpuppError | None:
        """The first end of a vLLM node or host that nobody ordered."""
        return self._error

    def stop(self) -> None:
        """Stop all hosts."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            sessions: Mapping[str, Session] = self._parts.sessions
            for words in stop_hosts(sessions, grace=GRACE_S, lost=()):
                self._parts.tell(f"left behind: {words}")
            for log in self._logs.values():
                log.close()

    def _start_on(self, host: str, session: Session) -> None:
        parts = self._parts
        start = Start(plan=parts.plan, commands=parts.commands, run=parts.run, attempt=1, created=time.time())
        place = next(each for each in parts.plan.hosts if each.name == host)
        files = shim_files(place.vllm) if place.shim else {}
        session.request("prepare", timeout=PATIENCE, **{**prepare_request(start, host), "files": files})
        for command in parts.commands:
            if command.host == host:
                session.request("start", timeout=PATIENCE, **by_hand_request(command, parts.secrets))

    def _answers(self, api: HeadApi) -> bool:
        try:
            api.complete(FIRST_ANSWER_S)
        except CpuppError as error:
            if error.code == STRANGER:
                raise
            return False
        return True

    def _take(self, host: str, data: dict[str, Any]) -> None:
        node = data.get("node", -1)
        if self._stopped and data.get("event") != "output":
            return
        match data.get("event"):
            case "output":
                self._logs[node].feed(data["data"])
            case "exited":
                words, lines = f"vLLM node {node} ended: {exit_text(data['code'])}", self._logs[node].tail()
                self._error = self._error or _failure("BENCH-BY-HAND", words, lines, f"by hand on {host}")
            case "lost":
                words = str(data.get("reason", "connection lost"))
                self._error = self._error or _failure("HOST-LOST", words, (), host, code_of_exit=ExitCode.UNREACHABLE)


def by_hand_request(command: RankCommand, secrets: Secrets) -> dict[str, Any]:
    """The agent's `start` request of one vLLM node that gets nothing of cpupp."""
    return {
        "node": command.node_rank,
        "argv": list(command.argv),
        "env": command.env,
        "secrets": secrets.of(command),
        "mask": [*literal_values(command)],
        "site_env": command.site_env,
        "keep_env": list(command.keep_env),
        "drop_env": list(command.drop_env),
    }


def _failure(
    code: str,
    message: str,
    lines: Sequence[str],
    where: str,
    hint: str = "",
    code_of_exit: ExitCode = ExitCode.RANK_FAILED,
) -> CpuppError:
    text = "\n".join([message, *lines[-SHOWN_LINES:]])
    return CpuppError(code, text, hint=hint, where=where, exit_code=code_of_exit)
