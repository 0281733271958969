"""What a supervisor is given and whom it tells: sessions, options, the view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cpupp.launch.secret import Secrets
from cpupp.plan.command import RankCommand, make_commands
from cpupp.plan.plan import Plan
from cpupp.plan.start_times import StartStep


class Session(Protocol):
    """What a supervisor needs of launch/session.py's AgentSession."""

    on_event: Callable[[str, dict[str, Any]], None]

    def request(self, op: str, *, timeout: float = ..., **params: Any) -> Any:
        """Ask the host's agent. Raises CpuppError."""

    def detach(self, timeout_s: float = ..., **params: Any) -> None:
        """Tell the agent to go on without this launcher, and hang up. Raises CpuppError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the user is told when the model serves: the API's base URL, the model's name, seconds since launch.

    key_source: of the API's key, see plan/secret.py; stays: it will go on without this launcher; start: where the time
    went.
    """

    url: str
    model: str
    seconds: float
    key_source: str = ""
    stays: bool = False
    start: tuple[StartStep, ...] = ()


class View(Protocol):
    """Where progress is shown (render_launch.py)."""

    def phase(self, node_rank: int, host: str, phase: str, seconds: float) -> None:
        """A vLLM node does something else now."""

    def milestone(self, name: str, coming: str, limit_s: float | None, seconds: float) -> None:
        """All vLLM nodes have reached a milestone; the next one is `coming` and may take limit_s seconds."""

    def log(self, node_rank: int, host: str, line: str) -> None:
        """A vLLM node wrote a line."""

    def ready(self, ready: Ready) -> None:
        """The model serves."""

    def note(self, text: str) -> None:
        """Anything else the user should know now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How to run a plan.

    timeout: seconds until ready, in all, None to leave it to the deadlines; grace: seconds between TERM and KILL;
    started: monotonic start of the command; file: the cluster file's absolute path; spec: its bytes. detach: leave the
    run to the agents once it serves. For another attempt: spare_ports, other ports for the rendezvous (none where the
    file has one); reopen: a new session to a host; commands: of a plan with another port. secrets: values for the
    ranks, hidden in all records.
    """

    run: str
    folder: Path
    timeout: float | None = None
    grace: float = 5.0
    ask: str | None = None
    max_tokens: int = 128
    started: float | None = None
    file: str = ""
    spec: bytes = b""
    detach: bool = False
    spare_ports: tuple[int, ...] = ()
    reopen: Callable[[str], Session] | None = None
    commands: Callable[[Plan], tuple[RankCommand, ...]] = make_commands
    secrets: Secrets = field(default_factory=Secrets)
