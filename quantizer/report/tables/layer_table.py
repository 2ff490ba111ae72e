"""The table of layers, and that of what it gives and costs to put groups back, for a terminal and a page.

A column without any value is left out: a run without sensitivity has no errors, and one without an engine no times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quantizer.report.record import RunRecord
from quantizer.report.tables import text
from quantizer.report.tables.layer_rows import GroupRow, LayerRow, group_rows, layer_rows
from quantizer.report.tables.measure_labels import error_words
from quantizer.report.tables.tables import Column, html_table

Cells = tuple[list[Column], list[list[Any]]]
"""Columns, and the cells of each row."""


def layer_cells(rows: Sequence[LayerRow], measure: str | None) -> Cells:
    """Return the columns that hold something, and the cells of each layer."""
    columns = [
        Column(title="layer", mono=True),
        Column(title="operation", mono=True),
        Column(title="activations"),
        Column(title="weights"),
        Column(title="amax", numeric=True),
        Column(title="SQNR, dB", numeric=True, show=text.decibels),
        Column(title=error_words(measure).column, numeric=True, show=text.error),
        Column(title="share of work", numeric=True, show=text.percent),
        *_times(),
    ]
    cells = [
        [
            row.layer or "(the model)",
            row.operation,
            row.activations,
            row.weights,
            row.amax,
            row.sqnr_db,
            row.error,
            row.share,
            row.low_us,
            row.float_us,
        ]
        for row in rows
    ]
    return _filled(columns, cells)


def group_cells(rows: Sequence[GroupRow], measure: str | None) -> Cells:
    """Return the columns that hold something, and the cells of each group."""
    columns = [
        Column(title="group", mono=True),
        Column(title=f"gives back: {error_words(measure).column}", numeric=True, show=text.error),
        Column(title="output with it alone, dB", numeric=True, show=text.decibels),
        *_times(),
        Column(title="costs, us", numeric=True, show=_microseconds),
        Column(title="now"),
    ]
    cells = [
        [
            row.group,
            row.error,
            row.alone_db,
            row.low_us,
            row.float_us,
            row.cost_us,
            "float" if row.back else "quantized",
        ]
        for row in rows
    ]
    return _filled(columns, cells)


def layer_table(record: RunRecord) -> str:
    """Return every layer, as HTML; empty if there are none."""
    times = record.placement.groups if record.placement else ()
    rows = layer_rows(record.coverage, record.escaped, record.sensitivity, times)
    return _html(layer_cells(rows, record.measure), "Layers") if rows else ""


def group_table(record: RunRecord) -> str:
    """Return every group with what it gives back and costs in float, as HTML; empty if nothing was measured."""
    times = record.placement.groups if record.placement else ()
    rows = group_rows(record.coverage, record.sensitivity, times, record.causes)
    return _html(group_cells(rows, record.measure), "What if these go back") if rows else ""


def _html(table: Cells, label: str) -> str:
    columns, cells = table
    titled = [replace(column, title=column.title[:1].upper() + column.title[1:]) for column in columns]
    return html_table(titled, cells, label=label, style=False)


def _times() -> tuple[Column, Column]:
    return (
        Column(title="quantized, us", numeric=True, show=_microseconds),
        Column(title="float, us", numeric=True, show=_microseconds),
    )


def _microseconds(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.1f}"


def _filled(columns: list[Column], cells: list[list[Any]]) -> Cells:
    """Return a table without the columns that hold nothing."""
    held = [at for at in range(len(columns)) if any(row[at] is not None for row in cells)]
    return [columns[at] for at in held], [[row[at] for at in held] for row in cells]
