"""Tables from one description, as HTML for pages and notebooks and as text for terminals; all tables of a report."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from quantizer.plan.reasons import counted
from quantizer.report import text
from quantizer.report.record import EngineChoice, Latency, RunRecord, Stage
from quantizer.report.text import MISSING, error_words, plain, shorten, spread_words, typeset, visible
from quantizer.utils.records import (
    FLOAT,
    FallbackRecord,
    GroupRow,
    GroupSensitivity,
    Inspection,
    LayerRow,
    Operand,
    Range,
    Site,
    UnquantizedProduct,
    group_rows,
    layer_rows,
)

STYLE = """<style>
.qz-table{overflow-x:auto;max-width:100%}
.qz-table table{border-collapse:collapse;font-size:13px;line-height:1.35}
.qz-table caption{text-align:left;font-weight:600;padding:4px 0}
.qz-table th,.qz-table td{padding:3px 12px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid #8884}
.qz-table .qz-num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.qz-table .qz-mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12px}
.qz-table .qz-more{opacity:.75;font-size:12px;padding:4px 0}
</style>"""

_RIGHT = ' class="qz-num"'
_LEAST_NAME = 12
"""Letters of a name that remain in the narrowest terminal."""


@dataclass(frozen=True)
class Column:
    """The title, the value and the format of a column."""

    title: str
    """Heading."""
    take: str | Callable[[Any], Any]
    """The attribute of a row with the value, or a function of the row."""
    show: Callable[[Any], str] = plain
    """The text of a value; None is always a dash."""
    numeric: bool | None = None
    """Whether to align right; None: if all values are numbers or None."""
    mono: bool = False
    """Whether to use a fixed-width font, as for names and paths."""
    tone: Callable[[Any], str] | None = None
    """The CSS class of a value; HTML only."""
    link: Callable[[Any], str | None] | None = None
    """The link of a value, or None; HTML only."""

    def value(self, row: Any) -> Any:
        """Return the value of a row."""
        return attrgetter(self.take)(row) if isinstance(self.take, str) else self.take(row)


def numbers(title: str, take: str | Callable[[Any], Any], show: Callable[[Any], str] = plain) -> Column:
    """Return a right-aligned column."""
    return Column(title, take, show, numeric=True)


def names(title: str, take: str | Callable[[Any], Any]) -> Column:
    """Return a column of names or paths."""
    return Column(title, take, mono=True)


@dataclass(frozen=True)
class Table:
    """A table: its rows, and the format of each column."""

    title: str
    """The name, or a summary in one line."""
    columns: Sequence[Column]
    """The columns, from left to right."""
    rows: Sequence[Any]
    """The rows."""

    def cells(self) -> list[list[Any]]:
        """Return the values of each row."""
        return [[column.value(row) for column in self.columns] for row in self.rows]

    def filled(self) -> Table:
        """Return the table without empty columns."""
        cells = self.cells()
        filled_columns = [column for at, column in enumerate(self.columns) if any(row[at] is not None for row in cells)]
        return replace(self, columns=filled_columns)

    def capital(self) -> Table:
        """Return the table with capitalized column titles, as on a page."""
        titles = [column.title[:1].upper() + column.title[1:] for column in self.columns]
        columns = [replace(column, title=title) for column, title in zip(self.columns, titles, strict=True)]
        return replace(self, columns=columns)

    def html(
        self, *, caption: bool = False, limit: int | None = None, style: bool = False, breaks: bool = False
    ) -> str:
        """Return the table in a container that scrolls sideways; every value is escaped.

        ``breaks``: long names may wrap after dots and underscores.
        """
        shown = self.cells() if limit is None else self.cells()[:limit]
        columns = list(zip(self.columns, self._numeric(), strict=True))
        label = html.escape(self.title)
        rows = [
            "".join(_cell(*column, value, breaks) for column, value in zip(columns, row, strict=True)) for row in shown
        ]
        heads = "".join(
            f'<th scope="col"{_RIGHT if numeric else ""}>{html.escape(typeset(column.title))}</th>'
            for column, numeric in columns
        )
        return "\n".join(
            [
                *([STYLE] if style else []),
                f'<div class="qz-table" role="region" tabindex="0" aria-label="{label}"><table>',
                *([f"<caption>{label}</caption>"] if caption else []),
                f"<thead><tr>{heads}</tr></thead><tbody>",
                *(f"<tr>{cells}</tr>" for cells in rows),
                "</tbody></table>",
                *([f'<div class="qz-more">{self._hidden_rows(limit)}</div>'] if self._hidden_rows(limit) else []),
                "</div>",
            ]
        )

    def terminal(self, *, titled: bool = True, limit: int | None = None, compact: bool = False) -> RichTable:
        """Return the table for a terminal; ``[brackets]`` in a value are text, not markup.

        ``compact``: without lines between columns.
        """
        table = RichTable(title=Text(self.title) if titled else None, title_justify="left")
        if compact:
            table.box, table.pad_edge, table.show_edge, table.collapse_padding = SIMPLE_HEAD, False, False, True
        if self._hidden_rows(limit):
            table.caption = Text(self._hidden_rows(limit))
        for column, fixed in zip(self.columns, self._numeric(), strict=True):
            # Numbers are never wrapped; names are shortened instead.
            table.add_column(Text(column.title), justify="right" if fixed else "left", overflow="fold", no_wrap=fixed)
        if not self.columns[0].mono:
            # Labels of rows: rich would shrink them to nothing beside many numbers.
            longest = max((len(_words(self.columns[0], row[0])) for row in self.cells()[:limit]), default=0)
            table.columns[0].min_width = min(longest, _LEAST_NAME)
            table.columns[0].no_wrap |= longest <= _LEAST_NAME
        for row in self.cells()[:limit]:
            table.add_row(*(_text_cell(column, value) for column, value in zip(self.columns, row, strict=True)))
        return table

    def _hidden_rows(self, limit: int | None) -> str:
        hidden = 0 if limit is None else len(self.rows) - limit
        return f"Rows not shown: {hidden:,}" if hidden > 0 else ""

    def _numeric(self) -> list[bool]:
        """Return whether each column is aligned right."""
        cells = self.cells()
        numeric = []
        for at, column in enumerate(self.columns):
            values = [row[at] for row in cells if row[at] is not None]
            numeric.append(bool(values) and all(map(_is_number, values)) if column.numeric is None else column.numeric)
        return numeric


class _Name:
    """A name, shortened in the middle to fit its column."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shorten(self._name, options.max_width), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(len(self._name), _LEAST_NAME), len(self._name))


