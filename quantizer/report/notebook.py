"""The display of results: as text in a terminal, as tables and charts in a notebook.

``utils/display.py`` imports this on first use. A display is a table, perhaps with a chart above it in a notebook;
further results follow below.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import rich.table
from rich import box
from rich.text import Text

from quantizer.plan.reasons import ReasonCode
from quantizer.report.charts.axes import histogram_figure, histogram_svg
from quantizer.report.charts.plots import pareto_svg
from quantizer.report.charts.rankings import sensitivity_bars, sensitivity_heatmap
from quantizer.report.tables import (
    Column,
    Table,
    coverage_table,
    evaluations_table,
    groups_table,
    kinds_table,
    layers_table,
    names,
    products_table,
    ranges_table,
    sensitivity_table,
    string_from_table,
)
from quantizer.report.terminal import diagnosis_lines, evaluation_caption, unquantized_words
from quantizer.report.text import counted, decibels, magnitude, percent, share, shorten, significant, wrapped
from quantizer.utils.files import whole_file
from quantizer.utils.records import FLOAT

if TYPE_CHECKING:
    from quantizer.algorithms.sensitivity.session import FallbackCosts, Layers, Search
    from quantizer.diagnose import Diagnoses
    from quantizer.plan.coverage import Coverage, Ranges
    from quantizer.plan.histograms import OperandHistogram, RangeCandidates
    from quantizer.proxy.lower import Kernels
    from quantizer.report.record import RunRecord
    from quantizer.utils.display import Shown

_HTML_ROWS = 300
_WIDTH = 120
_BESIDE_NAMES = 44
_BESIDE_TIGHT_NAMES = 63
"""Columns reserved for the cells beside the names."""
_TEXT_WIDTH = 22
"""Wider columns are text, which may be wrapped."""
_LEAST_NAMES = 24
_GAP = 2
"""Blanks between two columns: the padding and the omitted line."""
_BAR = 40


class Picture:
    """An SVG chart.

    Attributes:
        svg: one ``<svg>`` element.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def __repr__(self) -> str:
        return "a chart: displayed in a notebook; .save(path) writes it as SVG"

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chart to an ``.svg`` file."""
        with whole_file(path) as part:
            part.write_text(self.svg, encoding="utf-8")


def title(shown: Shown) -> str:
    """Return the title of a table, a summary in one line."""
    return table_of(shown).title


def text(shown: Shown, limit: int | None) -> str:
    """Return a result as plain text, each table with at most ``limit`` rows."""
    parts = [_fitted(table_of(shown), limit, _LAYOUTS.get(shown.look, "plain"))]
    return "\n\n".join([*parts, *(part if isinstance(part, str) else text(part, limit) for part in shown.below())])


def run_coverage(record: RunRecord, width: int) -> str:
    """Return the coverage of a run as text of the given width.

    It has the counts by kind, the sites that are not quantized, and the matrix multiplications outside of sites.
    """
    sites = [site for site in record.coverage if not site.quantized]
    words = unquantized_words(record.coverage) or "all sites are quantized"
    tables = [(replace(kinds_table(record.coverage), title=""), "plain")]
    if sites:
        tables.append((replace(coverage_table(sites, mixed=False), title="sites that are not quantized"), "shortened"))
    if outside := [product for product in record.not_quantized if product.site is None]:
        tables.append((products_table(outside, page=False), "shortened"))
    parts = (_fitted(table, None, layout, width) for table, layout in tables)
    return "\n\n".join(["\n".join(wrapped(words, min(width, _WIDTH))), *parts])


def page(shown: Shown) -> str:
    """Return a result as HTML."""
    if shown.look == "histogram":
        # The figure includes the candidates.
        return picture("figure", shown).svg
    above = picture("search", shown).svg if shown.look == "search" else ""
    table = table_of(shown).html(caption=True, limit=_HTML_ROWS, style=True)
    below = (page(part) for part in shown.below() if not isinstance(part, str))
    return f'{above}<div style="max-height:32em;overflow:auto">{table}</div>{"".join(below)}'


def picture(name: str, shown: Any, **options: Any) -> Picture:
    """Return one chart of a result."""
    return Picture(_PICTURES[name](shown, **options))


_PICTURES: dict[str, Callable[..., str]] = {
    "bars": lambda shown, limit: sensitivity_bars(shown.rows, measure=shown.measure, limit=limit),
    "figure": lambda shown: histogram_figure(shown.data),
    "heatmap": lambda shown: sensitivity_heatmap(shown.rows, measure=shown.measure),
    "histogram": lambda shown: histogram_svg(shown.data),
    "search": lambda shown: pareto_svg(shown.fallback),
}


def table_of(shown: Shown) -> Table:
    """Return the table of a result."""
    return _TABLES[shown.look](shown)


def _coverage(coverage: Coverage) -> Table:
    # Unquantized sites come first, so that a limit omits quantized ones.
    table = coverage_table(sorted(coverage.shown, key=lambda row: row.quantized), mixed=True)
    return replace(table, title=_coverage_title(coverage))


def _coverage_title(coverage: Coverage) -> str:
    named = ", ".join(f"{patch.name} (for {patch.target})" for patch in coverage.patches)
    patched = f"; operator patches: {named}" if named else ""
    kinds = coverage.by_kind()
    if any(ReasonCode.of(row.reason) is ReasonCode.NOT_CALIBRATED for row in coverage):
        totals = ", ".join(f"{kind} {total}" for kind, (_, total) in kinds.items())
        return f"sites found: {totals}; calibration decides which are quantized{patched}"
    parts = [f"{kind} {quantized} of {total}" for kind, (quantized, total) in kinds.items()]
    tail = ""
    if coverage.share is not None:
        tail = f"; {share(coverage.share)} of {magnitude(coverage.multiply_adds)} multiply-adds in low precision"
    return f"sites quantized: {', '.join(parts) or 'none found'}{tail}{_left_out(coverage)}{patched}"


def _left_out(coverage: Coverage) -> str:
    """Return the number of omitted rows, and how to show them, as the end of the title."""
    never = sum(not row.ran and not row.quiet for row in coverage)
    branches = sum(not row.ran and row.quiet for row in coverage)
    quiet = Counter(row.kind for row in coverage if row.quiet and row.ran)
    adds, tables = quiet["residual_add"], quiet["embedding"]
    counts = [
        *([counted(never, "site") + " that never ran"] if never else []),
        *([counted(branches, "site") + " in other branches of torch's code"] if branches else []),
        *(
            [f"{counted(adds, 'addition')} that {'is no residual add' if adds == 1 else 'are no residual adds'}"]
            if adds
            else []
        ),
        *([f"{counted(tables, 'table')} that {'is' if tables == 1 else 'are'} not quantized"] if tables else []),
    ]
    omitted = " and ".join(filter(None, [", ".join(counts[:-1]), *counts[-1:]]))
    return f"; print .all for {omitted}" if omitted and not coverage.shows_all else ""


def _ranges(ranges: Ranges) -> Table:
    return ranges_table([(row.site, row) for row in ranges], page=False)


def _kernels(kernels: Kernels) -> Table:
    counts = Counter(row.kernel for row in kernels)
    without = counts.pop(None, 0)
    parts = [f"{count} by {kernel}" for kernel, count in sorted(counts.items(), key=lambda item: str(item[0]))]
    tail = [f"{without} simulated in float"] if without else []
    columns = [
        names("site", "name"),
        Column("operation", "operation"),
        Column("kernel", lambda row: row.kernel or "none"),
        Column("reason", "reason"),
    ]
    rows = sorted(kernels, key=lambda row: row.kernel is not None)
    return Table(f"quantized sites: {', '.join([*parts, *tail]) or 'none'}", columns, rows)


def _layers(layers: Layers) -> Table:
    quantized = sum({row.activations, row.weights} - {FLOAT, None} != set() for row in layers)
    times = "" if layers.where is None else f"; times: {layers.where}"
    heading = f"{quantized} of {len(layers)} layers quantized{times}"
    return replace(layers_table(layers.rows, layers.measure), title=heading)


def _groups(groups: FallbackCosts) -> Table:
    return replace(groups_table(groups.rows, groups.measure), title="gain and cost of keeping each group in float")


def _search(search: Search) -> Table:
    return replace(evaluations_table(search.fallback), title=evaluation_caption(search.fallback))


def _diagnoses(diagnoses: Diagnoses) -> Table:
    heading = f"The {len(diagnoses)} groups that cost most accuracy" if len(diagnoses) else "No group was measured"
    columns = [Column("group, cause and fix", str)]
    return Table(heading, columns, diagnosis_lines(diagnoses.rows, form="python"))


def _histogram(histogram: OperandHistogram) -> Table:
    data = histogram.data
    largest = math.log1p(max(row.count for row in histogram.bins))

    def cut_offs(row: Any) -> str:
        return ", ".join(f"{entry.name} (chosen)" if entry.chosen else entry.name for entry in row.cut_offs)

    columns = [
        Column("magnitude from", "low"),
        Column("values", "count"),
        Column("log counts", lambda row: "█" * math.ceil(_BAR * math.log1p(row.count) / largest)),
        Column("cut-offs", cut_offs),
    ]
    low, high = significant(data.minimum), significant(data.maximum)
    heading = f"{data.name}: {sum(data.counts):,} values from {low} to {high}"
    return Table(heading, columns, histogram.bins)


def _candidates(candidates: RangeCandidates) -> Table:
    columns = [
        Column("candidate", "name"),
        Column("amax", "amax"),
        Column("clipped", "clipped", percent),
        Column("SQNR, dB", "sqnr_db", decibels),
        Column("chosen", lambda row: "yes" if row.chosen else ""),
    ]
    return Table(f"candidate ranges for {candidates.dtype}", columns, candidates.rows)


_TABLES: dict[str, Callable[[Any], Table]] = {
    "candidates": _candidates,
    "diagnoses": _diagnoses,
    "coverage": _coverage,
    "groups": _groups,
    "histogram": _histogram,
    "kernels": _kernels,
    "layers": _layers,
    "products": lambda shown: products_table(shown.rows, page=False),
    "ranges": _ranges,
    "search": _search,
    "sensitivity": lambda shown: sensitivity_table(shown.rows, shown.measure, page=False),
}

_LAYOUTS = {
    "coverage": "shortened",
    "groups": "shortened",
    "layers": "shortened",
    "products": "shortened",
    "ranges": "grouped",
    "sensitivity": "tight",
}
"""How a terminal fits names: ``grouped`` shows the first column as a line above the rows with the same value, ``tight``
breaks long names at a dot and titles at each blank, ``shortened`` cuts the middle of names in the first column and
breaks titles at each blank."""


def _fitted(table: Table, limit: int | None, layout: str, width: int | None = None) -> str:
    """Return a table as wide as the terminal, at most 120 columns; wider if its names do not fit."""
    # Only a terminal has a width.
    here = width or (shutil.get_terminal_size((_WIDTH, 0)).columns if sys.stdout.isatty() else _WIDTH)
    layouts = {"grouped": _grouped, "shortened": _shortened}
    fit = layouts.get(layout) or (lambda *given: _plain(*given, tight=layout == "tight"))
    if here < _WIDTH and (fitted := fit(table, limit, here)) is not None:
        return fitted
    return fit(table, limit, _WIDTH) or ""


def _plain(table: Table, limit: int | None, width: int, *, tight: bool) -> str | None:
    """Return a table of the given width; None if it needs more."""
    names = [at for at, column in enumerate(table.columns) if column.mono]
    room = max(width - _BESIDE_TIGHT_NAMES, _LEAST_NAMES)
    if tight:
        broken = [_with_broken_names(column, room) if column.mono else column for column in table.columns]
        table = replace(table, columns=broken)
    shown = _bare(table, limit)
    shown.title = Text(table.title)
    if tight:
        _break_titles(shown)
    # rich would cut a name anywhere: names get their full width, and other columns share the remainder.
    pieces = [piece for row in table.cells()[:limit] for at in names for piece in row[at].split("\n")]
    for at in names:
        shown.columns[at].no_wrap = all(len(piece) <= width - _BESIDE_NAMES for piece in pieces)
    lines = _lines(shown, width)
    is_whole = all(any(piece in line for line in lines) for piece in pieces)
    return "\n".join(lines) if width == _WIDTH or is_whole else None


def _with_broken_names(column: Column, room: int) -> Column:
    return replace(column, take=lambda row: _broken(column.value(row), room))


def _shortened(table: Table, limit: int | None, width: int) -> str | None:
    """Return a table whose names are shortened to the remaining width; only wide text is wrapped."""
    names = [table.columns[0].value(row) for row in table.rows[:limit]]
    unshortened = _bare(table, limit)
    _break_titles(unshortened)
    widths = [max(_width(column), 1) for column in unshortened.columns]
    room = max(width - sum(min(wide, _TEXT_WIDTH) + _GAP for wide in widths[1:]), _LEAST_NAMES)
    first = replace(table.columns[0], take=lambda row: shorten(table.columns[0].value(row), room))
    shown = _bare(replace(table, columns=[first, *table.columns[1:]]), limit)
    _break_titles(shown)
    for column, wide in zip(shown.columns, [0, *widths[1:]], strict=True):
        column.no_wrap = wide <= _TEXT_WIDTH
    # Text is wrapped before names are shortened further, so that names stay distinct.
    shown.columns[0].min_width = max((len(shorten(name, room)) for name in names), default=0)
    shown.title = Text(table.title)
    lines = _lines(shown, width)
    is_whole = all(any(line.startswith(name) for line in lines) for name in names)
    return "\n".join(lines) if width == _WIDTH or is_whole else None


def _grouped(table: Table, limit: int | None, width: int) -> str | None:
    other_columns = _bare(replace(table, columns=table.columns[1:]), limit)
    for column in other_columns.columns:
        column.no_wrap = True  # the loop below relies on one line per row
    if width < _WIDTH and len(_lines(other_columns, _WIDTH)[1]) + _GAP > width:
        return None
    heading, rule, *lines = _lines(other_columns, width)
    parts = [table.title, f"  {heading}", rule[:1] * 2 + rule]
    above = None
    for group, line in zip_longest([table.columns[0].value(row) for row in table.rows[:limit]], lines):
        if group is not None and group != above:
            above = group
            parts.append(above)
        parts.append(f"  {line}" if group is not None else line)
    return "\n".join(parts)


def _bare(table: Table, limit: int | None) -> rich.table.Table:
    shown = table.terminal(titled=False, limit=limit)
    shown.title_justify = "left"
    shown.box, shown.pad_edge, shown.show_edge, shown.padding = box.SIMPLE_HEAD, False, False, (0, 1, 0, 0)
    if shown.caption is not None:
        shown.caption = f"{shown.caption}; print .text() for all rows; .rows has them as data"
        shown.caption_justify = "left"
    return shown


def _broken(name: str, width: int) -> str:
    """Return a name, broken after dots into lines of at most ``width`` characters where possible."""
    end = name.rfind(".", 0, width) + 1
    return name if len(name) <= width or end == 0 else f"{name[:end]}\n{_broken(name[end:], width)}"


def _break_titles(table: rich.table.Table) -> None:
    for column in table.columns:
        column.header = Text("\n".join(str(column.header).split()))


def _width(column: rich.table.Column) -> int:
    """Return the width of the longest word of the title, or of the longest cell."""
    texts = [*str(column.header).split("\n"), *map(str, column.cells)]
    return max(map(len, texts), default=0)


def _lines(table: rich.table.Table, width: int) -> list[str]:
    return [line.rstrip() for line in string_from_table(table, width=width).splitlines()]
