"""Whether a process stays stopped (SIGSTOP, or Ctrl-Z in a shell): it lives and does nothing. Standard library only."""

from __future__ import annotations

from . import agent_proc

HALTED_S = 2.5
"""How long agent or keeper may be seen stopped by the other one. One that a debugger holds (state `t`) never is."""


class HaltWatch:
    """Watches one process, with a look every second or so."""

    def __init__(self) -> None:
        self._since: float | None = None

    def look(self, pid: int, now: float) -> bool:
        """Return whether the process has been stopped at every look for HALTED_S."""
        process = agent_proc.read_process(pid)
        if process is None or process.state != "T":
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= HALTED_S
