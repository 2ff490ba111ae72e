"""The tables of the page, each from its part of a record; an empty string if there is nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantizer.reasons import counted
from quantizer.report.record import Fallback, RunRecord, SensitivityRow
from quantizer.report.run_records import Operand, Site, UnquantizedProduct
from quantizer.report.tables import text
from quantizer.report.tables.headline import multiply_add_share
from quantizer.report.tables.tables import EVALUATION_COLUMNS, Column, evaluation_cells, html_table
from quantizer.report.tables.text import error_words, spread_words


def score_table(record: RunRecord) -> str:
    """Return a table with a row for each form of the model: metric, difference, interval and paired figures."""
    if not record.scores:
        return ""
    paired = list(dict.fromkeys(name for entry in record.scores for name in entry.paired))
    columns = [
        Column(title="Model"),
        Column(title="Metric"),
        Column(title="Value", numeric=True, show=text.score),
        Column(title="Difference", numeric=True, show=text.signed),
        Column(title="95% interval", numeric=True, show=text.interval),
        *(Column(title=name.replace("_", " "), numeric=True, show=_paired(name)) for name in paired),
        Column(title="Examples", numeric=True),
    ]
    rows = [
        (
            entry.which,
            entry.metric,
            entry.value,
            entry.difference,
            entry.interval,
            *(entry.paired.get(name) for name in paired),
            entry.rows,
        )
        for entry in record.scores
    ]
    return html_table(columns, rows, label="Scores", style=False)


def outputs_table(record: RunRecord) -> str:
    """Return a table with a row for each output: its SQNR and cosine to the float model, of engine and proxy."""
    if not record.outputs:
        return ""
    columns = [
        Column(title="Output", mono=True),
        Column(title="Batch", numeric=True),
        Column(title="Engine, dB", numeric=True, show=text.decibels),
        Column(title="Cosine", numeric=True, show=text.score),
        Column(title="Proxy, dB", numeric=True, show=text.decibels),
        Column(title="Engine to proxy, dB", numeric=True, show=text.decibels),
    ]
    rows = [
        (
            one.output,
            text.shape(one.batch, one.sequence),
            one.sqnr_db if one.engine else None,
            one.cosine,
            one.proxy_sqnr_db,
            one.engine_to_proxy_db if one.engine else None,
        )
        for one in record.outputs
    ]
    return html_table(columns, rows, label="Outputs", style=False)


def cost_table(record: RunRecord) -> str:
    """Return a table with a row for each engine or form: latency, size and peak memory, with ratios to float."""
    latency = {entry.name: entry for entry in record.latency.engines} if record.latency else {}
    reference = record.latency.reference if record.latency else None
    spread = {entry.name: spread_words(entry) for entry in latency.values()}
    size = {entry.name: entry for entry in record.size}
    memory = {entry.name: entry for entry in record.memory}
    names = list(dict.fromkeys([*latency, *size, *memory]))
    if not names:
        return ""
    columns = [Column(title="Engine")]
    told = {"float": f"float ({reference})"} if reference else {}
    cells: dict[str, list[Any]] = {name: [told.get(name, name)] for name in names}
    for title, entries, parts in (
        ("Speed-up", latency, ("ratio_to_float", "median_ms", "spread")),
        ("Times smaller", size, ("ratio", "bytes")),
        ("Times less memory", memory, ("ratio", "peak_mib")),
    ):
        if not entries:
            continue
        for part in parts:
            columns.append(_COST_COLUMNS.get(part) or Column(title=title, numeric=True, show=text.times))
            for name in names:
                cells[name].append(spread.get(name) if part == "spread" else getattr(entries.get(name), part, None))
    return html_table(columns, list(cells.values()), label="Latency, size and memory", style=False)


def _mebibytes(peak_mib: float) -> str:
    return text.file_size(peak_mib * 2**20)


_COST_COLUMNS = {
    "median_ms": Column(title="Median", numeric=True, show=text.milliseconds),
    "spread": Column(title="Middle half", numeric=True),
    "bytes": Column(title="Size", numeric=True, show=text.file_size),
    "peak_mib": Column(title="Peak memory", numeric=True, show=_mebibytes),
}


def coverage_by_kind(sites: Sequence[Site]) -> str:
    """Return the numbers of sites that ran and of quantized ones, and the share of multiply-adds, by kind."""
    sites = [site for site in sites if site.ran]
    if not sites:
        return ""
    rows = []
    for kind in dict.fromkeys(site.kind for site in sites):
        members = [site for site in sites if site.kind == kind]
        rows.append((kind, len(members), sum(site.quantized for site in members), multiply_add_share(members)))
    if len(rows) > 1:
        rows.append(("all", len(sites), sum(site.quantized for site in sites), multiply_add_share(sites)))
    share = Column(title="of multiply-adds", numeric=True, show=text.percent)
    return html_table(["Kind", "Sites", "Quantized", share], rows, label="Coverage by kind", style=False)


def coverage_by_reason(sites: Sequence[Site]) -> str:
    """Return the reasons of the sites that ran and are not quantized; empty if all are."""
    rows = counted(site.reason for site in sites if site.ran and not site.quantized)
    return html_table(["Why not", "Sites"], rows, label="Sites left in float, by reason", style=False) if rows else ""


def escaped_table(products: Sequence[UnquantizedProduct]) -> str:
    """Return all products that are not in low precision; empty if there are none."""
    columns = [
        Column(title="Module", mono=True),
        Column(title="Operation", mono=True),
        Column(title="Multiply-adds", numeric=True),
        Column(title="Share", numeric=True, show=text.percent),
        Column(title="Why"),
        Column(title="Evidence"),
    ]
    rows = [
        (
            product.site or product.path or "(the model)",
            product.operation,
            product.multiply_adds,
            product.share,
            product.reason,
            product.detail,
        )
        for product in products
    ]
    return html_table(columns, rows, label="Products in float", style=False) if rows else ""


def coverage_table(sites: Sequence[Site]) -> str:
    """Return sites with their reasons; empty if there are none."""
    if not sites:
        return ""
    columns = [
        Column(title="Site", mono=True),
        Column(title="Kind"),
        Column(title="Quantized", tone=_yes_or_no),
        Column(title="Reason"),
        Column(title="Rule", mono=True),
        Column(title="Host"),
        Column(title="Source", mono=True),
        Column(title="Multiply-adds", numeric=True),
    ]
    rows = [
        (
            site.name,
            site.kind,
            site.quantized,
            site.reason,
            site.rule,
            site.host_type,
            site.place,
            site.multiply_adds,
        )
        for site in sites
    ]
    return html_table(columns, rows, label="Every site", style=False)


def _format(operand: Operand) -> str:
    if not operand.quantized:
        return "float"
    return text.format_name(operand.dtype, operand.block_size, operand.zero_point, dynamic=operand.dynamic)


def ranges_table(sites: Sequence[Site]) -> str:
    """Return format, range, scale and SQNR of every operand with a range, also one of run time; empty if none has."""
    rows = [
        (
            site.name,
            operand.name,
            _format(operand),
            text.granularity(operand.channels, operand.block_size, calls=operand.role == "activation"),
            operand.minimum,
            operand.maximum,
            operand.amax,
            operand.scale,
            operand.clipped,
            operand.sqnr_db,
            operand.estimate,
            operand.group,
        )
        for site in sites
        for operand in site.operands
        if operand.amax is not None or operand.scale is not None or operand.dynamic
    ]
    columns = [
        Column(title="Site", mono=True),
        Column(title="Operand", mono=True),
        Column(title="Format"),
        Column(title="Granularity"),
        Column(title="Min", numeric=True),
        Column(title="Max", numeric=True),
        Column(title="amax", numeric=True),
        Column(title="Scale", numeric=True),
        Column(title="Clipped", numeric=True, show=text.percent),
        Column(title="SQNR, dB", numeric=True, show=text.decibels),
        Column(title="Estimate"),
        Column(title="Group", mono=True),
    ]
    return html_table(columns, rows, label="Ranges", style=False) if rows else ""


def evaluations_table(fallback: Fallback | None) -> str:
    """Return all scores of a search; empty if there was none."""
    if fallback is None or not fallback.evaluations:
        return ""
    columns = (*EVALUATION_COLUMNS, Column(title="Which", mono=True))
    cells = [
        [*row, ", ".join(entry.groups) or None]
        for row, entry in zip(evaluation_cells(fallback), fallback.evaluations, strict=True)
    ]
    return html_table(columns, cells, label="Evaluations of the search", style=False)


def sensitivity_table(rows: Sequence[SensitivityRow], measure: str | None) -> str:
    """Return the whole ranking."""
    if not rows:
        return ""
    columns = [
        Column(title="Rank"),
        Column(title="Group", mono=True),
        Column(title="Kind"),
        Column(title="Block", mono=True),
        Column(title="Sites", numeric=True),
        Column(title=error_words(measure).column.capitalize(), numeric=True, show=text.error),
        Column(title="Quantizers", numeric=True),
        Column(title="Multiply-adds", numeric=True),
        Column(title="Put back"),
    ]
    cells = [
        (
            row.rank,
            row.group,
            row.kind,
            row.block,
            len(row.sites),
            row.error,
            row.activations,
            row.multiply_adds,
            "yes" if row.fallback else None,
        )
        for row in sorted(rows, key=lambda row: row.rank)
    ]
    return html_table(columns, cells, label="Sensitivity ranking", style=False)


def _paired(name: str) -> Any:
    return text.percent if "flip" in name or "share" in name else text.score


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
