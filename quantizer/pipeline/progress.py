"""Progress of a command: numbered, timed and printed stages, whose names are known before the command starts.

The report of an earlier run of the same command predicts the duration of each stage. A long stage shows a status line,
which is redrawn in a terminal and printed from time to time in a log.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

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


_MAX_REPORTS = 10
"""Maximum number of reports to read, which may have megabytes."""


def earlier_stages(folder: Path, report: str, same: Callable[[Mapping[str, Any]], bool]) -> list[Stage]:
    """Return the stages of a matching run in a folder, or of the last one next to it; empty without one.

    Stages inside other stages are omitted.
    """
    for path in [folder / report, *_beside(folder, report)]:
        # Skip reports that cannot be read or have another format.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = json_values(regular_file(path).read_bytes())
            if same(content):
                stages = [stage for stage in content["stages"] if stage.get("parent") is None]
                return [Stage(name=str(stage["name"]), seconds=float(stage["seconds"])) for stage in stages]
    return []


def _beside(folder: Path, report: str) -> list[Path]:
    """Return the reports in neighbouring folders, the newest first."""
    dated = []
    with suppress(OSError):
        for other in folder.parent.iterdir():
            with suppress(OSError):
                dated.append(((other / report).stat().st_mtime, other / report))
    return [path for _, path in sorted(dated, reverse=True)][:_MAX_REPORTS]


_SECONDS = 10.0
"""Minimum seconds between two status lines in a log."""


class LateStream(io.TextIOBase):
    """Text stream that shows nothing of short work: it holds what is written until some seconds have passed."""

    def __init__(self, stream: TextIO, seconds: float = _SECONDS) -> None:
        """Wrap a stream.

        Args:
            stream: receives the text.
            seconds: the seconds from now on in which the text is held.
        """
        self._stream = stream
        self._end = time.monotonic() + seconds
        self._held = ""

    def write(self, text: str) -> int:
        """Hold the text, or write all held text after the time."""
        self._held += text
        if time.monotonic() >= self._end:
            self._stream.write(self._held)
            self._stream.flush()
            self._held = ""
        return len(text)


def console_of(progress: bool | None) -> Console:
    """Return the console for the stages of a call from Python, which prints to stderr.

    Args:
        progress: True to print at once, False to print nothing; None to print at once in a terminal, and elsewhere,
            also in a notebook, only the stages of a call that takes 10 seconds.
    """
    console = Console(stderr=True, quiet=progress is False)
    if progress is None and not console.is_terminal:
        # In a notebook, the console would bypass the stream.
        return Console(file=cast(IO[str], LateStream(sys.stderr)), force_jupyter=False)
    return console


# Once per second, because latencies may be measured meanwhile.
_REFRESHES = 1.0

_FRAMES = "|/-\\"
"""Frames of the spinner."""


class Heartbeat:
    """Status line of a command during long stages.

    Args:
        console: the console; a quiet one shows nothing.
        words: returns the text of the line.
        seconds: the interval between lines in a log.
    """

    def __init__(self, console: Console, words: Callable[[], str], seconds: float = _SECONDS) -> None:
        self._console = console
        self._words = words
        self._interval = seconds
        self._last_line = time.monotonic()

    def line_printed(self) -> None:
        """Note that a line was printed, so that the next one can wait."""
        self._last_line = time.monotonic()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show the status line in the block."""
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
            # Warnings are printed above the line, unless they go to a file.
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start()
        try:
            yield
        finally:
            # If the terminal is closed, the block raises its own exception.
            with suppress(OSError):
                live.stop()

    def _lines(self) -> Iterator[None]:
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(max(self._last_line + self._interval - time.monotonic(), 0)):
                if time.monotonic() - self._last_line >= self._interval:
                    self.line_printed()
                    # If the output is closed, the next line of the stage raises.
                    with suppress(OSError):
                        self._console.print(f"  {self._words()}", markup=False, highlight=False, soft_wrap=True)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        self.line_printed()
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


