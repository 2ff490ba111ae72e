"""A comparison of runs as tables, CSV, chart, terminal output and page."""

from __future__ import annotations

import csv
import html
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quantizer.report import text
from quantizer.report.charts.plots import RunPoint, runs_svg
from quantizer.report.compare import ComparedRun, Comparison, Pair, compare, read_runs
from quantizer.report.notebook import Picture
from quantizer.report.page import render
from quantizer.report.record import write_text_atomic
from quantizer.report.tables import Column, Table, names, numbers, plain_text
from quantizer.report.verdict import NOT, THRESHOLDS, USABLE


def compare_runs(runs: Sequence[str | os.PathLike[str]]) -> Runs:
    """Compare finished runs, like ``quantizer compare``: scores or outputs, latency, size, and different settings.

    Args:
        runs: folders of ``QuantizedModel.save`` or ``quantizer run``, or their ``report.json``; the folder of a sweep
            stands for all its finished runs.

    Raises:
        QuantizerError: there are fewer than two runs, one is listed twice, or one cannot be read.
    """
    return Runs(compare(read_runs([Path(run) for run in runs])))


class Runs:
    """A comparison of finished runs.

    Attributes:
        runs: the runs, the best score first, each with its ``name`` and ``record``; without scores, the outputs nearest
            to float first.
        pairs: all pairs of scored runs, each with ``difference``, its 95% ``interval`` and ``verdict``.
        notes: sentences on what is not comparable.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.runs: tuple[ComparedRun, ...] = tuple(in_order(comparison))
        self.pairs: tuple[Pair, ...] = comparison.pairs
        self.notes = comparison.notes
        self._comparison = comparison

    def plot(self) -> Picture:
        """Return the chart of scores against latency, with the Pareto-optimal runs joined by a line."""
        return Picture(comparison_svg(self._comparison))

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison as one HTML file that opens offline, and return its path."""
        page = Path(path)
        write_comparison(self._comparison, page, None, page.stem)
        return page

    def __repr__(self) -> str:
        return plain_text(partial(print_comparison, self._comparison, None)).rstrip("\n")

    def _repr_html_(self) -> str:
        lines = [comparison_sentence(self._comparison), *self.notes]
        paragraphs = "".join(f"<p>{html.escape(line[:1].upper() + line[1:])}</p>" for line in lines)
        return paragraphs + runs_table(self._comparison, {}).html(style=True)


def comparison_sentence(comparison: Comparison) -> str:
    """Return the best and the fastest run or, without scores, the run with outputs nearest to float."""
    return _nearest(comparison) if comparison.best is None else _best(comparison, comparison.best)


def comparison_svg(comparison: Comparison) -> str:
    """Return the chart of scores against latency as an ``<svg>`` element, with the numbers of the table."""
    points: list[RunPoint] = []
    floats: dict[str, float] = {}
    for number, run in enumerate(in_order(comparison), start=1):
        if run.name not in comparison.timed or run.score is None or run.latency is None or run.record is None:
            continue
        front = run.name in comparison.pareto_optimal
        ms = run.latency.median_ms
        points.append(
            RunPoint(number=number, name=run.name, milliseconds=ms, score=run.score.value, pareto_optimal=front)
        )
        if run.float_score is not None:
            floats[run.record.model.source] = run.float_score.value
    best = None if comparison.best is None else comparison.best.score
    if best is None:
        return runs_svg(points, "score", floats)
    return runs_svg(points, best.metric, floats, higher_is_better=best.higher_is_better)


def _nearest(comparison: Comparison) -> str:
    """Return the run whose outputs are nearest to its float model, as a sentence."""
    measured = [run for run in in_order(comparison) if run.sqnr_db is not None]
    if not measured or measured[0].sqnr_db is None:
        return "No run has a score."
    sqnr = decibels_or_equal(measured[0].sqnr_db)
    sqnr = "no difference" if sqnr == "equal" else f"SQNR {sqnr} dB"
    return f"No run has a score. The outputs of {measured[0].name} are nearest to the float model: {sqnr}."


