"""The page of a comparison: one HTML file with style and script of the report, that reads nothing from anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quantizer.report.charts.runs_plot import RunPoint
from quantizer.report.charts.runs_plot import runs_svg
from quantizer.report.compare.comparison import Comparison
from quantizer.report.compare.tables import csv_text
from quantizer.report.compare.tables import decibels_or_equal
from quantizer.report.compare.tables import in_order
from quantizer.report.compare.tables import pairs_html
from quantizer.report.compare.tables import runs_html
from quantizer.report.compare.tables import settings_html
from quantizer.report.json_file import write_text_atomic
from quantizer.report.page.html import render
from quantizer.report.tables import text
from quantizer.report.verdict import THRESHOLDS

__all__ = ["html_from_comparison", "write_comparison"]


def write_comparison(comparison: Comparison, page: Path | None, table: Path | None, title: str) -> None:
    """Write the page, and the figures as CSV, each atomically.

    Args:
        comparison: the comparison.
        page: the HTML file; None: no such file.
        table: the CSV file; None: no such file.
        title: the title of the page.

    Raises:
        MissingDependencyError: jinja2 is not installed.
        QuantizerError: a file cannot be written.
    """
    if page is not None:
        write_text_atomic(page, html_from_comparison(comparison, title, page.absolute().parent))
    if table is not None:
        write_text_atomic(table, csv_text(comparison))


def html_from_comparison(comparison: Comparison, title: str, folder: Path) -> str:
    """Return the whole page.

    Args:
        comparison: the comparison.
        title: the title of the page.
        folder: where the page will lie, from which it leads to the reports of the runs.

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    return render("compare.html", _view(comparison, title, folder))


def _view(comparison: Comparison, title: str, folder: Path) -> dict[str, Any]:
    best = comparison.best
    return {
        "title": title,
        "runs": text.counted(len(comparison.runs), "run"),
        "verdict": text.typeset(_verdict(comparison)) if best is not None else _nearest(comparison),
        "notes": [text.typeset(note[:1].upper() + note[1:]) for note in comparison.notes],
        "thresholds": f"How runs were judged: {THRESHOLDS[:1].lower()}{THRESHOLDS[1:]}",
        "table": runs_html(comparison, _links(comparison, folder)),
        "picture": _picture(comparison),
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


def _nearest(comparison: Comparison) -> str:
    """Return, where no run has a score, whose outputs are nearest to those of its float model."""
    measured = [run for run in in_order(comparison) if run.sqnr_db is not None]
    if not measured or measured[0].sqnr_db is None:
        return "No run has a score."
    far = decibels_or_equal(measured[0].sqnr_db)
    told = "equal to" if far == "equal" else f"{far} dB from"
    return f"No run has a score. The outputs of {measured[0].name} are the nearest: {told} those of its float model."


def _verdict(comparison: Comparison) -> str:
    best = comparison.best
    assert best is not None
    assert best.score is not None
    others = len(comparison.to_best)
    noise = sum(one.within_noise for one in comparison.to_best.values())
    words = f"The best score is {text.score(best.score.value)}, of {best.name}."
    if others and noise:
        words += f" Within noise of it: {noise} of the {text.counted(others, 'other run')}."
    timed = [run for run in comparison.runs if run.name in comparison.timed and run.latency is not None]
    if timed:
        fastest = min(timed, key=lambda run: run.latency.median_ms if run.latency is not None else 0.0)
        assert fastest.latency is not None
        words += f" The fastest is {fastest.name}, {text.milliseconds(fastest.latency.median_ms)} a batch"
        words += ", by a noisy timing." if fastest.is_noisy else "."
    return words


def _picture(comparison: Comparison) -> str:
    points: list[RunPoint] = []
    floats: dict[str, float] = {}
    for number, run in enumerate(in_order(comparison), start=1):
        if run.name not in comparison.timed or run.score is None or run.latency is None or run.record is None:
            continue
        front = run.name in comparison.front
        ms = run.latency.median_ms
        points.append(RunPoint(number=number, name=run.name, milliseconds=ms, score=run.score.value, front=front))
        base = next((score.value for score in run.record.scores if score.which == "float"), None)
        if base is not None:
            floats[run.record.model.source] = base
    metric = "score" if comparison.best is None or comparison.best.score is None else comparison.best.score.metric
    return runs_svg(points, metric, floats)
