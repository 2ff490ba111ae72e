"""The report of a run: frozen records, ``report.json``, ``report.html``, tables and plots."""

from __future__ import annotations

from quantizer.report.charts.rankings import sensitivity_bars
from quantizer.report.machine import collect_machine, collect_versions
from quantizer.report.page import html_from_record, require_html, write_html
from quantizer.report.record import (
    VERSION,
    EngineFile,
    Latency,
    LatencyEntry,
    MemoryEntry,
    ModelInfo,
    RunRecord,
    SizeEntry,
    Stage,
    latency_entries,
    memory_entries,
    read_record,
    size_entries,
    write_record,
    write_text_atomic,
)
from quantizer.report.tables import Column, Table, string_from_table
from quantizer.report.terminal import print_record, print_summary
from quantizer.report.verdict import verdict
from quantizer.utils.records import FallbackRecord, GroupSensitivity, Operand, Score, Site

__all__ = [
    # records
    "VERSION",
    "EngineFile",
    "FallbackRecord",
    "Latency",
    "LatencyEntry",
    "MemoryEntry",
    "ModelInfo",
    "Operand",
    "RunRecord",
    "Score",
    "GroupSensitivity",
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
    "print_record",
    "print_summary",
    "sensitivity_bars",
    "string_from_table",
    "Table",
    "verdict",
]
