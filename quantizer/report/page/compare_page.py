"""The page of a comparison: one HTML file with style and script of the report, that reads nothing from anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quantizer.report.codec import write_text_atomic
from quantizer.report.compare.comparison import Comparison
from quantizer.report.compare.tables import (
    comparison_sentence,
    comparison_svg,
    csv_text,
    pairs_html,
    runs_html,
    settings_html,
)
from quantizer.report.page.html import render
from quantizer.report.tables import text
from quantizer.report.verdict import THRESHOLDS


def write_comparison(comparison: Comparison, page: Path | None, table: Path | None, title: str) -> None:
    """Write the page, and the figures as CSV, each atomically."""
    if page is not None:
        write_text_atomic(page, html_from_comparison(comparison, title, page.absolute().parent))
    if table is not None:
        write_text_atomic(table, csv_text(comparison))


def html_from_comparison(comparison: Comparison, title: str, folder: Path) -> str:
    """Return the whole page."""
    return render("compare.html", _view(comparison, title, folder))


def _view(comparison: Comparison, title: str, folder: Path) -> dict[str, Any]:
    return {
        "title": title,
        "runs": text.counted(len(comparison.runs), "run"),
        "verdict": text.typeset(comparison_sentence(comparison)),
        "notes": [text.typeset(note[:1].upper() + note[1:]) for note in comparison.notes],
        "thresholds": f"How runs were judged: {THRESHOLDS[:1].lower()}{THRESHOLDS[1:]}",
        "table": runs_html(comparison, _links(comparison, folder)),
        "picture": comparison_svg(comparison),
        "settings": settings_html(comparison),
        "pairs": pairs_html(comparison),
    }


def _links(comparison: Comparison, folder: Path) -> dict[str, str]:
    """Return the addresses of the reports by the names of their runs; relative, so that all can move together."""
    links = {}
    for run in comparison.runs:
        report = run.folder.absolute() / "report.html"
        # Further away than beside the page, whatever moves moves alone.
        near = report.is_relative_to(folder.parent)
        if run.record is not None and report.is_file():
            links[run.name] = quote(Path(os.path.relpath(report, folder)).as_posix()) if near else report.as_uri()
    return links
