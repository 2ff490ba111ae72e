"""Tables from one description: HTML for notebooks and pages, text for terminals; and the tables of a report."""

from __future__ import annotations

import html
import io
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
"""Letters of a name that are left of it in the narrowest terminal."""


@dataclass(frozen=True)
class Column:
    """The title, the value and the format of a column."""

    title: str
    """Heading."""
    take: str | Callable[[Any], Any]
    """The value of a row: the name of its attribute, or a function of it."""
    show: Callable[[Any], str] = plain
    """The function that gives the text of a value; None is always a dash."""
    numeric: bool | None = None
    """Whether to align right; None: if all values are numbers or None."""
    mono: bool = False
    """Whether to use a fixed-width font, as for names and paths."""
    tone: Callable[[Any], str] | None = None
    """The function that gives the CSS class of a value; HTML only."""
    link: Callable[[Any], str | None] | None = None
    """The function that gives the address to which a value leads, or None; HTML only."""

    def value(self, row: Any) -> Any:
        """Return the value of a row."""
        return attrgetter(self.take)(row) if isinstance(self.take, str) else self.take(row)


def numbers(title: str, take: str | Callable[[Any], Any], show: Callable[[Any], str] = plain) -> Column:
    """Return a column of numbers, or of what is aligned as they are."""
    return Column(title, take, show, numeric=True)


def names(title: str, take: str | Callable[[Any], Any]) -> Column:
    """Return a column of names or paths."""
    return Column(title, take, mono=True)


