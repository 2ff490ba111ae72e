"""A sign of life while a stage says nothing: a line drawn anew in a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

_SECONDS = 20.0
"""The least time between two lines in a log."""

# Once a second: latencies are measured meanwhile.
_REFRESHES = 1.0

_FRAMES = "|/-\\"
"""What stands before the line in turns, as a sign of life."""


class Heartbeat:
    """Sign of life of a command.

    Args:
        console: where it is shown; nothing is shown on a quiet one.
        words: gives the line of the stage under way.
        seconds: the time between lines where there is no terminal.
    """

    def __init__(self, console: Console, words: Callable[[], str], seconds: float = _SECONDS) -> None:
        self._console = console
        self._words = words
        self._interval = seconds
        self._said = time.monotonic()

    def said(self) -> None:
        """Note that a line was printed: none is due for a while."""
        self._said = time.monotonic()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show it while the block is open."""
        if self._console.quiet:
            yield
        elif self._console.is_terminal and not self._console.is_jupyter:
            yield from self._live()
        else:
            yield from self._lines()

    def _live(self) -> Iterator[None]:
        def line() -> Text:
            frame = _FRAMES[int(time.monotonic() * _REFRESHES) % len(_FRAMES)]
            return Text(f"{frame} {self._words()}", no_wrap=True, overflow="ellipsis")

        live = Live(
            console=self._console,
            get_renderable=line,
            refresh_per_second=_REFRESHES,
            transient=True,
            # Warnings come above the line, unless they go to a file.
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start()
        try:
            yield
        finally:
            # The terminal may be gone, which is why the block ends: its own exception tells of that.
            with suppress(OSError):
                live.stop()

    def _lines(self) -> Iterator[None]:
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(max(self._said + self._interval - time.monotonic(), 0)):
                if time.monotonic() - self._said >= self._interval:
                    self.said()
                    # Whoever read the lines is gone; the stage's own lines will tell.
                    with suppress(OSError):
                        self._console.print(f"  {self._words()}", markup=False, highlight=False, soft_wrap=True)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        self.said()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
