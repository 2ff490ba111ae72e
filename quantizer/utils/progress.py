"""Progress of loops, by one rule: a bar in a terminal, never two at once, and nothing where there is no terminal.

A loop inside another one has no bar of its own. A command that prints its own progress has none at all: it opens
``own_display`` and says what ``open_loops`` gives.
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
    """A loop under way.

    Attributes:
        title: what it does, such as ``calibration``.
        unit: one of its steps, such as ``batch``.
        total: how many steps it has; None: not known, as in a search that ends when it has found something.
        done: how many are done.
        note: a few words on the step under way.
    """

    title: str
    unit: str
    total: int | None = None
    done: int = 0
    note: str = ""
    _bar: tqdm[Any] | None = None

    def step(self, note: str = "") -> None:
        """Count one more step as done."""
        self.reach(self.done + 1, note=note)

    def reach(self, done: int, total: int | None = None, note: str = "") -> None:
        """Count so many steps as done; ``total`` replaces the number of all steps."""
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
    """All loops under way, the outermost first, and how many displays show them."""

    loops: list[Loop] = field(default_factory=list)
    displays: int = 0


_SHOWN = _Shown()


def open_loops() -> tuple[Loop, ...]:
    """Return the loops under way, the outermost first."""
    return tuple(_SHOWN.loops)


@contextmanager
def own_display() -> Iterator[None]:
    """Show no bars while the block is open."""
    _SHOWN.displays += 1
    try:
        yield
    finally:
        _SHOWN.displays -= 1


@contextmanager
def loop(title: str, *, unit: str, total: int | None = None, done: int = 0, show: bool | None = None) -> Iterator[Loop]:
    """Show a bar while the block is open; its body counts the steps."""
    opened = Loop(title, unit, total, done)
    hidden = bool(_SHOWN.loops) or _SHOWN.displays > 0 or show is False
    _SHOWN.loops.append(opened)
    try:
        # Left to itself, tqdm shows a bar wherever it can write.
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
    """Yield the items of a loop, each counted once the next one is asked for; other arguments as of ``loop``."""
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
        # A generator has none, and a DataLoader only that of a data set that has one.
        return None
