"""The stages of a command: each is numbered, timed and printed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantizer.common.progress import loop, open_loops, own_display
from quantizer.engines import BuildOptions, BuildResult, build_engine
from quantizer.report import Stage
from quantizer.report.tables.lines import print_lines
from quantizer.runs.progress.heartbeat import Heartbeat
from quantizer.runs.progress.outlook import Outlook, rounded_time

if TYPE_CHECKING:
    from rich.console import Console


_LONG = 1.0
"""Seconds from which on a log tells what a stage took: most of the others take nothing worth a line."""


class StageTimer:
    """The printed progress of a command, and the duration of its stages.

    A stage inside another one is timed, and has no lines of its own.

    Args:
        console: where lines are printed; a quiet one shows nothing.
        outlook: the stages ahead; None: they are not known.

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
            self.done.append(Stage(name=name, seconds=time.perf_counter() - start, inside=self._inside))
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
