"""A choice of an engine as a table, for a terminal and for the page."""

from __future__ import annotations

import re

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantizer.report.candidate_record import EngineChoice
from quantizer.report.tables import text
from quantizer.report.tables.lines import print_lines
from quantizer.report.tables.tables import Column, html_table

_ROOM = 20
"""Letters of a verdict beside the times of three shapes in a terminal of 80."""


def print_choice(choice: EngineChoice, console: Console) -> None:
    """Print what was chosen, and all candidates in a table."""
    print_lines([choice.headline], console, first="", style="bold")
    told = "latency in ms, medians of rounds that take turns; dB of the outputs against float"
    scored = any(candidate.score_difference is not None for candidate in choice.candidates)
    told += "; to float: the difference of the score" if scored else ""
    print_lines([told], console, first="")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for title in ("engine", *choice.shapes, "dB", *(("to float",) if scored else ())):
        table.add_column(title, justify="left" if title == "engine" else "right", no_wrap=True)
    table.add_column("verdict")
    for candidate in choice.candidates:
        times = [f"{value:.2f}" for value in candidate.milliseconds]
        times += ["-"] * (len(choice.shapes) - len(times))
        sqnr = "-" if candidate.sqnr_db is None else text.decibels(candidate.sqnr_db)
        difference = candidate.score_difference
        score = ["-" if difference is None else text.signed(difference)] if scored else []
        table.add_row(candidate.name, *times, sqnr, *score, Text(_short(candidate.verdict)))
    console.print(table)
    for candidate in choice.candidates:
        if candidate.verdict != _short(candidate.verdict):
            # Not wrapped: a reason may hold a path.
            console.print(Text(f"{candidate.name}: {candidate.verdict}"), soft_wrap=True)
    print_lines(missing_lines(choice), console, first="")


def _short(verdict: str) -> str:
    """Return a verdict as a table has room for it: without a reason, which may hold a path."""
    return verdict if len(verdict) <= _ROOM else re.split(":| at ", verdict)[0]


def choice_table(choice: EngineChoice) -> str:
    """Return a table with a numbered row for each candidate: latency at each shape, SQNR, score, and the verdict."""
    scored = any(candidate.score_difference is not None for candidate in choice.candidates)
    columns: list[Column | str] = [
        "",
        "Engine",
        *(Column(title=f"{shape}, ms", numeric=True, show=lambda value: f"{value:.2f}") for shape in choice.shapes),
        Column(title="SQNR, dB", numeric=True, show=text.decibels),
        *((Column(title="Score to float", numeric=True, show=text.signed),) if scored else ()),
        "Verdict",
    ]
    rows = [
        (
            row,
            candidate.name,
            *candidate.milliseconds,
            *[None] * (len(choice.shapes) - len(candidate.milliseconds)),
            candidate.sqnr_db,
            *((candidate.score_difference,) if scored else ()),
            candidate.verdict,
        )
        for row, candidate in enumerate(choice.candidates, start=1)
    ]
    return html_table(columns, rows, label="Candidates", style=False)


def missing_lines(choice: EngineChoice) -> list[str]:
    """Return a sentence for each candidate that is not installed."""
    return [f"not tried, as it is not installed: {missing}" for missing in choice.missing]
