"""Progress bars of loops: one bar at a time, only in a terminal.

A loop inside another one has no bar. A command that prints its own progress opens ``own_display``, which hides all
bars, and reads ``open_loops``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")


@dataclass(eq=False)
class Loop:
    """A running loop.

    Attributes:
        title: what the loop does, such as ``calibration``.
        unit: one step, such as ``batch``.
        total: the number of steps; None if unknown, as in a search.
        done: the number of completed steps.
        note: a short text on the current step.
    """

    title: str
    unit: str
    total: int | None = None
    done: int = 0
    note: str = ""
    _bar: tqdm[Any] | None = None

    def step(self, note: str = "") -> None:
        self.reach(self.done + 1, note=note)

    def reach(self, done: int, total: int | None = None, note: str = "") -> None:
        """Set the number of completed steps; ``total`` replaces the number of all steps."""
        self.done, self.note = done, note
        self.total = self.total if total is None else total
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)

    def __str__(self) -> str:
        steps = f"{self.unit} {self.done}" + ("" if self.total is None else f" of {self.total}")
        return f"{steps}, {self.note}" if self.note else steps


@dataclass
class _Shown:
    """All running loops, the outermost first, and the number of open ``own_display`` blocks."""

    loops: list[Loop] = field(default_factory=list)
    displays: int = 0


_SHOWN = _Shown()


def open_loops() -> tuple[Loop, ...]:
    """Return the running loops, the outermost first."""
    return tuple(_SHOWN.loops)


@contextmanager
def own_display() -> Iterator[None]:
    """Hide all bars inside the block."""
    _SHOWN.displays += 1
    try:
        yield
    finally:
        _SHOWN.displays -= 1


@contextmanager
def loop(title: str, *, unit: str, total: int | None = None, done: int = 0, show: bool | None = None) -> Iterator[Loop]:
    """Show a bar while the block is open; the block counts the steps."""
    opened = Loop(title, unit, total, done)
    hidden = bool(_SHOWN.loops) or _SHOWN.displays > 0 or show is False
    _SHOWN.loops.append(opened)
    try:
        # By default, tqdm shows a bar also outside of a terminal.
        disable = True if hidden else None if show is None else not show
        with tqdm(total=total, initial=done, desc=title, unit=unit, leave=False, disable=disable) as bar:
            opened._bar = bar
            yield opened
    finally:
        _SHOWN.loops.remove(opened)


@contextmanager
def counted(
    items: Iterable[Item],
    title: str,
    *,
    unit: str,
    total: int | None = None,
    show: bool | None = None,
    note: Callable[[Item], str] = lambda _: "",
) -> Iterator[Iterator[Item]]:
    """Yield an iterator that counts each item at the request for the next; arguments as in ``loop``."""
    with loop(title, unit=unit, total=_length(items) if total is None else total, show=show) as opened:

        def steps() -> Iterator[Item]:
            for item in items:
                opened.reach(opened.done, note=note(item))
                yield item
                opened.step()

        yield steps()


def _length(items: Iterable[Any]) -> int | None:
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:
        # A generator has no length, and neither has a DataLoader of an IterableDataset.
        return None
