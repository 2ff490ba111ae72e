"""The report of a run: frozen records, ``report.json``, ``report.html``, tables and plots."""

from __future__ import annotations

from quantizer.report.charts.axes import sensitivity_bars
from quantizer.report.codec import read_record, write_record, write_text_atomic
from quantizer.report.machine import collect_machine, collect_versions
from quantizer.report.page.html import html_from_record, require_html, write_html
from quantizer.report.ratios import latency_entries, memory_entries, size_entries
from quantizer.report.record import (
    VERSION,
    EngineFile,
    Fallback,
    Latency,
    LatencyEntry,
    MemoryEntry,
    ModelInfo,
    RunRecord,
    Score,
    SensitivityRow,
    SizeEntry,
    Stage,
)
from quantizer.report.run_records import Operand, Site
from quantizer.report.tables.headline import verdict
from quantizer.report.tables.summary import print_record, print_summary
from quantizer.report.tables.tables import Column, html_table, string_from_table, text_table

__all__ = [
    # records
    "VERSION",
    "EngineFile",
    "Fallback",
    "Latency",
    "LatencyEntry",
    "MemoryEntry",
    "ModelInfo",
    "Operand",
    "RunRecord",
    "Score",
    "SensitivityRow",
    "Site",
    "SizeEntry",
    "Stage",
    # entries with ratios
    "latency_entries",
    "memory_entries",
    "size_entries",
    # facts
    "collect_machine",
    "collect_versions",
    # files
    "html_from_record",
    "read_record",
    "require_html",
    "write_html",
    "write_record",
    "write_text_atomic",
    # parts, for notebooks and terminals
    "Column",
    "html_table",
    "print_record",
    "print_summary",
    "sensitivity_bars",
    "string_from_table",
    "text_table",
    "verdict",
]
