"""Lines of text as a terminal shows them: wrapped between words at its width, and no name broken."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from quantizer.report.tables.text import shorten

__all__ = ["print_lines", "wrapped"]

_LEAST = 20
"""The narrowest column that text is wrapped in; a narrower terminal breaks the lines itself."""


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
    lines: Iterable[str], console: Console, *, first: str = "- ", rest: str = "  ", style: str | None = None
) -> None:
    """Print lines, each wrapped at the width of the console with a hanging indent."""
    for line in lines:
        for part in wrapped(line, console.width, first=first, rest=rest):
            console.print(Text(part, style=style or ""), soft_wrap=True)