def _best(comparison: Comparison, best: ComparedRun) -> str:
    assert best.score is not None
    count = len(comparison.to_best)
    noise = sum(pair.within_noise for pair in comparison.to_best.values())
    words = f"The best score is {text.score(best.score.value)}, of {best.name}."
    if count and noise:
        verb = "is" if noise == 1 else "are"
        words += f" {noise} of the {text.counted(count, 'other run')} {verb} within noise of it."
    timed = [run for run in comparison.runs if run.name in comparison.timed and run.latency is not None]
    if timed:
        fastest = min(timed, key=lambda run: run.latency.median_ms if run.latency is not None else 0.0)
        assert fastest.latency is not None
        words += f" The fastest is {fastest.name}, {text.milliseconds(fastest.latency.median_ms)} per batch"
        words += " (noisy timing)." if fastest.is_noisy else "."
    return words


@dataclass(frozen=True)
class _Row:
    """A run in the tables, with its number and its difference to the best run."""

    number: int
    run: ComparedRun
    pair: Pair | None


def _rows(comparison: Comparison, runs: Sequence[ComparedRun]) -> list[_Row]:
    return [_Row(at, run, comparison.to_best.get(run.name)) for at, run in enumerate(runs, start=1)]


def _at(path: str) -> Callable[[_Row], Any]:
    """Return a function that follows a path such as ``run.score.interval.0``; None if a part is None."""

    def take(row: _Row) -> Any:
        value: Any = row
        for part in path.split("."):
            if value is not None:
                value = value[int(part)] if part.isdigit() else getattr(value, part)
        return value

    return take


def runs_table(comparison: Comparison, links: Mapping[str, str]) -> Table:
    """Return one row per run, the best score first."""
    best = comparison.best

    def to_best(row: _Row) -> float | None:
        return 0.0 if row.run is best else None if row.pair is None else row.pair.difference

    def remarks(row: _Row) -> str | None:
        return "; ".join(_remarks(row.run, row.pair, comparison)) or None

    scores = [
        numbers(_metric(comparison), _at("run.score.value"), text.score),
        numbers("Difference to float", _at("run.score.difference"), text.signed),
        numbers("95% interval", _at("run.score.interval"), text.interval),
        numbers("Difference to best", to_best, text.signed),
    ]
    columns = [
        numbers("Number", "number"),
        Column("Run", _at("run.name"), mono=True, link=links.get, tone=_wrapped),
        Column("Verdict", _at("run.verdict"), tone=_tone),
        Column("Remarks", remarks, tone=_wrapped),
        *(scores if best is not None else []),
        *([numbers("SQNR, dB", _at("run.sqnr_db"), decibels_or_equal)] if comparison.by_output else []),
        numbers("Latency, ms", _at("run.latency.median_ms"), lambda value: text.significant(value, 3)),
        numbers("Speed-up", _at("run.latency.ratio_to_float"), text.times),
        Column("Relative to", _at("run.reference")),
        numbers("Size", _at("run.size.bytes"), text.file_size),
        numbers("Duration", _at("run.seconds"), text.seconds),
    ]
    return Table("Runs", columns, _rows(comparison, in_order(comparison)))


def settings_table(comparison: Comparison) -> Table:
    """Return the settings that differ, one row per run."""

    def value(values: Mapping[str, Any]) -> Callable[[ComparedRun], Any]:
        return lambda run: setting(values[run.name])

    differing = comparison.differing.items()
    columns = [names("Run", "name"), *(Column(key, value(values), numeric=False) for key, values in differing)]
    return Table("Different settings", columns, in_order(comparison) if differing else [])


def pairs_table(comparison: Comparison) -> Table:
    """Return all pairs of runs."""
    columns = [
        names("Run", "second"),
        names("Compared with", "first"),
        numbers("Difference", "difference", text.signed),
        numbers("95% interval", "interval", text.interval),
        Column("Significance", "verdict"),
    ]
    return Table("Pairs", columns, comparison.pairs)


