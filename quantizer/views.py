"""What a ``Quantizer`` shows: coverage, sensitivity and ranges, as a table in a terminal and as HTML in a notebook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import Generic
from typing import TypeVar

from rich import box

from quantizer.proxy.build import SkippedSource
from quantizer.proxy.plan import NOT_CALIBRATED
from quantizer.proxy.plan import OperandPlan
from quantizer.proxy.plan import Plan
from quantizer.proxy.plan import SitePlan
from quantizer.report.plots import sensitivity_bars
from quantizer.report.tables import Column
from quantizer.report.tables import html_table
from quantizer.report.tables import string_from_table
from quantizer.report.tables import text_table

__all__ = ["BarPlot", "Coverage", "CoverageRow", "RangeRow", "Ranges", "Sensitivity", "SensitivityRow"]

Row = TypeVar("Row")

_ROWS = 40
"""Rows that ``repr`` shows; ``text()`` gives all."""
_HTML_ROWS = 300
_WIDTH = 120
_NAME_WIDTH = 76

# An add of integers, tuples or broadcasts is found like any other, but tells a reader nothing.
_QUIET = (
    "its operands are not floating-point tensors",
    "the add broadcasts an operand",
    "an operand of the add is a parameter",
    "no operand of the add comes from a weighted product",
    "both operands of the add come from one product",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverageRow:
    """One site, quantized or not, and why."""

    name: str
    kind: str
    host_type: str
    file: str
    line: int
    quantized: bool
    reason: str
    rule: str | None
    multiply_adds: int

    @property
    def quiet(self) -> bool:
        """An addition that is no candidate, or a table that nobody asked to quantize: listed, but not shown."""
        if self.kind == "embedding":
            return self.rule == "sites.embedding: false"
        return self.kind == "residual_add" and not self.quantized and self.reason in _QUIET


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeRow:
    """The range of one operand; ``scale`` is the largest of a per-channel weight."""

    name: str
    role: str
    quantized: bool
    minimum: float | None
    maximum: float | None
    amax: float | None
    scale: float | None
    clipped: float | None
    sqnr_db: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityRow:
    """A group's place in the ranking, and whether it was put back to float."""

    rank: int
    group: str
    kind: str
    error: float
    fallback: bool
    sites: tuple[str, ...]


class _View(Generic[Row]):
    """A read-only list of rows with a title."""

    columns: Sequence[Column | str]

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def title(self) -> str:
        """What the table says in one line."""
        raise NotImplementedError

    def cells(self) -> list[list[Any]]:
        """The table's rows as shown."""
        raise NotImplementedError

    def text(self, limit: int | None = None) -> str:
        """The table as plain text, for a terminal of 120 columns; ``limit`` rows at most, None shows all."""
        cells = self.cells()
        table = text_table(self.columns, cells, title=self.title(), limit=limit)
        table.box, table.pad_edge, table.show_edge, table.padding = box.SIMPLE_HEAD, False, False, (0, 1, 0, 0)
        # A name is one word, which would be cut anywhere: it gets its own width, and the other columns share the rest.
        widest = max((len(row[at]) for row in cells[:limit] for at in self._names()), default=0)
        for at in self._names():
            table.columns[at].no_wrap = widest <= _NAME_WIDTH
        if table.caption is not None:
            table.caption = f"{table.caption}; print .text() to see all, .rows holds them"
            table.caption_justify = "left"
        lines = string_from_table(table, width=_WIDTH).splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def _names(self) -> list[int]:
        return [at for at, column in enumerate(self.columns) if isinstance(column, Column) and column.mono]

    def __repr__(self) -> str:
        return self.text(limit=_ROWS)

    def _repr_html_(self) -> str:
        table = html_table(self.columns, self.cells(), caption=self.title(), limit=_HTML_ROWS)
        return f'<div style="max-height:32em;overflow:auto">{table}</div>'


