"""A comparison in short: the sentence above its tables, and its picture.

A comparison as tables of a page, and as CSV.

A comparison in the terminal: figures in a narrow table, and the runs that they are of below it.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantizer.report.charts.runs_plot import RunPoint, runs_svg
from quantizer.report.compare.compared_run import ComparedRun
from quantizer.report.compare.comparison import Comparison, Pair
from quantizer.report.compare.short_names import short_names
from quantizer.report.tables import text
from quantizer.report.tables.tables import Column, html_table
from quantizer.report.verdict import NOT, USABLE


def comparison_sentence(comparison: Comparison) -> str:
    """Return which run is the best and which the fastest or, without a score, whose outputs are nearest to float."""
    return _nearest(comparison) if comparison.best is None else _best(comparison, comparison.best)


def comparison_svg(comparison: Comparison) -> str:
    """Return the scores of the runs against their speed as an ``<svg>`` element; numbers are those of the table."""
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
    best = None if comparison.best is None else comparison.best.score
    if best is None:
        return runs_svg(points, "score", floats)
    return runs_svg(points, best.metric, floats, higher_is_better=best.higher_is_better)


def _nearest(comparison: Comparison) -> str:
    """Return, where no run has a score, whose outputs are nearest to those of its float model."""
    measured = [run for run in in_order(comparison) if run.sqnr_db is not None]
    if not measured or measured[0].sqnr_db is None:
        return "No run has a score."
    far = decibels_or_equal(measured[0].sqnr_db)
    told = "equal to" if far == "equal" else f"{far} dB from"
    return f"No run has a score. The outputs of {measured[0].name} are the nearest: {told} those of its float model."


def _best(comparison: Comparison, best: ComparedRun) -> str:
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


def runs_html(comparison: Comparison, links: Mapping[str, str], *, style: bool = False) -> str:
    """Return the table of the runs, the best score first."""
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


_MOST_KEYS = 4
"""So many settings are written beside each run; where more differ, the page has them."""

_NUMBER, _LEAST_NAME = 5, 32
"""Columns before a name, and those that a name gets where an error or many settings leave none."""


def print_comparison(comparison: Comparison, page: Path | None, console: Console) -> None:
    """Print the table of the runs, the runs by their numbers, what cannot be compared, and the path of the page."""
    console.print(_table(comparison))
    for line in _lines(comparison, console.width):
        console.print(Text(line), soft_wrap=True)
    if any(pair.within_noise for pair in comparison.to_best.values()):
        console.print("  ~  within noise of the best: the 95% interval of the pair holds 0", highlight=False)
    for note in comparison.notes:
        console.print(Text(note), soft_wrap=True)
    if page is not None:
        console.print(Text("comparison  ", style="bold") + Text(str(page)), soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    metric = next((run.score.metric for run in comparison.runs if run.score is not None), "score")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    scored = any(run.score is not None for run in comparison.runs)
    titles = [*((metric, "to float", "95% interval", "to best") if scored else ())]
    titles += ["dB"] if comparison.by_output else []
    for title in ("", *titles, "ms", "speed", "size"):
        table.add_column(Text(title), justify="right", no_wrap=True)
    for number, run in enumerate(in_order(comparison), start=1):
        latency, size = run.latency, run.size
        cells = [
            str(number),
            *(_printed_scores(run, comparison) if scored else ()),
            *(("-" if run.sqnr_db is None else decibels_or_equal(run.sqnr_db),) if comparison.by_output else ()),
            "-" if latency is None else text.significant(latency.median_ms, 3),
            "-" if latency is None else text.times(latency.ratio_to_float),
            "-" if size is None else text.file_size(size.bytes),
        ]
        table.add_row(*map(Text, cells), style="bold" if run.name in comparison.front else None)
    return table


def _printed_scores(run: ComparedRun, comparison: Comparison) -> list[str]:
    """Return the cells of a score: it, its difference to float with the interval, and that to the best one."""
    score = run.score
    return [
        "-" if score is None else text.score(score.value),
        "-" if score is None or score.difference is None else text.signed(score.difference),
        "-" if score is None or score.interval is None else text.interval(score.interval),
        _to_best(run, comparison),
    ]


def _to_best(run: ComparedRun, comparison: Comparison) -> str:
    pair = comparison.to_best.get(run.name)
    if pair is None or pair.difference is None:
        return "best" if run is comparison.best else "-"
    return f"{'~' if pair.within_noise else ''}{text.signed(pair.difference)}"


def _lines(comparison: Comparison, width: int) -> list[str]:
    """Return a line for each run; a name is shortened where its line would be wider, as the page has it whole."""
    words = {run.name: _words(run, comparison) for run in in_order(comparison)}
    wide = [name for name, said in words.items() if _NUMBER + len(name) + len(said) > width]
    room = width - _NUMBER - max((len(words[name]) for name in wide), default=0)
    names = {name: name for name in words} | short_names(wide, max(room, _LEAST_NAME))
    return [f"{number:>3}  {names[name]}{said}" for number, (name, said) in enumerate(words.items(), start=1)]


def _words(run: ComparedRun, comparison: Comparison) -> str:
    """Return the settings that a run's name does not say, its verdict, its time, and what is wrong with it."""
    words = ""
    for key, values in comparison.differing.items() if len(comparison.differing) <= _MOST_KEYS else ():
        shown = f"{key.rpartition('.')[2]}={setting(values[run.name])}"
        # YAML writes true where Python writes True.
        words += "" if shown.lower() in run.name.lower() else f" {shown}"
    told = [] if run.verdict is None else [run.verdict]
    told += ["noisy timing"] if run.is_noisy else []
    told += [] if run.seconds is None else [text.seconds(run.seconds)]
    told += ["on the frontier"] if run.name in comparison.front else []
    told += [run.error] if run.error else []
    return f"{words}: {', '.join(told)}" if told else words