def csv_text(comparison: Comparison) -> str:
    """Return one line per run, with all figures and the settings that differ."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    keys = list(comparison.differing)
    writer.writerow([*_CSV, *keys])
    for row in _rows(comparison, comparison.runs):
        figures = [(_at(take) if isinstance(take, str) else take)(row) for take in _CSV.values()]
        settings = [setting(comparison.differing[key][row.run.name]) for key in keys]
        writer.writerow(["" if figure is None else figure for figure in (*figures, *settings)])
    return stream.getvalue()


def in_order(comparison: Comparison) -> list[ComparedRun]:
    """Return the runs with the best score first, then those without a score, the outputs nearest to float first."""

    def place(run: ComparedRun) -> tuple[bool, float]:
        if run.score is None:
            return (True, math.inf if run.sqnr_db is None else -run.sqnr_db)
        return (False, -run.score.value if run.score.higher_is_better else run.score.value)

    return sorted(comparison.runs, key=place)


def _metric(comparison: Comparison) -> str:
    return next((run.score.metric for run in comparison.runs if run.score is not None), "score")


def _remarks(run: ComparedRun, pair: Pair | None, comparison: Comparison) -> Iterator[str]:
    if run.error:
        yield run.error
    if run is comparison.best:
        yield "best score"
    elif pair is not None and pair.within_noise:
        yield "within noise of the best score"
    elif pair is not None and pair.difference is None:
        yield pair.why
    if run.is_noisy:
        yield "noisy timing"
    if run.name in comparison.pareto_optimal:
        yield "Pareto-optimal"


def decibels_or_equal(value: float) -> str:
    """Return an SQNR in dB: ``40.6``, or ``equal`` without a difference to the float model."""
    return "equal" if value == math.inf else text.decibels(value)


def _wrapped(_: str) -> str:
    return "words"


def _tone(level: str) -> str:
    return {USABLE: "yes", NOT: "no"}.get(level, "")


def setting(value: Any) -> Any:
    """Return a value of a configuration as a cell."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else value


_CSV: dict[str, str | Callable[[_Row], Any]] = {
    "run": "run.name",
    "folder": "run.folder",
    "error": "run.error",
    "verdict": "run.verdict",
    "model": "run.record.model.source",
    "backend": "run.record.engine.backend",
    "metric": "run.score.metric",
    "score": "run.score.value",
    "difference_to_float": "run.score.difference",
    "low_to_float": "run.score.interval.0",
    "high_to_float": "run.score.interval.1",
    "difference_to_best": "pair.difference",
    "low_to_best": "pair.interval.0",
    "high_to_best": "pair.interval.1",
    "sqnr_db": "run.sqnr_db",
    "median_ms": "run.latency.median_ms",
    "noisy_timing": lambda row: None if row.run.latency is None else row.run.is_noisy,
    "speedup": "run.latency.ratio_to_float",
    "speedup_over": "run.reference",
    "bytes": "run.size.bytes",
    "seconds": "run.seconds",
}
"""The columns of the CSV file before those of the settings."""


_MOST_KEYS = 4
"""The most settings beside each run; further ones are on the page."""

_NUMBER, _LEAST_NAME = 5, 32
"""Columns before a name, and the fewest columns of a name."""


def print_comparison(comparison: Comparison, page: Path | None, console: Console) -> None:
    """Print the table of runs, the runs by their numbers, notes, and the path of the page."""
    console.print(_table(comparison))
    for line in _lines(comparison, console.width):
        console.print(Text(line), soft_wrap=True)
    if any(pair.within_noise for pair in comparison.to_best.values()):
        console.print("  ~  within noise of the best score: the 95% interval includes 0", highlight=False)
    for note in comparison.notes:
        console.print(Text(note), soft_wrap=True)
    if page is not None:
        console.print(Text("comparison  ", style="bold") + Text(str(page)), soft_wrap=True)


def _table(comparison: Comparison) -> RichTable:
    def to_best(row: _Row) -> str | None:
        if row.pair is None or row.pair.difference is None:
            return "best" if row.run is comparison.best else None
        return f"{'~' if row.pair.within_noise else ''}{text.signed(row.pair.difference)}"

    scores = [
        numbers(_metric(comparison), _at("run.score.value"), text.score),
        numbers("against\nfloat", _at("run.score.difference"), text.signed),
        numbers("95% interval", _at("run.score.interval"), text.interval),
        numbers("against\nbest", to_best),
    ]
    columns = [
        numbers("", "number", str),
        *(scores if any(run.score is not None for run in comparison.runs) else []),
        *([numbers("SQNR\ndB", _at("run.sqnr_db"), decibels_or_equal)] if comparison.by_output else []),
        numbers("latency\nms", _at("run.latency.median_ms"), lambda value: text.significant(value, 3)),
        numbers("speed-up", _at("run.latency.ratio_to_float"), text.times),
        numbers("size", _at("run.size.bytes"), text.file_size),
    ]
    rows = _rows(comparison, in_order(comparison))
    table = Table("Runs", columns, rows).terminal(titled=False, compact=True)
    for shown, row in zip(table.rows, rows, strict=True):
        shown.style = "bold" if row.run.name in comparison.pareto_optimal else None
    return table