def _words(column: Column, value: Any) -> str:
    return "-" if value is None else visible(column.show(value))


def _text_cell(column: Column, value: Any) -> Text | _Name:
    words = _words(column, value)
    # Names with line breaks already fit.
    return _Name(words) if column.mono and "\n" not in words else Text(words)


def string_from_table(table: RichTable, width: int = 120) -> str:
    """Return ``table`` as plain text of at most ``width`` columns."""
    return plain_text(lambda console: console.print(table), width).rstrip("\n")


def plain_text(show: Callable[[Console], None], width: int = 120) -> str:
    """Return the output of ``show`` on a console of ``width`` columns, without colours."""
    stream = io.StringIO()
    # In a notebook rich would display it instead of writing it, or write colours: Jupyter sets FORCE_COLOR.
    show(Console(file=stream, width=width, color_system=None, force_terminal=False, force_jupyter=False))
    return stream.getvalue()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(column: Column, numeric: bool, value: Any, breaks: bool) -> str:
    tone = column.tone(value) if column.tone and value is not None else ""
    names = [*(["qz-num"] if numeric else []), *(["qz-mono"] if column.mono else []), *([tone] if tone else [])]
    css = f' class="{html.escape(" ".join(names))}"' if names else ""
    if value is None:
        return f"<td{css}>{MISSING}</td>"
    # An interval is sorted by its lower end.
    key = value[0] if isinstance(value, tuple) and value else value
    sort = f' data-sort="{float(key)!r}"' if numeric and _is_number(key) else ""
    shown = html.escape(typeset(column.show(value)) if numeric else column.show(value))
    if column.mono and breaks:
        shown = re.sub(r"(?<=\w)(?:\.|_(?!\d))(?=\w)", r"\g<0><wbr>", shown)
    link = column.link(value) if column.link else None
    if link is not None:
        shown = f'<a href="{html.escape(link)}">{shown}</a>'
    return f"<td{css}{sort}>{shown}</td>"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def score_table(record: RunRecord) -> Table:
    """Return one row per form of the model: metric, difference, interval and paired figures."""
    columns = [
        Column("Model", "form"),
        Column("Metric", "metric"),
        numbers("Value", "value", text.score),
        numbers("Difference", "difference", text.signed),
        numbers("95% interval", "interval", text.interval),
        *map(_paired, dict.fromkeys(key for entry in record.scores for key in entry.paired)),
        numbers("Samples", "samples"),
    ]
    return Table("Scores", columns, record.scores)