_MINUTE = 60


class Outlook:
    """The remaining stages of a command.

    Stages may be skipped, together with their numbers. They may also repeat in a search, with the number that was
    reached. The total number stays. Durations come from an earlier run of the same command, or from the stage itself if
    it repeats.
    """

    def __init__(self, stages: Sequence[str] = (), earlier: Iterable[Stage] = ()) -> None:
        self._ahead = list(stages)
        self._count = len(self._ahead)
        self._seconds: dict[str, deque[float]] = {}
        for stage in earlier:
            self._seconds.setdefault(stage.name, deque()).append(stage.seconds)

    def begin(self, name: str) -> None:
        """Begin a stage, and skip all stages expected before it."""
        self._started = time.perf_counter()
        if name in self._ahead:
            del self._ahead[: self._ahead.index(name) + 1]
        self._name, self._expected = name, self._next(name)

    def end(self) -> float:
        """End the stage, and return its duration in seconds."""
        duration = self.elapsed
        # An estimate for repetitions: a search repeats the export and the build.
        times = self._seconds.setdefault(self._name, deque())
        if times:
            times.popleft()
        if not times:
            times.append(duration)
        return duration

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
        """Expected duration of the stage in seconds; None if unknown."""
        return self._expected

    @property
    def left(self) -> str:
        """The remaining time of the command in words, empty if unknown; a lower bound if only some stages are known.

        It is also empty if only the current stage is known, whose own estimate is shown.
        """
        if not self._count:
            return ""
        ahead = [seconds for name in self._ahead if (seconds := self._next(name)) is not None]
        current = 0 if self._expected is None else max(self._expected - self.elapsed, 0)
        is_complete = self._expected is not None and len(ahead) == len(self._ahead)
        words = rounded_time(current + sum(ahead))
        if not words or not (ahead or is_complete):
            return ""
        return f"{words} left" if is_complete else f"at least {words} left"

    def _next(self, name: str) -> float | None:
        times = self._seconds.get(name)
        return times[0] if times else None


def rounded_time(seconds: float) -> str:
    """Return a rounded estimate: ``3 s``, ``25 s``, ``1.5 min``, ``12 min``; empty below a second."""
    if seconds < 1:
        return ""
    fives = 5 * round(seconds / 5)
    if fives < _MINUTE:
        return f"{seconds if seconds < 10 else fives:.0f} s"
    minutes = seconds / _MINUTE
    number, unit = (minutes, "min") if minutes < 90 else (minutes / 60, "h")
    return f"{round(2 * number) / 2:g} {unit}" if number < 10 else f"{number:.0f} {unit}"


_LONG = 1.0
"""Minimum duration in seconds that a log reports for a stage."""


class StageTimer:
    """Printer and timer of the stages of a command.

    A stage inside another stage is timed, but not printed.

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
        # A terminal shows the status line instead, and keeps the line with the duration.
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
        self._heartbeat.line_printed()
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tell(self, line: str) -> None:
        """Print an indented line of a stage, wrapped to the terminal."""
        self._heartbeat.line_printed()
        print_lines([line], self.console, first="  ", rest="    ")

    def tell_passes(self, passes: float) -> None:
        """Print what a plan cost, unless the calibrating pass was enough."""
        if passes > 1:
            self.tell(f"plan: {passes:.1f} passes of the calibration data")

    def build(self, backend: str, onnx: Path, engine: Path, options: BuildOptions) -> BuildResult:
        """Build an engine with a progress bar, and print the builder's warnings."""
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
        """Return the status line: stage, elapsed time, loops and remaining time."""
        outlook = self._outlook
        expected = "" if outlook.expected is None else rounded_time(outlook.expected)
        elapsed = f"{outlook.elapsed:.0f} s" + (f" of about {expected}" if expected else "")
        words = [f"{outlook.head}: {elapsed}", *map(str, open_loops()), outlook.left]
        return ", ".join(word for word in words if word)
