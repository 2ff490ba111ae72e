"""A comparison as tables of a page, and as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quantizer.report.compare.compared_run import ComparedRun
from quantizer.report.compare.comparison import Comparison, Pair
from quantizer.report.tables import text
from quantizer.report.tables.tables import Column, html_table
from quantizer.report.verdict import NOT, USABLE


def runs_html(comparison: Comparison, links: Mapping[str, str], *, style: bool = False) -> str:
    """Return the table of the runs, the best score first.

    Args:
        comparison: the comparison.
        links: the addresses of the reports, by the names of the runs.
        style: whether to put the style sheet in front, as notebooks need it.
    """
    columns, rows = _runs(comparison, links)
    numbered = [[number, *row] for number, row in enumerate(rows, start=1)]
    return html_table([Column(title="No.", numeric=True), *columns], numbered, label="Runs", style=style)


def settings_html(comparison: Comparison) -> str:
    """Return the table of what differs in the configurations; empty if nothing does."""
    if not comparison.differing:
        return ""
    rows = [
        (run.name, *(setting(values[run.name]) for values in comparison.differing.values()))
        for run in in_order(comparison)
    ]
    columns = [Column(title="Run", mono=True), *(Column(title=key, numeric=False) for key in comparison.differing)]
    return html_table(columns, rows, label="What differs", style=False)


def pairs_html(comparison: Comparison) -> str:
    """Return the table of all pairs of runs; empty if there are none."""
    if not comparison.pairs:
        return ""
    columns = [
        Column(title="Run", mono=True),
        Column(title="against", mono=True),
        Column(title="Difference", numeric=True, show=text.signed),
        Column(title="95% interval", numeric=True, show=text.interval),
        Column(title=""),
    ]
    rows = [(one.second, one.first, one.difference, one.interval, one.verdict) for one in comparison.pairs]
    return html_table(columns, rows, label="Pairs", style=False)


def csv_text(comparison: Comparison) -> str:
    """Return a line for each run, with all its figures and the settings that differ."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    keys = list(comparison.differing)
    writer.writerow([*_CSV, *keys])
    for run in comparison.runs:
        figures = [take(run, comparison.to_best.get(run.name)) for take in _CSV.values()]
        settings = [setting(comparison.differing[key][run.name]) for key in keys]
        writer.writerow(["" if figure is None else figure for figure in (*figures, *settings)])
    return stream.getvalue()


def in_order(comparison: Comparison) -> list[ComparedRun]:
    """Return the runs with the best score first, then those without one, the nearest to float first."""

    def place(run: ComparedRun) -> tuple[bool, float]:
        if run.score is None:
            return (True, math.inf if run.sqnr_db is None else -run.sqnr_db)
        return (False, -run.score.value if run.score.higher_is_better else run.score.value)

    return sorted(comparison.runs, key=place)


def _runs(comparison: Comparison, links: Mapping[str, str]) -> tuple[list[Column], list[list[Any]]]:
    columns = [
        Column(title="Run", mono=True, link=links.get, tone=_wrapped),
        Column(title="verdict", tone=_tone),
        Column(title="remarks", tone=_wrapped),
        *(_score_columns(comparison) if comparison.best is not None else ()),
        *((Column(title="SQNR, dB", numeric=True, show=decibels_or_equal),) if comparison.by_output else ()),
        Column(title="ms", numeric=True, show=lambda value: text.significant(value, 3)),
        Column(title="speed", numeric=True, show=text.times),
        Column(title="over"),
        Column(title="size", numeric=True, show=text.file_size),
        Column(title="run took", numeric=True, show=text.seconds),
    ]
    return columns, [_row(run, comparison) for run in in_order(comparison)]


def _score_columns(comparison: Comparison) -> list[Column]:
    metric = next((run.score.metric for run in comparison.runs if run.score is not None), "score")
    return [
        Column(title=metric, numeric=True, show=text.score),
        Column(title="to float", numeric=True, show=text.signed),
        Column(title="95% interval", numeric=True, show=text.interval),
        Column(title="to the best", numeric=True, show=text.signed),
    ]


def _scores(run: ComparedRun, comparison: Comparison) -> list[Any]:
    score, pair = run.score, comparison.to_best.get(run.name)
    return [
        None if score is None else score.value,
        None if score is None else score.difference,
        None if score is None else score.interval,
        0.0 if run is comparison.best else None if pair is None else pair.difference,
    ]


def _row(run: ComparedRun, comparison: Comparison) -> list[Any]:
    latency, size = run.latency, run.size
    return [
        run.name,
        run.verdict,
        "; ".join(_remarks(run, comparison.to_best.get(run.name), comparison)) or None,
        *(_scores(run, comparison) if comparison.best is not None else ()),
        *((run.sqnr_db,) if comparison.by_output else ()),
        None if latency is None else latency.median_ms,
        None if latency is None else latency.ratio_to_float,
        run.reference,
        None if size is None else size.bytes,
        run.seconds,
    ]


def _remarks(run: ComparedRun, pair: Pair | None, comparison: Comparison) -> Iterator[str]:
    if run.error:
        yield run.error
    if run is comparison.best:
        yield "the best score"
    elif pair is not None and pair.within_noise:
        yield "within noise of the best"
    elif pair is not None and pair.difference is None:
        yield pair.why
    if run.is_noisy:
        yield "noisy timing"
    if run.name in comparison.front:
        yield "on the frontier"


def decibels_or_equal(value: float) -> str:
    """Return the SQNR of a run: ``40.6``, or ``equal`` where its outputs are those of the float model."""
    return "equal" if value == math.inf else text.decibels(value)


def _wrapped(_: str) -> str:
    return "words"


def _tone(level: str) -> str:
    return {USABLE: "yes", NOT: "no"}.get(level, "")


def setting(value: Any) -> Any:
    """Return a value of a configuration as a cell."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else value


_CSV: dict[str, Callable[[ComparedRun, Pair | None], Any]] = {
    "run": lambda run, _: run.name,
    "folder": lambda run, _: run.folder,
    "error": lambda run, _: run.error,
    "verdict": lambda run, _: run.verdict,
    "model": lambda run, _: None if run.record is None else run.record.model.source,
    "backend": lambda run, _: None if run.record is None or run.record.engine is None else run.record.engine.backend,
    "metric": lambda run, _: None if run.score is None else run.score.metric,
    "score": lambda run, _: None if run.score is None else run.score.value,
    "difference_to_float": lambda run, _: None if run.score is None else run.score.difference,
    "low_to_float": lambda run, _: None if run.score is None or run.score.interval is None else run.score.interval[0],
    "high_to_float": lambda run, _: None if run.score is None or run.score.interval is None else run.score.interval[1],
    "difference_to_best": lambda _, pair: None if pair is None else pair.difference,
    "low_to_best": lambda _, pair: None if pair is None or pair.interval is None else pair.interval[0],
    "high_to_best": lambda _, pair: None if pair is None or pair.interval is None else pair.interval[1],
    "sqnr_db": lambda run, _: run.sqnr_db,
    "median_ms": lambda run, _: None if run.latency is None else run.latency.median_ms,
    "noisy_timing": lambda run, _: None if run.latency is None else run.is_noisy,
    "speedup": lambda run, _: None if run.latency is None else run.latency.ratio_to_float,
    "speedup_over": lambda run, _: run.reference,
    "bytes": lambda run, _: None if run.size is None else run.size.bytes,
    "seconds": lambda run, _: run.seconds,
}
"""The columns of the CSV file, in their order, before those of the settings."""