def _paired(key: str) -> Column:
    name, show = text.paired_figure(key)
    return numbers(f"{name[:1].upper()}{name[1:]}", lambda entry: entry.paired.get(key), show)


def outputs_table(record: RunRecord) -> Table:
    """Return one row per output: SQNR and cosine of engine and proxy against the float model."""
    columns = [
        names("Output", "output"),
        numbers("Batch", lambda row: text.shape(row.batch, row.sequence)),
        numbers("Engine SQNR, dB", lambda row: row.sqnr_db if row.engine else None, text.decibels),
        numbers("Cosine", "cosine", text.score),
        numbers("Proxy SQNR, dB", "proxy_sqnr_db", text.decibels),
        numbers("Engine against proxy, dB", lambda row: row.engine_to_proxy_db if row.engine else None, text.decibels),
    ]
    return Table("Outputs", columns, record.outputs)


def cost_table(record: RunRecord) -> Table:
    """Return one row per engine or form: latency, size and peak memory, with ratios to float."""
    latency = {entry.name: entry for entry in record.latency.engines} if record.latency else {}
    size = {entry.name: entry for entry in record.size}
    memory = {entry.name: entry for entry in record.memory}
    labels = {"float": f"float ({record.latency.reference})"} if record.latency else {}
    spread = {key: spread_words(entry) for key, entry in latency.items()}

    def part(title: str, entries: dict[str, Any], field: str, show: Callable[[Any], str]) -> Column:
        return numbers(title, lambda key: getattr(entries.get(key), field, None), show)

    sizes = {
        key: text.file_size(entry.bytes) if key == "float" else text.size_words(entry.bytes, entry.ratio)
        for key, entry in size.items()
    }
    peaks = {
        key: f"{entry.peak_mib:,.0f} MiB" if key == "float" else text.memory_words(entry.peak_mib, entry.ratio)
        for key, entry in memory.items()
    }

    columns = [Column("Engine", lambda key: labels.get(key, key))]
    if latency:
        columns.append(part("Speed-up", latency, "ratio_to_float", text.times))
        columns += [part("Median latency", latency, "median_ms", text.milliseconds)]
        columns += [numbers("Middle half of latencies", spread.get)]
    if size:
        columns.append(numbers("Size", sizes.get))
    if memory:
        columns.append(numbers("Peak memory", peaks.get))
    return Table("Latency, size and memory", columns, list(dict.fromkeys([*latency, *size, *memory])))


def multiply_add_share(sites: Sequence[Site]) -> float | None:
    """Return the share of the sites' multiply-adds in low precision, 0 to 1; None if none were counted."""
    total = sum(site.multiply_adds or 0 for site in sites)
    return sum(site.multiply_adds or 0 for site in sites if site.quantized) / total if total else None


def kinds_table(sites: Iterable[Site]) -> Table:
    """Return sites, quantized sites and the share of multiply-adds by kind, without sites that never ran."""
    sites = [site for site in sites if site.ran]
    groups = [
        (kind, [site for site in sites if site.kind == kind]) for kind in dict.fromkeys(site.kind for site in sites)
    ]
    columns = [
        Column("Kind", itemgetter(0)),
        Column("Sites", lambda row: len(row[1])),
        Column("Quantized", lambda row: sum(site.quantized for site in row[1])),
        numbers("Share of multiply-adds", lambda row: multiply_add_share(row[1]), text.percent),
    ]
    return Table("Coverage by kind", columns, [*groups, *([("all", sites)] if len(groups) > 1 else [])])


