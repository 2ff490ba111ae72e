"""The reports in the folder of a run, written with it or anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantizer.report import RunRecord, write_html, write_record
from quantizer.report.model_card import write_run_card


def write_reports(record: RunRecord, formats: Sequence[str], folder: Path, snippet: str | None = None) -> None:
    """Write the reports of a run in the formats that it asks for, and its card, each atomically."""
    write_run_card(record, folder, snippet)
    if "html" in formats:
        write_html(record, folder / "report.html")
    # The last one: what is in it is in the others.
    if "json" in formats:
        write_record(record, folder / "report.json")
