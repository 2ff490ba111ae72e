"""Lines of text as a terminal shows them: wrapped between words at its width, and no name broken."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from quantizer.report.tables.text import shorten, visible

_LEAST = 20
"""The narrowest column that text is wrapped in; a narrower terminal breaks the lines itself."""

_LABEL = 8
"""Columns of a label and the space after it."""


def wrapped(line: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Return a line as lines of at most ``width`` columns; a name that is longer is shortened in the middle.

    Args:
        line: the text.
        width: the columns of the terminal.
        first: what the first line begins with, such as a bullet.
        rest: what the others begin with, as wide as the hanging indent.
    """
    width = max(width, _LEAST + len(first))
    room = width - max(len(first), len(rest))
    return textwrap.wrap(
        re.sub(r"\S+", lambda word: shorten(word[0], room), line),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def print_lines(
    lines: Iterable[str], console: Console, *, first: str = "- ", rest: str | None = None, style: str | None = None
) -> None:
    """Print lines, each wrapped at the width of the console with a hanging indent, by default as wide as ``first``."""
    rest = " " * len(first) if rest is None else rest
    for line in lines:
        for part in wrapped(line, console.width, first=first, rest=rest):
            console.print(Text(visible(part), style=style or ""), soft_wrap=True)


def print_labelled(label: str, line: str, console: Console, *, style: str | None = None, wrap: bool = True) -> None:
    """Print a line behind its label, wrapped under itself; one that is to be copied, such as a path, is not wrapped."""
    parts = wrapped(line, console.width - _LABEL) if wrap else [line]
    for number, part in enumerate(parts):
        head = Text("" if number else label, style="bold")
        head.pad_right(_LABEL - len(head))
        console.print(head + Text(visible(part), style=style or ""), soft_wrap=True)