class Coverage(_View[CoverageRow]):
    """Every site found: quantized, or why not.

    Iterating gives all rows; the table leaves out additions that are no candidates, which it counts, and
    embeddings that nobody asked to quantize (``row.quiet``).
    """

    columns = (
        Column(title="site", mono=True),
        "kind",
        "line",
        "quantized",
        "why",
    )

    @classmethod
    def from_plan(cls, plan: Plan, skipped: Sequence[SkippedSource]) -> Coverage:
        """The coverage of a plan, with what could not be rewritten."""
        return cls([*map(_row_of_site, plan.values()), *map(_row_of_source, skipped)])

    @property
    def quantized(self) -> tuple[CoverageRow, ...]:
        """The sites that are quantized."""
        return tuple(row for row in self.rows if row.quantized)

    @property
    def skipped(self) -> tuple[CoverageRow, ...]:
        """The sites that are not."""
        return tuple(row for row in self.rows if not row.quantized)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Quantized and all sites of each kind, additions that are no candidates left out."""
        shown = [row for row in self.rows if not row.quiet]
        total, held = Counter(row.kind for row in shown), Counter(row.kind for row in shown if row.quantized)
        return {kind: (held[kind], total[kind]) for kind in sorted(total)}

    def title(self) -> str:
        if any(row.reason == NOT_CALIBRATED for row in self.rows):
            totals = ", ".join(f"{kind} {total}" for kind, (_, total) in self.by_kind().items())
            return f"sites found: {totals}; calibration decides which of them are quantized"
        parts = [f"{kind} {held} of {total}" for kind, (held, total) in self.by_kind().items()]
        quiet = sum(row.quiet for row in self.rows if row.kind == "residual_add")
        tail = f"; {quiet} additions that join no branches are not shown" if quiet else ""
        return f"sites quantized: {', '.join(parts) or 'none found'}{tail}"

    def cells(self) -> list[list[Any]]:
        """What is not quantized comes first: a table that is cut short should lose the rows that say least."""
        return [
            [row.name, row.kind, row.line, "yes" if row.quantized else "no", _why(row)]
            for row in sorted(self.rows, key=lambda row: row.quantized)
            if not row.quiet
        ]


class Sensitivity(_View[SensitivityRow]):
    """The groups, ranked: what the model's output loses when one alone is quantized."""

    columns = (
        "rank",
        Column(title="group", mono=True),
        "kind",
        Column(title="relative error", show=lambda value: f"{value:.3e}"),
        "put back",
    )

    def title(self) -> str:
        return f"{len(self.rows)} groups by the relative error of the output with one of them quantized"

    def cells(self) -> list[list[Any]]:
        return [[row.rank, row.group, row.kind, row.error, "yes" if row.fallback else ""] for row in self.rows]

    def plot(self, limit: int = 30) -> BarPlot:
        """Horizontal bars of the worst ``limit`` groups; shows itself in a notebook, ``.save(path)`` writes SVG."""
        return BarPlot(sensitivity_bars(self.rows, limit=limit))


class BarPlot:
    """An SVG picture."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def __repr__(self) -> str:
        return "a picture: a notebook shows it, .save(path) writes it as SVG"

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str) -> None:
        """Write the picture to an ``.svg`` file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)


class Ranges(_View[RangeRow]):
    """The range of every operand that was observed."""

    columns = (
        Column(title="operand", mono=True),
        "used",
        "min",
        "max",
        "amax",
        Column(title="clipped", show=lambda value: f"{value:.4%}"),
        Column(title="SQNR dB", show=lambda value: f"{value:.1f}"),
    )

    @classmethod
    def from_plan(cls, plan: Plan) -> Ranges:
        """The ranges of a plan."""
        return cls([_row_of_operand(site, operand) for site in plan.values() for operand in site.operands])

    def title(self) -> str:
        used = sum(row.quantized for row in self.rows)
        return f"{len(self.rows)} ranges, {used} of them used; clipped is the share of values beyond amax"

    def cells(self) -> list[list[Any]]:
        return [
            [
                row.name,
                "yes" if row.quantized else "no",
                row.minimum,
                row.maximum,
                row.amax,
                row.clipped,
                row.sqnr_db,
            ]
            for row in self.rows
        ]


def _why(row: CoverageRow) -> str:
    return f"{row.reason} ({row.rule})" if row.rule else row.reason


def _row_of_site(entry: SitePlan) -> CoverageRow:
    return CoverageRow(
        name=entry.name,
        kind=entry.kind,
        host_type=entry.host_type,
        file=entry.file,
        line=entry.line,
        quantized=entry.quantized,
        reason=entry.reason,
        rule=entry.rule,
        multiply_adds=entry.multiply_adds,
    )


def _row_of_source(skipped: SkippedSource) -> CoverageRow:
    source = skipped.source
    return CoverageRow(
        name=skipped.path or "(the model)",
        kind=skipped.kind,
        host_type=skipped.host_type,
        file=source.file if source else "",
        line=source.line if source else 0,
        quantized=False,
        reason=skipped.reason,
        rule=None,
        multiply_adds=0,
    )


def _row_of_operand(site: SitePlan, operand: OperandPlan) -> RangeRow:
    return RangeRow(
        name=f"{site.name}.{operand.name}",
        role=operand.role,
        quantized=operand.quantized,
        minimum=operand.minimum,
        maximum=operand.maximum,
        amax=operand.largest_amax,
        scale=operand.largest_scale,
        clipped=operand.clipped,
        sqnr_db=operand.sqnr_db,
    )
