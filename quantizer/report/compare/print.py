"""A comparison in the terminal: figures in a narrow table, and the runs that they are of below it."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantizer.report.compare.compared_run import ComparedRun
from quantizer.report.compare.comparison import Comparison
from quantizer.report.compare.short_names import short_names
from quantizer.report.compare.tables import decibels_or_equal, in_order, setting
from quantizer.report.tables import text

_MOST_KEYS = 4
"""So many settings are written beside each run; where more differ, the page has them."""

_NUMBER, _LEAST_NAME = 5, 32
"""Columns before a name, and those that a name gets where an error or many settings leave none."""


def print_comparison(comparison: Comparison, page: Path | None, console: Console) -> None:
    """Print the table of the runs, the runs by their numbers, what cannot be compared, and the path of the page.

    Args:
        comparison: the comparison.
        page: the page that was written; None: none was.
        console: where it is printed.
    """
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
            *(_scores(run, comparison) if scored else ()),
            *(("-" if run.sqnr_db is None else decibels_or_equal(run.sqnr_db),) if comparison.by_output else ()),
            "-" if latency is None else text.significant(latency.median_ms, 3),
            "-" if latency is None else text.times(latency.ratio_to_float),
            "-" if size is None else text.file_size(size.bytes),
        ]
        table.add_row(*map(Text, cells), style="bold" if run.name in comparison.front else None)
    return table


def _scores(run: ComparedRun, comparison: Comparison) -> list[str]:
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
