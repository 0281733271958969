"""`cpupp status --watch`: redrawn in place on a terminal, one line for each change elsewhere."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TextIO

from cpupp.plan.status import RunStatus
from cpupp.render import page_width
from cpupp.render_runs import changes, print_lines, status_page

if TYPE_CHECKING:
    from rich.live import Live


class WatchView(Protocol):
    """Shows a run again and again."""

    def show(self, status: RunStatus) -> bool:
        """Show it as it is now; return whether somebody still looks."""

    def close(self) -> None:
        """Leave what was shown last."""


def watch_view(stream: TextIO) -> WatchView:
    """The view that fits the stream."""
    return LiveView(stream) if stream.isatty() else LineView(stream)


class LineView:
    """One line for each change, with the time of day."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: RunStatus | None = None

    def show(self, status: RunStatus) -> bool:
        """Print what is different now."""
        lines, self._last = changes(self._last, status), status
        return print_lines(self._stream, lines) if lines else True

    def close(self) -> None:
        """Nothing is open."""


class LiveView:
    """The whole page, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._stream = stream
        self._live: Live | None = Live(
            console=Console(file=stream, highlight=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, status: RunStatus) -> bool:
        """Draw it anew."""
        from rich.text import Text

        if self._live is None:
            return False
        lines = status_page(status, page_width(self._stream)).lines
        block = Text("\n").join(Text(text, style=style, no_wrap=True, overflow="ellipsis") for text, style in lines)
        block.no_wrap, block.overflow = True, "ellipsis"
        try:
            self._live.update(block, refresh=True)
        except (OSError, ValueError, SystemExit):  # the terminal is gone; rich turns a broken pipe into SystemExit
            self._live = None
            return False
        return True

    def close(self) -> None:
        """Leave the last page on the terminal."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError, ValueError, SystemExit):
                live.stop()
