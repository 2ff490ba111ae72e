"""Tables from one description of their columns: HTML for notebooks and reports, text for terminals.

The fields of a ranking that pictures read, and the order of blocks in pictures.

A choice of an engine as a table, for a terminal and for the page.

The scores of a search as the cells of a table, for a terminal, a notebook and the page.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from quantizer.report.record import Fallback
from quantizer.report.run_records import BudgetOutcome, EngineChoice
from quantizer.report.tables import text
from quantizer.report.tables.text import MISSING, plain, print_lines, shorten, typeset, visible

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
    """Return a table in a container that scrolls sideways; every value is escaped."""
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


class RankedRow(Protocol):
    """A group with its error."""

    @property
    def group(self) -> str:
        """Name of the group."""

    @property
    def kind(self) -> str:
        """Kind of its sites."""

    @property
    def block(self) -> str:
        """The block of its first site."""

    @property
    def position(self) -> int:
        """Its place in the model's order."""

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of its sites."""

    @property
    def error(self) -> float:
        """The error of quantizing it alone."""

    @property
    def fallback(self) -> bool:
        """True if it fell back to float."""


def blocks_in_order(rows: Iterable[RankedRow]) -> list[str]:
    """Return each block once, in the model's order."""
    return list(dict.fromkeys(row.block for row in sorted(rows, key=lambda row: (row.position, row.group))))


_ROOM = 20
"""Letters of a verdict beside the times of three shapes in a terminal of 80."""


def print_choice(choice: EngineChoice, console: Console) -> None:
    """Print what was chosen, and all candidates in a table."""
    print_lines([choice.headline], console, first="", style="bold")
    told = "latency in ms, medians of rounds that take turns; dB of the outputs against float"
    scored = any(candidate.score_difference is not None for candidate in choice.candidates)
    told += "; to float: the difference of the score" if scored else ""
    print_lines([told], console, first="")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for title in ("engine", *choice.shapes, "dB", *(("to float",) if scored else ())):
        table.add_column(title, justify="left" if title == "engine" else "right", no_wrap=True)
    table.add_column("verdict")
    for candidate in choice.candidates:
        times = [f"{value:.2f}" for value in candidate.milliseconds]
        times += ["-"] * (len(choice.shapes) - len(times))
        sqnr = "-" if candidate.sqnr_db is None else text.decibels(candidate.sqnr_db)
        difference = candidate.score_difference
        score = ["-" if difference is None else text.signed(difference)] if scored else []
        table.add_row(candidate.name, *times, sqnr, *score, Text(_short(candidate.verdict)))
    console.print(table)
    for candidate in choice.candidates:
        if candidate.verdict != _short(candidate.verdict):
            # Not wrapped: a reason may hold a path.
            console.print(Text(f"{candidate.name}: {candidate.verdict}"), soft_wrap=True)
    print_lines(missing_lines(choice), console, first="")


def _short(verdict: str) -> str:
    """Return a verdict as a table has room for it: without a reason, which may hold a path."""
    return verdict if len(verdict) <= _ROOM else re.split(":| at ", verdict)[0]


def choice_table(choice: EngineChoice) -> str:
    """Return a table with a numbered row for each candidate: latency at each shape, SQNR, score, and the verdict."""
    scored = any(candidate.score_difference is not None for candidate in choice.candidates)
    columns: list[Column | str] = [
        "",
        "Engine",
        *(Column(title=f"{shape}, ms", numeric=True, show=lambda value: f"{value:.2f}") for shape in choice.shapes),
        Column(title="SQNR, dB", numeric=True, show=text.decibels),
        *((Column(title="Score to float", numeric=True, show=text.signed),) if scored else ()),
        "Verdict",
    ]
    rows = [
        (
            row,
            candidate.name,
            *candidate.milliseconds,
            *[None] * (len(choice.shapes) - len(candidate.milliseconds)),
            candidate.sqnr_db,
            *((candidate.score_difference,) if scored else ()),
            candidate.verdict,
        )
        for row, candidate in enumerate(choice.candidates, start=1)
    ]
    return html_table(columns, rows, label="Candidates", style=False)


def missing_lines(choice: EngineChoice) -> list[str]:
    """Return a sentence for each candidate that is not installed."""
    return [f"not tried, as it is not installed: {missing}" for missing in choice.missing]


EVALUATION_COLUMNS = (
    Column(title="evaluation"),
    Column(title="groups put back", numeric=True),
    Column(title="cost", numeric=True, show=text.amount),
    Column(title="score", numeric=True),
    Column(title="drop", numeric=True, show=text.error),
    Column(title="in budget"),
    Column(title="front"),
    Column(title=""),
)


def budget_line(outcome: BudgetOutcome) -> str:
    """Return whether a budget is met, in a line: what was asked, and the drops that were measured."""
    words = [f"asked {text.error(outcome.asked)}", f"drop in tuning {text.drop(outcome.tuning)}"]
    if outcome.evaluation is not None:
        low, high = outcome.interval or (None, None)
        span = "" if low is None or high is None else f" (95%: {text.drop(low)} to {text.drop(high)})"
        words.append(f"in evaluation of the {outcome.which} {text.drop(outcome.evaluation)}{span}")
    return f"{'; '.join(words)}: {outcome.verdict}"


def evaluation_cells(fallback: Fallback) -> list[list[Any]]:
    """Return the cells of one row for each evaluation, in order."""
    return [
        [
            number,
            len(entry.groups),
            entry.cost,
            entry.score,
            entry.drop,
            None if fallback.max_drop is None else entry.drop <= fallback.max_drop,
            "front" if entry.front else "",
            "chosen" if entry.chosen else "",
        ]
        for number, entry in enumerate(fallback.evaluations, start=1)
    ]


def evaluation_caption(fallback: Fallback) -> str:
    """Return the budget and the result of the search, in a line."""
    words = [text.counted(len(fallback.evaluations), "evaluation")]
    if fallback.float_score is not None:
        words.append(f"the float model scores {text.plain(fallback.float_score)}")
    if fallback.max_drop is not None:
        words.append(f"a drop of {text.error(fallback.max_drop)} is allowed")
    found = next((entry for entry in fallback.evaluations if entry.chosen), None)
    if found is not None:
        words.append(f"with {text.counted(len(found.groups), 'group')} put back it scores {text.plain(found.score)}")
    else:
        words.append(f"put back: all, {text.counted(len(fallback.groups), 'group')}")
    words += [
        ("" if entry.rows is None else f"on {text.counted(entry.rows, 'row')} that the search did not see, ")
        + f"the engine with {text.counted(entry.groups, 'group')} put back drops by {text.error(entry.drop)}"
        for entry in fallback.checks
    ]
    if fallback.outcome is not None:
        words.append(budget_line(fallback.outcome))
    if fallback.checks and fallback.max_drop is not None and fallback.checks[-1].drop > fallback.max_drop:
        words.append("the budget is not met on the engine, and this is the best plan found")
    return "; ".join(words)