def _lines(comparison: Comparison, width: int) -> list[str]:
    """Return one line per run; names are shortened to fit, since the page has them in full."""
    words = {run.name: _words(run, comparison) for run in in_order(comparison)}
    wide = [name for name, remark in words.items() if _NUMBER + len(name) + len(remark) > width]
    room = width - _NUMBER - max((len(words[name]) for name in wide), default=0)
    names = {name: name for name in words} | short_names(wide, max(room, _LEAST_NAME))
    return [f"{number:>3}  {names[name]}{remark}" for number, (name, remark) in enumerate(words.items(), start=1)]


def _words(run: ComparedRun, comparison: Comparison) -> str:
    """Return the settings that a run's name omits, its verdict, its duration, and its error."""
    words = ""
    for key, values in comparison.differing.items() if len(comparison.differing) <= _MOST_KEYS else ():
        shown = f"{key.rpartition('.')[2]}={setting(values[run.name])}"
        # YAML writes true where Python writes True.
        words += "" if shown.lower() in run.name.lower() else f" {shown}"
    remarks = [] if run.verdict is None else [run.verdict]
    remarks += ["noisy timing"] if run.is_noisy else []
    remarks += [] if run.seconds is None else [text.seconds(run.seconds)]
    remarks += ["Pareto-optimal"] if run.name in comparison.pareto_optimal else []
    remarks += [run.error] if run.error else []
    return f"{words}: {', '.join(remarks)}" if remarks else words


_BOUNDS = ",/"
"""Separators in names: between values of a sweep, and between folders of a path."""


def short_names(names: Sequence[str], length: int) -> dict[str, str]:
    """Return distinct names of at most ``length`` characters by the full names.

    A long name loses its middle. Names that become equal keep the parts that differ instead; if these also become
    equal, names stay whole.
    """
    short = {name: text.shorten(name, length) for name in names}
    for alike in _alike(short):
        short |= {name: text.shorten(part, length) for name, part in _differing(alike).items()}
    for alike in _alike(short):
        short |= {name: name for name in alike}
    return short


def _alike(short: dict[str, str]) -> list[list[str]]:
    """Return groups of names with the same short form."""
    groups: dict[str, list[str]] = {}
    for name, shown in short.items():
        groups.setdefault(shown, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _differing(names: Sequence[str]) -> dict[str, str]:
    """Return each name without the parts at its ends that all names share."""
    start = _common(names)
    end = _common([name[start:][::-1] for name in names])
    left, right = "…" if start else "", "…" if end else ""
    return {name: f"{left}{name[start : len(name) - end]}{right}" for name in names}


def _common(names: Sequence[str]) -> int:
    """Return the number of letters that all names begin with, up to the end of a part."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    begin = "".join(letters[0] for letters in alike)
    return max(begin.rfind(bound) for bound in _BOUNDS) + 1


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
        "thresholds": THRESHOLDS,
        "table": runs_table(comparison, _links(comparison, folder)).html(breaks=True),
        "picture": comparison_svg(comparison),
        "settings": settings_table(comparison).html() if comparison.differing else "",
        "pairs": pairs_table(comparison).html() if comparison.pairs else "",
    }


def _links(comparison: Comparison, folder: Path) -> dict[str, str]:
    """Return the addresses of the reports by run name; relative, so that all folders can move together."""
    links = {}
    for run in comparison.runs:
        report = run.folder.absolute() / "report.html"
        # Reports elsewhere do not move together with the page.
        near = report.is_relative_to(folder.parent)
        if run.record is not None and report.is_file():
            links[run.name] = quote(Path(os.path.relpath(report, folder)).as_posix()) if near else report.as_uri()
    return links