def reasons_table(sites: Iterable[Site]) -> Table:
    """Return the reasons of sites that ran and are not quantized."""
    rows = counted(site.reason for site in sites if site.ran and not site.quantized)
    columns = [Column("Reason", itemgetter(0)), Column("Sites", itemgetter(1))]
    return Table("Sites in float, by reason", columns, rows)


def products_table(products: Sequence[UnquantizedProduct], *, page: bool) -> Table:
    """Return all matrix multiplications and convolutions in float."""
    work, share = (plain, text.percent) if page else (text.magnitude, text.share)
    columns = [
        names("module", place_of),
        Column("operation", "operation", mono=page),
        Column("multiply-adds", "multiply_adds", work, numeric=page or None),
        Column("share", "share", share, numeric=page or None),
        Column("reason", "reason"),
        Column("evidence", lambda row: row.detail or None),
    ]
    heading = f"{text.share(sum(row.share for row in products))} of the multiply-adds in float"
    table = Table(heading, columns, products).filled()
    return replace(table.capital(), title="MatMul, Conv and Gemm in float") if page else table


def place_of(product: UnquantizedProduct) -> str:
    """Return the site of a matrix multiplication or convolution, or the module around it."""
    return product.site or product.path or "(the model)"


def sites_table(sites: Sequence[Site]) -> Table:
    """Return sites with their reasons."""
    columns = [
        names("Site", "name"),
        Column("Kind", "kind"),
        Column("Quantized", "quantized", tone=_yes_or_no),
        Column("Reason", "reason"),
        names("Rule", "rule"),
        Column("Module type", "host_type"),
        names("Source", "place"),
        numbers("Multiply-adds", "multiply_adds"),
    ]
    return Table("Every site", columns, sites)


def coverage_table(sites: Sequence[Site], *, mixed: bool) -> Table:
    """Return sites with their reasons and rules, for a terminal or a notebook.

    ``mixed``: some sites are quantized, so that a column says which.
    """
    columns = [
        names("site", "name"),
        Column("kind", "kind"),
        names("place", "place"),
        *([Column("quantized", "quantized")] if mixed else []),
        Column("reason", lambda row: f"{row.reason} ({row.rule})" if row.rule else row.reason),
    ]
    return Table("sites", columns, sites)


def ranges_table(rows: Sequence[tuple[str, Operand]], *, page: bool) -> Table:
    """Return format, range, scale and SQNR of operands by site; a page omits operands without a range."""

    def take(field: str) -> Callable[[tuple[str, Operand]], Any]:
        return lambda row: getattr(row[1], field)

    def heading_of(title: str) -> str:
        return title if page else title.lower().replace("sqnr, db", "SQNR dB")

    if page:
        rows = [row for row in rows if row[1].amax is not None or row[1].scale is not None or row[1].dynamic]
    # Otherwise all ranges are those of the configured calibrator.
    chosen = page or any(row[1].estimate for row in rows)
    columns = [
        names(heading_of("Site"), itemgetter(0)),
        names(heading_of("Operand"), lambda row: row[1].name.rpartition(".")[2]),
        Column(heading_of("Format"), lambda row: _shown_format(row[1])),
        Column(heading_of("Granularity"), lambda row: row[1].granularity if page or row[1].amax is not None else None),
        *(numbers(heading_of(title), take(f"{title.lower()}imum")) for title in ("Min", "Max")),
        *(numbers(heading_of(title), take(title.lower())) for title in ("amax", "Scale")),
        numbers(heading_of("Clipped"), take("clipped"), text.percent),
        numbers(heading_of("SQNR, dB"), take("sqnr_db"), text.decibels),
        *([Column(heading_of("Estimate"), take("estimate"))] if chosen else []),
        *([names("Group", take("group"))] if page else []),
    ]
    used = sum(row[1].quantized for row in rows)
    heading = f"{len(rows)} ranges, {used} in use; clipped: share of values beyond amax"
    return Table("Ranges" if page else heading, columns, rows)


