"""Progress of a command: its stages are told before it starts, and each is numbered, timed and printed.

The report of an earlier run of the same command tells how long each stage will take. While a stage says nothing, a line
is drawn anew in a terminal, or printed now and then in a log.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from quantizer.engines import BuildOptions, BuildResult, build_engine
from quantizer.report import Stage
from quantizer.report.text import print_lines
from quantizer.utils.paths import regular_file
from quantizer.utils.plain_values import json_values
from quantizer.utils.progress import loop, open_loops, own_display

if TYPE_CHECKING:
    from rich.console import Console


_MOST = 10
"""So many folders are looked into: a report may have megabytes."""


def earlier_stages(folder: Path, report: str, same: Callable[[Mapping[str, Any]], bool]) -> list[Stage]:
    """Return the stages of the run that stands in a folder, or else of the last one beside it; none if there is none.

    Parts of stages are left out.
    """
    for path in [folder / report, *_beside(folder, report)]:
        # What cannot be read, or was written by something else, tells no times.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json_values(regular_file(path).read_bytes())
            if same(content):
                stages = [stage for stage in content["stages"] if stage.get("parent") is None]
                return [Stage(name=str(stage["name"]), seconds=float(stage["seconds"])) for stage in stages]
    return []


def _beside(folder: Path, report: str) -> list[Path]:
    """Return the files of that name in the folders beside, the newest first."""
    dated = []
    with suppress(OSError):
        for other in folder.parent.iterdir():
            with suppress(OSError):
                dated.append(((other / report).stat().st_mtime, other / report))
    return [path for _, path in sorted(dated, reverse=True)][:_MOST]


_SECONDS = 20.0
"""The least time between two lines in a log."""

# Once a second: latencies are measured meanwhile.
_REFRESHES = 1.0

_FRAMES = "|/-\\"
"""What stands before the line in turn, as a sign of life."""


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


_MINUTE = 60


class Outlook:
    """The stages ahead of a command.

    Stages may be left out, which skips their numbers, or come again as a search goes on, under the number that was
    reached: the number of all of them stays. What a stage takes is told by an earlier run of the same command, or by
    itself where it comes again; nothing else tells it.
    """

    def __init__(self, stages: Sequence[str] = (), earlier: Iterable[Stage] = ()) -> None:
        self._ahead = list(stages)
        self._count = len(self._ahead)
        self._seconds: dict[str, deque[float]] = {}
        for stage in earlier:
            self._seconds.setdefault(stage.name, deque()).append(stage.seconds)

    def begin(self, name: str) -> None:
        """Begin a stage; those that were to come before it are left out."""
        self._started = time.perf_counter()
        if name in self._ahead:
            del self._ahead[: self._ahead.index(name) + 1]
        self._name, self._expected = name, self._next(name)

    def end(self) -> float:
        """End the stage, and return the seconds that it took."""
        taken = self.elapsed
        # As an estimate, should it come again: a search repeats the export and the build of its engine.
        times = self._seconds.setdefault(self._name, deque())
        if times:
            times.popleft()
        if not times:
            times.append(taken)
        return taken

    @property
    def head(self) -> str:
        """Number and name of the stage: ``[4/12] export``."""
        number = max(self._count - len(self._ahead), 1)
        return f"[{number}/{self._count}] {self._name}" if self._count else self._name

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self._started

    @property
    def expected(self) -> float | None:
        """Seconds that the stage takes in all; None: not known."""
        return self._expected

    @property
    def left(self) -> str:
        """The time until the command ends, in words; empty where nothing is known of it.

        Where only some of the stages have a time, it is the least that is left.
        """
        if not self._count:
            return ""
        ahead = [self._next(name) for name in self._ahead]
        current = None if self._expected is None else max(self._expected - self.elapsed, 0)
        known = [seconds for seconds in (current, *ahead) if seconds is not None]
        words = rounded_time(sum(known))
        if not words:
            return ""
        return f"{words} left in all" if len(known) == len(ahead) + 1 else f"{words} or more left in all"

    def _next(self, name: str) -> float | None:
        times = self._seconds.get(name)
        return times[0] if times else None


def rounded_time(seconds: float) -> str:
    """Return an estimate as it may be trusted: ``3 s``, ``25 s``, ``1.5 min``, ``12 min``; empty under a second."""
    if seconds < 1:
        return ""
    fives = 5 * round(seconds / 5)
    if fives < _MINUTE:
        return f"{seconds if seconds < 10 else fives:.0f} s"
    minutes = seconds / _MINUTE
    number, unit = (minutes, "min") if minutes < 90 else (minutes / 60, "h")
    return f"{round(2 * number) / 2:g} {unit}" if number < 10 else f"{number:.0f} {unit}"


_LONG = 1.0
"""Seconds from which on a log tells what a stage took: most of the others take nothing worth a line."""


class StageTimer:
    """The printed progress of a command, and the duration of its stages.

    A stage inside another one is timed, and has no lines of its own.

    Attributes:
        done: the name and duration of each completed stage.
    """

    def __init__(self, console: Console, outlook: Outlook | None = None) -> None:
        self.console = console
        self.done: list[Stage] = []
        self._outlook = outlook or Outlook()
        self._heartbeat = Heartbeat(console, self._under_way)
        self._inside: str | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as one stage, and print its name and duration."""
        if self._inside is not None:
            start = time.perf_counter()
            yield
            self.done.append(Stage(name=name, seconds=time.perf_counter() - start, parent=self._inside))
            return
        self._outlook.begin(name)
        # A terminal has the line that is drawn anew, and keeps the one with the duration.
        if not self.console.is_terminal:
            self.say(self._beginning())
        self._inside = name
        try:
            with own_display(), self._heartbeat.beating():
                yield
        finally:
            self._inside = None
        seconds = self._outlook.end()
        self.done.append(Stage(name=name, seconds=seconds))
        if self.console.is_terminal:
            self.say(f"{self._outlook.head}: {seconds:.1f} s")
        elif seconds >= _LONG:
            self.say(f"  {seconds:.1f} s")

    def say(self, line: str) -> None:
        """Print a line without wrapping or markup."""
        self._heartbeat.said()
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tell(self, line: str) -> None:
        """Print a line of a stage, indented, and wrapped at the width of the terminal."""
        self._heartbeat.said()
        print_lines([line], self.console, first="  ", rest="    ")

    def build(self, backend: str, onnx: Path, engine: Path, options: BuildOptions) -> BuildResult:
        """Build an engine, with its progress, and print the builder's warnings."""
        with loop(engine.name, unit="percent", total=100) as building:

            def progress(share: float, phase: str) -> None:
                building.reach(round(100 * share), note=phase)

            built = build_engine(backend, onnx, engine, replace(options, progress=progress))
        for warning in built.warnings:
            self.tell(f"warning: {engine.name}: {warning}")
        return built

    def _beginning(self) -> str:
        outlook = self._outlook
        expected = "" if outlook.expected is None else rounded_time(outlook.expected)
        return ", ".join(word for word in (outlook.head, expected and f"about {expected}", outlook.left) if word)

    def _under_way(self) -> str:
        """Return the stage, the time since it began, the steps of its loops, and what is left."""
        outlook = self._outlook
        expected = "" if outlook.expected is None else rounded_time(outlook.expected)
        elapsed = f"{outlook.elapsed:.0f} s" + (f" of about {expected}" if expected else "")
        words = [f"{outlook.head}: {elapsed}", *map(str, open_loops()), outlook.left]
        return ", ".join(word for word in words if word)
