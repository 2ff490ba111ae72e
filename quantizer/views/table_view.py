"""A picture that a notebook shows.

The base of all views: a list of rows that is shown as a table in a terminal, and as HTML in a notebook.

The view of the scores in a search for a fallback.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import rich.table
from rich import box
from rich.table import Table
from rich.text import Text

from quantizer.files import whole_file
from quantizer.report.charts.pareto_plot import pareto_svg
from quantizer.report.record import Evaluation, Fallback
from quantizer.report.tables.tables import (
    EVALUATION_COLUMNS,
    Column,
    evaluation_caption,
    evaluation_cells,
    html_table,
    string_from_table,
    text_table,
)
from quantizer.report.tables.text import shorten


class Picture:
    """An SVG picture.

    Attributes:
        svg: one ``<svg>`` element.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def __repr__(self) -> str:
        return "a picture: a notebook shows it, .save(path) writes it as SVG"

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to an ``.svg`` file."""
        with whole_file(path) as part:
            part.write_text(self.svg, encoding="utf-8")


Row = TypeVar("Row")

_ROWS = 40
"""The largest number of rows in ``repr``; ``text()`` returns all."""
_HTML_ROWS = 300
_WIDTH = 120
_BESIDE_NAMES = 44
_BESIDE_TIGHT_NAMES = 63
"""So many columns are for what stands beside the names."""
_TEXT_WIDTH = 22
"""A column that is wider than this is text, which may be broken at its blanks."""
_LEAST_NAMES = 24
_GAP = 2
"""Blanks between two columns: the padding, and the line that the box leaves out."""


class View(Generic[Row]):
    """A read-only list of rows with a title.

    Attributes:
        columns: the columns, one for each cell of a row.
        grouped: whether a terminal shows the first column as a line of its own above the rows with the same value.
        tight: whether a terminal breaks long names at a dot and titles at each blank, to leave more width to columns.
        shortened: whether a terminal shows each name of the first column in one line, without its middle if need be,
            and breaks titles likewise.
    """

    columns: Sequence[Column | str]
    grouped = False
    tight = False
    shortened = False

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def title(self) -> str:
        """Return the title of the table, a summary in one line."""
        raise NotImplementedError

    def cells(self) -> list[list[Any]]:
        """Return the cells of the table, a list for each row that is shown."""
        raise NotImplementedError

    def text(self, limit: int | None = None) -> str:
        """Return the table as plain text with at most ``limit`` rows; None: all rows.

        It is at most 120 columns wide, and as wide as a narrower terminal where that has room for its names.
        """
        here = _width_here()
        if here < _WIDTH and (found := self._text_at(here, limit)) is not None:
            return found
        return self._text_at(_WIDTH, limit) or ""

    def _text_at(self, width: int, limit: int | None) -> str | None:
        """Return the table at most so wide; None if it is to be wider, and may be."""
        cells = self.cells()
        if self.grouped:
            return self._grouped_text(cells, limit, width)
        if self.shortened:
            table = self._shortened_table(cells, limit, width)
            lines = _lines(table, width)
            is_whole = all(any(line.startswith(row[0]) for line in lines) for row in cells[:limit])
            return "\n".join(lines) if width == _WIDTH or is_whole else None
        if self.tight:
            cells = [
                [
                    _broken(cell, max(width - _BESIDE_TIGHT_NAMES, _LEAST_NAMES)) if at in self._names() else cell
                    for at, cell in enumerate(row)
                ]
                for row in cells
            ]
        table = self._table(self.columns, cells, limit)
        table.title = Text(self.title())
        if self.tight:
            _break_titles(table)
        # rich would cut a name anywhere, as it is one word: it gets its full width, and other columns share the rest.
        pieces = [piece for row in cells[:limit] for at in self._names() for piece in row[at].split("\n")]
        for at in self._names():
            table.columns[at].no_wrap = all(len(piece) <= width - _BESIDE_NAMES for piece in pieces)
        lines = _lines(table, width)
        is_whole = all(any(piece in line for line in lines) for piece in pieces)
        return "\n".join(lines) if width == _WIDTH or is_whole else None

    def _shortened_table(self, cells: list[list[Any]], limit: int | None, width: int) -> Table:
        """Return the table with names in the room that the other columns leave; only wide text is broken."""
        table = self._table(self.columns, cells, limit)
        _break_titles(table)
        widths = [max(_width(column), 1) for column in table.columns]
        room = width - sum(min(wide, _TEXT_WIDTH) + _GAP for wide in widths[1:])
        short = [[shorten(row[0], max(room, _LEAST_NAMES)), *row[1:]] for row in cells]
        table = self._table(self.columns, short, limit)
        _break_titles(table)
        for column, wide in zip(table.columns, [0, *widths[1:]], strict=True):
            column.no_wrap = wide <= _TEXT_WIDTH
        # Text gives way to names: two that look alike in a list would be no names.
        table.columns[0].min_width = max((len(row[0]) for row in short[:limit]), default=0)
        table.title = Text(self.title())
        return table

    def _grouped_text(self, cells: list[list[Any]], limit: int | None, width: int) -> str | None:
        table = self._table(self.columns[1:], [row[1:] for row in cells], limit)
        for column in table.columns:
            column.no_wrap = True  # one line for each row, which the loop below relies on
        if width < _WIDTH and len(_lines(table, _WIDTH)[1]) + _GAP > width:
            return None
        heading, rule, *lines = _lines(table, width)
        parts = [self.title(), f"  {heading}", rule[:1] * 2 + rule]
        above = None
        for row, line in zip_longest(cells[:limit], lines):
            if row is not None and row[0] != above:
                above = row[0]
                parts.append(above)
            parts.append(f"  {line}" if row is not None else line)
        return "\n".join(parts)

    def _table(self, columns: Sequence[Column | str], cells: list[list[Any]], limit: int | None) -> Table:
        table = text_table(columns, cells, limit=limit)
        table.title_justify = "left"
        table.box, table.pad_edge, table.show_edge, table.padding = box.SIMPLE_HEAD, False, False, (0, 1, 0, 0)
        if table.caption is not None:
            table.caption = f"{table.caption}; print .text() to see all, .rows holds them"
            table.caption_justify = "left"
        return table

    def _names(self) -> list[int]:
        return [at for at, column in enumerate(self.columns) if isinstance(column, Column) and column.mono]

    def __repr__(self) -> str:
        return self.text(limit=_ROWS)

    def _repr_html_(self) -> str:
        table = html_table(self.columns, self.cells(), caption=self.title(), limit=_HTML_ROWS)
        return f'<div style="max-height:32em;overflow:auto">{table}</div>'


def _width_here() -> int:
    """Return how wide a table is to be here: as the terminal, or as ever where the output goes elsewhere."""
    return shutil.get_terminal_size((_WIDTH, 0)).columns if sys.stdout.isatty() else _WIDTH


def _broken(name: str, width: int) -> str:
    """Return a name, broken after dots into lines of at most ``width`` characters as far as it has dots there."""
    end = name.rfind(".", 0, width) + 1
    return name if len(name) <= width or end == 0 else f"{name[:end]}\n{_broken(name[end:], width)}"


def _break_titles(table: Table) -> None:
    for column in table.columns:
        column.header = Text("\n".join(str(column.header).split()))


def _width(column: rich.table.Column) -> int:
    """Return the width of the longest word of the title, or of the longest cell."""
    texts = [*str(column.header).split("\n"), *map(str, column.cells)]
    return max(map(len, texts), default=0)


def _lines(table: Table, width: int) -> list[str]:
    return [line.rstrip() for line in string_from_table(table, width=width).splitlines()]


class Search(View[Evaluation]):
    """The scores of a search, in order; a notebook shows the picture above the table.

    Attributes:
        fallback: the chosen fallback as a record of a report.
    """

    columns: Sequence[Column | str] = EVALUATION_COLUMNS

    def __init__(self, fallback: Fallback) -> None:
        super().__init__(fallback.evaluations)
        self.fallback = fallback

    def title(self) -> str:
        return evaluation_caption(self.fallback)

    def cells(self) -> list[list[Any]]:
        return evaluation_cells(self.fallback)

    def plot(self) -> Picture:
        """Return a plot of drop against cost, with the Pareto front, the budget and the chosen fallback."""
        return Picture(pareto_svg(self.fallback))

    def _repr_html_(self) -> str:
        return f"{self.plot().svg}{super()._repr_html_()}"