def _shown_format(operand: Operand) -> str:
    """Return the format of an operand, and its SmoothQuant status if known."""
    if not operand.quantized:
        return FLOAT
    # The coverage has the reason.
    smoothing = operand.smoothing if isinstance(operand, Range) else None
    return operand.format if smoothing is None else f"{operand.format}, {smoothing.partition(':')[0]}"


def evaluations_table(fallback: FallbackRecord) -> Table:
    """Return all scores of a search, in order."""
    budget = fallback.max_drop
    columns = [
        Column("evaluation", lambda row: row[0]),
        numbers("groups in float", lambda row: len(row[1].groups)),
        numbers("cost", lambda row: row[1].cost, text.amount),
        numbers("score", lambda row: row[1].score),
        numbers("drop", lambda row: row[1].drop, text.error),
        Column("in budget", lambda row: None if budget is None else row[1].drop <= budget),
        Column("Pareto-optimal", lambda row: "yes" if row[1].pareto_optimal else ""),
        Column("chosen", lambda row: "yes" if row[1].chosen else ""),
    ]
    return Table("Evaluations of the search", columns, list(enumerate(fallback.evaluations, start=1)))


def searched_groups() -> Column:
    """Return the column with the groups of each evaluation."""
    return names("Groups", lambda row: ", ".join(row[1].groups) or None)


def sensitivity_table(rows: Sequence[GroupSensitivity], measure: str | None, *, page: bool) -> Table:
    """Return the whole sensitivity ranking."""
    words = error_words(measure)
    columns = [
        Column("rank", "rank"),
        names("group", "group"),
        Column("kind", "kind"),
        *([names("block", "block"), numbers("sites", lambda row: len(row.sites))] if page else []),
        numbers(words.column, "error", text.error),
        Column("activations", "activations"),
        Column("multiply-adds" if page else "multiply adds", "multiply_adds", plain if page else text.compact),
        Column("kept in float", lambda row: "yes" if row.fallback else None if page else ""),
    ]
    table = Table(f"{len(rows)} groups, one quantized at a time, by {words.phrase}", columns, rows)
    if not page:
        return table
    return replace(table.capital(), title="Sensitivity ranking", rows=sorted(rows, key=lambda row: row.rank))


def layers_table(rows: Sequence[LayerRow], measure: str | None) -> Table:
    """Return one row per layer, without empty columns."""
    columns = [
        names("layer", lambda row: row.layer or "(the model)"),
        names("operation", "operation"),
        Column("activations", "activations"),
        Column("weights", "weights"),
        numbers("amax", "amax"),
        numbers("SQNR, dB", "sqnr_db", text.decibels),
        numbers(error_words(measure).column, "error", text.error),
        numbers("share of multiply-adds", "share", text.percent),
        *_TIMES,
    ]
    return Table("Layers", columns, rows).filled()


def groups_table(rows: Sequence[GroupRow], measure: str | None) -> Table:
    """Return the gain and cost of keeping each group in float, without empty columns."""
    columns = [
        names("group", "group"),
        numbers(f"{error_words(measure).column} avoided", "error", text.error),
        numbers("SQNR alone, dB", "sqnr_alone_db", text.decibels),
        *_TIMES,
        numbers("latency cost, us", "cost_us", _microseconds),
        Column("state", lambda row: "float" if row.in_float else "quantized"),
    ]
    return Table("Gain and cost of keeping groups in float", columns, rows).filled()


def tables_of_layers(record: RunRecord) -> tuple[Table, Table]:
    """Return the layers of a run, and its groups with their gain and cost in float."""
    times = record.latency_fallback.groups if record.latency_fallback else ()
    layers = layer_rows(record.coverage, record.not_quantized, record.sensitivity, times)
    groups = group_rows(record.coverage, record.sensitivity, times, record.diagnoses)
    return layers_table(layers, record.measure).capital(), groups_table(groups, record.measure).capital()


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.1f}"


_TIMES = (numbers("quantized, us", "low_us", _microseconds), numbers("float, us", "float_us", _microseconds))