@dataclass(frozen=True)
class Table:
    """A table: what it holds, and how each column is shown."""

    title: str
    """Its name, or a summary in one line."""
    columns: Sequence[Column]
    """The columns, from left to right."""
    rows: Sequence[Any]
    """The rows, each of which all columns read."""

    def cells(self) -> list[list[Any]]:
        """Return the values of each row."""
        return [[column.value(row) for column in self.columns] for row in self.rows]

    def filled(self) -> Table:
        """Return the table without the columns that hold nothing."""
        cells = self.cells()
        kept = [column for at, column in enumerate(self.columns) if any(row[at] is not None for row in cells)]
        return replace(self, columns=kept)

    def capital(self) -> Table:
        """Return the table with titles of columns that begin with a capital letter, as on a page."""
        titled = [replace(column, title=column.title[:1].upper() + column.title[1:]) for column in self.columns]
        return replace(self, columns=titled)

    def html(self, *, caption: bool = False, limit: int | None = None, style: bool = False) -> str:
        """Return the table in a container that scrolls sideways; every value is escaped."""
        shown = self.cells() if limit is None else self.cells()[:limit]
        columns = list(zip(self.columns, self._numeric(), strict=True))
        label = html.escape(self.title)
        heads = "".join(
            f'<th scope="col"{_RIGHT if numeric else ""}>{html.escape(column.title)}</th>'
            for column, numeric in columns
        )
        return "\n".join(
            [
                *([STYLE] if style else []),
                f'<div class="qz-table" role="region" tabindex="0" aria-label="{label}"><table>',
                *([f"<caption>{label}</caption>"] if caption else []),
                f"<thead><tr>{heads}</tr></thead><tbody>",
                *(
                    f"<tr>{''.join(_cell(*column, value) for column, value in zip(columns, row, strict=True))}</tr>"
                    for row in shown
                ),
                "</tbody></table>",
                *([f'<div class="qz-more">{self._rest(limit)}</div>'] if self._rest(limit) else []),
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
        if self._rest(limit):
            table.caption = Text(self._rest(limit))
        for column, fixed in zip(self.columns, self._numeric(), strict=True):
            # A number is never broken over lines, and a name gives its middle for them.
            table.add_column(Text(column.title), justify="right" if fixed else "left", overflow="fold", no_wrap=fixed)
        for row in self.cells()[:limit]:
            table.add_row(*(_text_cell(column, value) for column, value in zip(self.columns, row, strict=True)))
        return table

    def _rest(self, limit: int | None) -> str:
        hidden = 0 if limit is None else len(self.rows) - limit
        return f"Rows not shown: {hidden:,}" if hidden > 0 else ""

    def _numeric(self) -> list[bool]:
        """Return whether each column is aligned right."""
        cells = self.cells()
        found = []
        for at, column in enumerate(self.columns):
            values = [row[at] for row in cells if row[at] is not None]
            found.append(bool(values) and all(map(_is_number, values)) if column.numeric is None else column.numeric)
        return found


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


def string_from_table(table: RichTable, width: int = 120) -> str:
    """Return ``table`` as plain text of at most ``width`` columns."""
    return plain_text(lambda console: console.print(table), width).rstrip("\n")


def plain_text(show: Callable[[Console], None], width: int = 120) -> str:
    """Return what ``show`` prints on a console of ``width`` columns, without colours."""
    stream = io.StringIO()
    # In a notebook rich would display it instead of writing it, or write colours: Jupyter sets FORCE_COLOR.
    show(Console(file=stream, width=width, color_system=None, force_terminal=False, force_jupyter=False))
    return stream.getvalue()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(column: Column, numeric: bool, value: Any) -> str:
    tone = column.tone(value) if column.tone and value is not None else ""
    names = [*(["qz-num"] if numeric else []), *(["qz-mono"] if column.mono else []), *([tone] if tone else [])]
    css = f' class="{html.escape(" ".join(names))}"' if names else ""
    if value is None:
        return f"<td{css}>{MISSING}</td>"
    # An interval is sorted by its lower end.
    key = value[0] if isinstance(value, tuple) and value else value
    sort = f' data-sort="{float(key)!r}"' if numeric and _is_number(key) else ""
    shown = html.escape(typeset(column.show(value)) if numeric else column.show(value))
    leads = column.link(value) if column.link else None
    if leads is not None:
        shown = f'<a href="{html.escape(leads)}">{shown}</a>'
    return f"<td{css}{sort}>{shown}</td>"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def score_table(record: RunRecord) -> Table:
    """Return a row for each form of the model: metric, difference, interval and paired figures."""
    columns = [
        Column("Model", "which"),
        Column("Metric", "metric"),
        numbers("Value", "value", text.score),
        numbers("Difference", "difference", text.signed),
        numbers("95% interval", "interval", text.interval),
        *map(_paired, dict.fromkeys(key for entry in record.scores for key in entry.paired)),
        numbers("Samples", "samples"),
    ]
    return Table("Scores", columns, record.scores)


def _paired(key: str) -> Column:
    show = text.percent if "flip" in key or "share" in key else text.score
    return numbers(key.replace("_", " "), lambda entry: entry.paired.get(key), show)


def outputs_table(record: RunRecord) -> Table:
    """Return a row for each output: its SQNR and cosine to the float model, of engine and proxy."""
    columns = [
        names("Output", "output"),
        numbers("Batch", lambda one: text.shape(one.batch, one.sequence)),
        numbers("Engine, dB", lambda one: one.sqnr_db if one.engine else None, text.decibels),
        numbers("Cosine", "cosine", text.score),
        numbers("Proxy, dB", "proxy_sqnr_db", text.decibels),
        numbers("Engine to proxy, dB", lambda one: one.engine_to_proxy_db if one.engine else None, text.decibels),
    ]
    return Table("Outputs", columns, record.outputs)


def cost_table(record: RunRecord) -> Table:
    """Return a row for each engine or form: latency, size and peak memory, with ratios to float."""
    latency = {entry.name: entry for entry in record.latency.engines} if record.latency else {}
    size, memory = ({entry.name: entry for entry in entries} for entries in (record.size, record.memory))
    told = {"float": f"float ({record.latency.reference})"} if record.latency else {}
    spread = {key: spread_words(entry) for key, entry in latency.items()}

    def part(title: str, entries: dict[str, Any], field: str, show: Callable[[Any], str]) -> Column:
        return numbers(title, lambda key: getattr(entries.get(key), field, None), show)

    columns = [Column("Engine", lambda key: told.get(key, key))]
    if latency:
        columns.append(part("Speed-up", latency, "ratio_to_float", text.times))
        columns += [part("Median", latency, "median_ms", text.milliseconds), numbers("Middle half", spread.get)]
    if size:
        columns += [part("Times smaller", size, "ratio", text.times), part("Size", size, "bytes", text.file_size)]
    if memory:
        columns.append(part("Times less memory", memory, "ratio", text.times))
        columns.append(part("Peak memory", memory, "peak_mib", lambda peak: text.file_size(peak * 2**20)))
    return Table("Latency, size and memory", columns, list(dict.fromkeys([*latency, *size, *memory])))


def multiply_add_share(sites: Sequence[Site]) -> float | None:
    """Return the share of the sites' multiply-adds in low precision, 0 to 1; None if none were counted."""
    total = sum(site.multiply_adds or 0 for site in sites)
    return sum(site.multiply_adds or 0 for site in sites if site.quantized) / total if total else None


def kinds_table(sites: Iterable[Site]) -> Table:
    """Return the numbers of sites that ran and of quantized ones, and the share of multiply-adds, by kind."""
    sites = [site for site in sites if site.ran]
    groups = [
        (kind, [site for site in sites if site.kind == kind]) for kind in dict.fromkeys(one.kind for one in sites)
    ]
    columns = [
        Column("Kind", itemgetter(0)),
        Column("Sites", lambda row: len(row[1])),
        Column("Quantized", lambda row: sum(site.quantized for site in row[1])),
        numbers("of multiply-adds", lambda row: multiply_add_share(row[1]), text.percent),
    ]
    return Table("Coverage by kind", columns, [*groups, *([("all", sites)] if len(groups) > 1 else [])])


def reasons_table(sites: Iterable[Site]) -> Table:
    """Return the reasons of the sites that ran and are not quantized."""
    rows = counted(site.reason for site in sites if site.ran and not site.quantized)
    columns = [Column("Why not", itemgetter(0)), Column("Sites", itemgetter(1))]
    return Table("Sites left in float, by reason", columns, rows)


def products_table(products: Sequence[UnquantizedProduct], *, page: bool) -> Table:
    """Return all products that are not in low precision."""
    work, share = (plain, text.percent) if page else (text.magnitude, text.share)
    columns = [
        names("module", place_of),
        Column("operation", "operation", mono=page),
        Column("multiply-adds", "multiply_adds", work, numeric=page or None),
        Column("share", "share", share, numeric=page or None),
        Column("why", "reason"),
        Column("evidence", "detail"),
    ]
    table = Table(f"{text.share(sum(row.share for row in products))} of the multiply-adds in float", columns, products)
    return replace(table.capital(), title="Products in float") if page else table


def place_of(product: UnquantizedProduct) -> str:
    """Return where a product ran: its site, or the module around it."""
    return product.site or product.path or "(the model)"


def sites_table(sites: Sequence[Site]) -> Table:
    """Return sites with their reasons."""
    columns = [
        names("Site", "name"),
        Column("Kind", "kind"),
        Column("Quantized", "quantized", tone=_yes_or_no),
        Column("Reason", "reason"),
        names("Rule", "rule"),
        Column("Host", "host_type"),
        names("Source", "place"),
        numbers("Multiply-adds", "multiply_adds"),
    ]
    return Table("Every site", columns, sites)


def ranges_table(rows: Sequence[tuple[str, Operand]], *, page: bool) -> Table:
    """Return format, range, scale and SQNR of operands, each with the name of its site; on a page of those with one."""

    def take(field: str) -> Callable[[tuple[str, Operand]], Any]:
        return lambda row: getattr(row[1], field)

    def said(title: str) -> str:
        return title if page else title.lower().replace("sqnr, db", "SQNR dB")

    if page:
        rows = [row for row in rows if row[1].amax is not None or row[1].scale is not None or row[1].dynamic]
    # Without a choice all ranges have the calibrator of the configuration.
    chosen = page or any(row[1].estimate for row in rows)
    columns = [
        names(said("Site"), itemgetter(0)),
        names(said("Operand"), lambda row: row[1].name.rpartition(".")[2]),
        Column(said("Format"), lambda row: _shown_format(row[1])),
        Column(said("Granularity"), lambda row: row[1].granularity if page or row[1].amax is not None else None),
        *(numbers(said(title), take(f"{title.lower()}imum")) for title in ("Min", "Max")),
        *(numbers(said(title), take(title.lower())) for title in ("amax", "Scale")),
        numbers(said("Clipped"), take("clipped"), text.percent),
        numbers(said("SQNR, dB"), take("sqnr_db"), text.decibels),
        *([Column(said("Estimate"), take("estimate"))] if chosen else []),
        *([names("Group", take("group"))] if page else []),
    ]
    used = sum(row[1].quantized for row in rows)
    heading = f"{len(rows)} ranges, {used} of them used; clipped is the share of values beyond amax"
    return Table("Ranges" if page else heading, columns, rows)


def _shown_format(operand: Operand) -> str:
    """Return the format of an operand, with the migration of its outliers if there was one and it is known."""
    if not operand.quantized:
        return FLOAT
    # The reason why not is in the coverage: here it would leave no room for numbers.
    smoothing = operand.smoothing if isinstance(operand, Range) else None
    return operand.format if smoothing is None else f"{operand.format}, {smoothing.partition(':')[0]}"


def evaluations_table(fallback: FallbackRecord) -> Table:
    """Return all scores of a search, in order."""
    budget = fallback.max_drop
    columns = [
        Column("evaluation", lambda row: row[0]),
        numbers("groups kept in float", lambda row: len(row[1].groups)),
        numbers("cost", lambda row: row[1].cost, text.amount),
        numbers("score", lambda row: row[1].score),
        numbers("drop", lambda row: row[1].drop, text.error),
        Column("in budget", lambda row: None if budget is None else row[1].drop <= budget),
        Column("front", lambda row: "front" if row[1].front else ""),
        Column("", lambda row: "chosen" if row[1].chosen else ""),
    ]
    return Table("Evaluations of the search", columns, list(enumerate(fallback.evaluations, start=1)))


def searched_groups() -> Column:
    """Return the column of a page with the groups of each evaluation."""
    return names("Which", lambda row: ", ".join(row[1].groups) or None)


def sensitivity_table(rows: Sequence[GroupSensitivity], measure: str | None, *, page: bool) -> Table:
    """Return the whole ranking."""
    words = error_words(measure)
    columns = [
        Column("rank", "rank"),
        names("group", "group"),
        Column("kind", "kind"),
        *([names("block", "block"), numbers("sites", lambda row: len(row.sites))] if page else []),
        numbers(words.column, "error", text.error),
        Column("quantizers", "activations"),
        Column("multiply-adds" if page else "multiply adds", "multiply_adds", plain if page else text.compact),
        Column("kept in float", lambda row: "yes" if row.fallback else None if page else ""),
    ]
    table = Table(f"{len(rows)} groups by the {words.phrase}, with one of them quantized", columns, rows)
    if not page:
        return table
    return replace(table.capital(), title="Sensitivity ranking", rows=sorted(rows, key=lambda row: row.rank))


def layers_table(rows: Sequence[LayerRow], measure: str | None) -> Table:
    """Return a line for each layer, with the columns that hold something."""
    columns = [
        names("layer", lambda row: row.layer or "(the model)"),
        names("operation", "operation"),
        Column("activations", "activations"),
        Column("weights", "weights"),
        numbers("amax", "amax"),
        numbers("SQNR, dB", "sqnr_db", text.decibels),
        numbers(error_words(measure).column, "error", text.error),
        numbers("share of work", "share", text.percent),
        *_TIMES,
    ]
    return Table("Layers", columns, rows).filled()


def groups_table(rows: Sequence[GroupRow], measure: str | None) -> Table:
    """Return what it gives and costs to put each group back, with the columns that hold something."""
    columns = [
        names("group", "group"),
        numbers(f"gives back: {error_words(measure).column}", "error", text.error),
        numbers("output with it alone, dB", "alone_db", text.decibels),
        *_TIMES,
        numbers("costs, us", "cost_us", _microseconds),
        Column("now", lambda row: "float" if row.back else "quantized"),
    ]
    return Table("What if these go back", columns, rows).filled()


def tables_of_layers(record: RunRecord) -> tuple[Table, Table]:
    """Return the layers of a run, and its groups with what they give back and cost in float."""
    times = record.latency_fallback.groups if record.latency_fallback else ()
    layers = layer_rows(record.coverage, record.not_quantized, record.sensitivity, times)
    groups = group_rows(record.coverage, record.sensitivity, times, record.diagnoses)
    return layers_table(layers, record.measure).capital(), groups_table(groups, record.measure).capital()


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.1f}"


_TIMES = (numbers("quantized, us", "low_us", _microseconds), numbers("float, us", "float_us", _microseconds))


def precision_name(precision: str) -> str:
    """Return a precision in words."""
    return {"index": "indices", "unknown": "not told"}.get(precision, precision.upper())


def shares_table(inspection: Inspection) -> Table:
    """Return the shares of an engine's layers by precision."""
    columns = [
        Column("Precision", "precision", precision_name),
        numbers("Layers", "layers"),
        numbers("of layers", "layer_share", text.percent),
        numbers("Products", "products"),
        numbers("of multiply-adds", "multiply_add_share", text.percent),
        numbers("of time", "time_share", text.percent),
    ]
    return Table("Precision in the engine", columns, inspection.shares)


ENGINE_LAYERS = (
    names("Layer", "name"),
    Column("Type", "type"),
    Column("Computes in", "precision", precision_name),
    Column("Writes", "writes", precision_name),
    numbers("Multiply-adds", "multiply_adds", text.compact),
    numbers("Time, us", "time_us"),
)


def choice_table(choice: EngineChoice, *, page: bool) -> Table:
    """Return a row for each candidate: latency at each shape, SQNR, score, and the verdict."""
    scored = any(candidate.score_difference is not None for candidate in choice.candidates)

    def time(at: int) -> Callable[[Any], float | None]:
        return lambda row: row[1].milliseconds[at] if at < len(row[1].milliseconds) else None

    engine, unit, sqnr, score, verdict = (
        ("Engine", ", ms", "SQNR, dB", "Score to float", "Verdict")
        if page
        else ("engine", "", "dB", "to float", "verdict")
    )
    columns = [
        *([Column("", itemgetter(0))] if page else []),
        Column(engine, lambda row: row[1].name),
        *(numbers(f"{shape}{unit}", time(at), "{:.2f}".format) for at, shape in enumerate(choice.shapes)),
        numbers(sqnr, lambda row: row[1].sqnr_db, text.decibels),
        *([numbers(score, lambda row: row[1].score_difference, text.signed)] if scored else []),
        Column(verdict, lambda row: row[1].verdict if page else text.short_verdict(row[1].verdict)),
    ]
    return Table("Candidates", columns, list(enumerate(choice.candidates, start=1)))


def latency_table(record: RunRecord) -> Table:
    """Return the median latency of all engines at all sizes, and of each graph of a model of several."""
    latencies = [one for one in (record.latency, *record.other_latencies) if one is not None]
    names = list(dict.fromkeys(entry.name for one in latencies for entry in one.engines))

    def of(name: str, what: str) -> Callable[[Latency], float | None]:
        return lambda one: next((getattr(entry, what) for entry in one.engines if entry.name == name), None)

    columns = [
        *([Column("graph", lambda one: one.graph or "all")] if any(one.graph for one in latencies) else []),
        Column("latency, ms", lambda one: text.shape(one.batch, one.sequence)),
        *(numbers(name, of(name, "median_ms"), "{:.2f}".format) for name in names),
        numbers("speed", of("engine", "ratio_to_float"), text.times),
    ]
    return Table("Latency at all sizes", columns, latencies)


_FACTS = {"memory_gib": "memory, GiB", "instructions": "INT8 instructions"}


def facts_table(left: str, right: str, values: Any) -> Table:
    """Return names with their values."""
    shown = Column(right, lambda row: None if row[1] is None else str(row[1]))
    return Table(left, [Column(left, lambda row: _FACTS.get(row[0], row[0])), shown], list(values.items()))


def stages_table(stages: Sequence[Stage]) -> Table:
    """Return the seconds of each stage, and their sum."""
    rows = [(f"{one.name}, in: {one.inside}" if one.inside else one.name, one.seconds) for one in stages]
    rows += [("all", sum(one.seconds for one in stages if one.inside is None))] if stages else []
    return Table("Stages", [Column("Stage", itemgetter(0)), Column("Time", itemgetter(1), text.seconds)], rows)
