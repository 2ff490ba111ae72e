"""Tables from one description of their columns: HTML for notebooks and reports, text for terminals."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from quantizer.report.tables.text import MISSING, plain, shorten, typeset, visible

STYLE = """<style>
.qz-table{overflow-x:auto;max-width:100%}
.qz-table table{border-collapse:collapse;font-size:13px;line-height:1.35}
.qz-table caption{text-align:left;font-weight:600;padding:4px 0}
.qz-table th,.qz-table td{padding:3px 12px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid #8884}
.qz-table .qz-num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.qz-table .qz-mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12px}
.qz-table .qz-more{opacity:.75;font-size:12px;padding:4px 0}
</style>"""

_LEAST_NAME = 12
"""Letters of a name that are left of it in the narrowest terminal."""

_ALIGN = {True: ' class="qz-num"', False: ""}


@dataclass(frozen=True, kw_only=True)
class Column:
    """The title and the format of a column; a plain string stands for a column with only a title."""

    title: str
    """Heading."""
    numeric: bool | None = None
    """Whether to align right; None: if all values are numbers or None."""
    mono: bool = False
    """Whether to use a fixed-width font, as for names and paths."""
    show: Callable[[Any], str] = plain
    """The function that gives the text of a value; None is always a dash."""
    tone: Callable[[Any], str] | None = None
    """The function that gives the CSS class of a value; HTML only."""
    link: Callable[[Any], str | None] | None = None
    """The function that gives the address to which a value leads, or None; HTML only."""


def html_table(
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[Any]],
    *,
    caption: str | None = None,
    label: str | None = None,
    limit: int | None = None,
    style: bool = True,
) -> str:
    """Return a table in a container that scrolls sideways; every value is escaped.

    Args:
        columns: the columns, one for each cell of a row.
        rows: the cells of each row; None is a dash.
        caption: the heading of the table.
        label: the name of the container for screen readers; None: the caption.
        limit: the largest number of rows, followed by the number of the others; None: all rows.
        style: whether to put the style sheet in front, as notebooks need it.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """
    described = _described(columns, rows)
    shown = rows if limit is None else rows[:limit]
    lines = [STYLE] if style else []
    name = html.escape(label or caption or "table")
    lines.append(f'<div class="qz-table" role="region" tabindex="0" aria-label="{name}"><table>')
    if caption:
        lines.append(f"<caption>{html.escape(caption)}</caption>")
    heads = "".join(
        f'<th scope="col"{_ALIGN[bool(column.numeric)]}>{html.escape(column.title)}</th>' for column in described
    )
    lines.append(f"<thead><tr>{heads}</tr></thead><tbody>")
    lines.extend(_row(described, row) for row in shown)
    lines.append("</tbody></table>")
    if len(shown) < len(rows):
        lines.append(f'<div class="qz-more">Rows not shown: {len(rows) - len(shown):,}</div>')
    return "\n".join([*lines, "</div>"])


def text_table(
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[Any]],
    *,
    title: str | None = None,
    limit: int | None = None,
    compact: bool = False,
) -> Table:
    """Return the table for a terminal; ``[brackets]`` in a value are text, not markup.

    Arguments and errors are those of :func:`html_table`; ``compact``: without lines between columns.
    """
    described = _described(columns, rows)
    shown = rows if limit is None else rows[:limit]
    table = Table(title=None if title is None else Text(title), title_justify="left")
    if compact:
        table.box, table.pad_edge, table.show_edge, table.collapse_padding = SIMPLE_HEAD, False, False, True
    if len(shown) < len(rows):
        table.caption = Text(f"Rows not shown: {len(rows) - len(shown):,}")
    for column in described:
        # A number is never broken over lines, and a name gives its middle for them.
        fixed = bool(column.numeric)
        table.add_column(Text(column.title), justify="right" if fixed else "left", overflow="fold", no_wrap=fixed)
    for row in shown:
        table.add_row(*(_text_cell(column, value) for column, value in zip(described, row, strict=True)))
    return table


class _Name:
    """Name in a cell that is shortened in the middle where the terminal has no room for it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shorten(self._name, options.max_width), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._name), _LEAST_NAME), len(self._name))


def _text_cell(column: Column, value: Any) -> Text | _Name:
    words = "-" if value is None else visible(column.show(value))
    # A name with line breaks has its room already.
    return _Name(words) if column.mono and "\n" not in words else Text(words)


def string_from_table(table: Table, width: int = 120) -> str:
    """Return ``table`` as plain text of at most ``width`` columns."""
    return plain_text(lambda console: console.print(table), width).rstrip("\n")


def plain_text(show: Callable[[Console], None], width: int = 120) -> str:
    """Return what ``show`` prints on a console of ``width`` columns, without colours."""
    stream = io.StringIO()
    # In a notebook rich would display it instead of writing it, or write colours: Jupyter sets FORCE_COLOR.
    show(Console(file=stream, width=width, color_system=None, force_terminal=False, force_jupyter=False))
    return stream.getvalue()


def _described(columns: Sequence[Column | str], rows: Sequence[Sequence[Any]]) -> list[Column]:
    """Return the columns with the alignment of each decided."""
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"row {number} has {len(row)} cells, but there are {len(columns)} columns")
    described = []
    for index, column in enumerate(columns):
        column = Column(title=column) if isinstance(column, str) else column
        numeric = column.numeric
        if numeric is None:
            values = [row[index] for row in rows if row[index] is not None]
            numeric = bool(values) and all(map(_is_number, values))
        described.append(replace(column, numeric=numeric))
    return described


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _class(column: Column, extra: str = "") -> str:
    names = ["qz-num"] if column.numeric else []
    names += ["qz-mono"] if column.mono else []
    names += [extra] if extra else []
    return f' class="{html.escape(" ".join(names))}"' if names else ""


def _row(columns: Sequence[Column], row: Sequence[Any]) -> str:
    return f"<tr>{''.join(_cell(column, value) for column, value in zip(columns, row, strict=True))}</tr>"


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return f"<td{_class(column)}>{MISSING}</td>"
    text = typeset(column.show(value)) if column.numeric else column.show(value)
    tone = column.tone(value) if column.tone else ""
    # An interval is sorted by its lower end.
    key = value[0] if isinstance(value, tuple) and value else value
    sort = f' data-sort="{float(key)!r}"' if column.numeric and _is_number(key) else ""
    shown, leads = html.escape(text), column.link(value) if column.link else None
    if leads is not None:
        shown = f'<a href="{html.escape(leads)}">{shown}</a>'
    return f"<td{_class(column, tone)}{sort}>{shown}</td>"