def precision_name(precision: str) -> str:
    """Return a precision for the reader."""
    return {"index": "indices", "unknown": "unknown"}.get(precision, precision.upper())


def shares_table(inspection: Inspection) -> Table:
    """Return the shares of an engine's layers by precision."""
    columns = [
        Column("Precision", "precision", precision_name),
        numbers("Layers", "layers"),
        numbers("Share of layers", "layer_share", text.percent),
        numbers("MatMul/Conv/Gemm", "products"),
        numbers("Share of multiply-adds", "multiply_add_share", text.percent),
        numbers("Share of time", "time_share", text.percent),
    ]
    return Table("Precision in the engine", columns, inspection.shares)


ENGINE_LAYERS = (
    names("Layer", "name"),
    Column("Type", "type"),
    Column("Computes in", "precision", precision_name),
    Column("Writes", "writes", precision_name),
    numbers("Multiply-adds", "multiply_adds", text.compact),
    numbers("Time, µs", "time_us"),
)


def choice_table(choice: EngineChoice, *, page: bool) -> Table:
    """Return one row per candidate: latency at each shape, SQNR, score difference, and the verdict."""
    scored = any(candidate.score_difference is not None for candidate in choice.candidates)

    def time(at: int) -> Callable[[Any], float | None]:
        return lambda row: row[1].milliseconds[at] if at < len(row[1].milliseconds) else None

    engine, unit, sqnr, score, verdict = (
        ("Engine", ", ms", "SQNR, dB", "Score difference", "Verdict")
        if page
        else ("engine", "\nms", "SQNR\ndB", "score\ndifference", "verdict")
    )
    columns = [
        *([Column("Number", itemgetter(0))] if page else []),
        Column(engine, lambda row: row[1].name),
        *(numbers(f"{shape}{unit}", time(at), "{:.2f}".format) for at, shape in enumerate(choice.shapes)),
        numbers(sqnr, lambda row: row[1].sqnr_db, text.decibels),
        *([numbers(score, lambda row: row[1].score_difference, text.signed)] if scored else []),
        Column(verdict, lambda row: row[1].verdict if page else text.short_verdict(row[1].verdict)),
    ]
    return Table("Candidates", columns, list(enumerate(choice.candidates, start=1)))


def latency_table(record: RunRecord) -> Table:
    """Return the median latency of all engines at all sizes, and of each graph of an encoder-decoder model."""
    latencies = [latency for latency in (record.latency, *record.other_latencies) if latency is not None]
    names = list(dict.fromkeys(entry.name for latency in latencies for entry in latency.engines))

    def of(name: str, what: str) -> Callable[[Latency], float | None]:
        return lambda latency: next((getattr(entry, what) for entry in latency.engines if entry.name == name), None)

    columns = [
        *(
            [Column("graph", lambda latency: latency.graph or "whole model")]
            if any(latency.graph for latency in latencies)
            else []
        ),
        Column("batch", lambda latency: text.shape(latency.batch, latency.sequence)),
        *(numbers(f"{name}, ms", of(name, "median_ms"), "{:.2f}".format) for name in names),
        numbers("speed-up", of("engine", "ratio_to_float"), text.times),
    ]
    return Table("Latency at all sizes", columns, latencies)


_FACTS = {"memory_gib": "memory, GiB", "instructions": "INT8 instructions"}


def facts_table(left: str, right: str, values: Any) -> Table:
    """Return names with their values."""
    shown = Column(right, lambda row: None if row[1] is None else str(row[1]))
    return Table(left, [Column(left, lambda row: _FACTS.get(row[0], row[0])), shown], list(values.items()))


def stages_table(stages: Sequence[Stage]) -> Table:
    """Return the time of each stage, and their sum."""
    rows = [
        (f"{stage.name} (part of: {stage.parent})" if stage.parent else stage.name, stage.seconds) for stage in stages
    ]
    rows += [("total", sum(stage.seconds for stage in stages if stage.parent is None))] if stages else []
    return Table("Stages", [Column("Stage", itemgetter(0)), Column("Time", itemgetter(1), text.seconds)], rows)
