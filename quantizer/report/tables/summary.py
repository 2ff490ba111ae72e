"""A placement by measured time as sentences.

The lines on causes and cures at the top of a report.

The short table that a run prints at its end, and ``quantizer show`` later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantizer.errors import QuantizerError
from quantizer.report.codec import is_from_python, read_record, shown_setting
from quantizer.report.ratios import quantized_entry, reference_entry
from quantizer.report.record import RunRecord
from quantizer.report.run_records import Cause, Placement, worst_output
from quantizer.report.tables import text
from quantizer.report.tables.headline import quantized_score
from quantizer.report.tables.layer_table import print_inspection, shares_line
from quantizer.report.tables.tables import budget_line, print_choice
from quantizer.report.tables.text import noise_sentence, print_labelled, print_lines
from quantizer.report.verdict import verdict_of


def placement_lines(placement: Placement) -> list[str]:
    """Return what low precision wins, what the plan is predicted to take, and how a goal was met, in sentences."""
    low, plain, taken = (
        text.milliseconds(value) for value in (placement.low_ms, placement.float_ms, placement.predicted_ms)
    )
    lines = [f"measured: {placement.where}; everything in low precision takes {low}, the float model {plain}"]
    slower = sum(group.slower is not None for group in placement.groups)
    if slower:
        lines.append(f"{text.counted(slower, 'group')} went back because low precision makes the engine slower there")
    if placement.back:
        lines.append(f"with {text.counted(placement.back, 'group')} in float the plan is predicted to take {taken}")
    if placement.min_speedup is not None and placement.speedup is not None:
        met = "reached" if placement.speedup >= placement.min_speedup else "not reached"
        asked, got = text.times(placement.min_speedup), text.times(placement.speedup)
        lines.append(f"asked for {asked} the speed of float: the engine has {got}, {met}")
    return lines


def lines_of_causes(record: RunRecord) -> list[str]:
    """Return the lines on what costs most in a run, or on why this is not known."""
    lines = cause_lines(record.causes, record.placement, python=is_from_python(record))
    if record.causes_problem is not None:
        lines.append(f"what costs most is not known, as the search for it failed: {record.causes_problem}")
    return lines


def cause_lines(causes: Sequence[Cause], placement: Placement | None = None, *, python: bool = False) -> list[str]:
    """Return a line for each cause, numbered."""
    return [f"{number}. {_line(cause, placement, python=python)}" for number, cause in enumerate(causes, start=1)]


def _line(cause: Cause, placement: Placement | None, *, python: bool) -> str:
    parts = [f"{cause.group}: {text.decibels(cause.sqnr_db)} dB alone", *cause.findings, *cause.notes]
    cure = cause.cure
    if cure is None:
        parts.append("no setting that was tried gains" if cause.findings else "nothing stands out in its inputs")
    elif math.isinf(cure.alone_db):
        gain = f"measured gain {text.decibels(cure.gain_db)} dB"
        setting = shown_setting(cure.setting, python=python)
        parts.append(f"cure: leave it in float, {setting}, {gain}{_cost(cause.group, placement)}")
    else:
        setting = shown_setting(cure.setting, python=python)
        parts.append(f"cure: {setting}, measured gain {text.decibels(cure.gain_db)} dB, no time")
    return "; ".join(parts)


def _cost(group: str, placement: Placement | None) -> str:
    """Return what a group takes more in float than in low precision, in words; empty: it was not timed."""
    taken = [one for one in placement.groups if one.group == group] if placement else []
    if placement is None or not taken:
        return ""
    more = taken[0].float_us - taken[0].low_us
    if more <= 0:
        # What is faster in float by more than noise is float in the plan already.
        return ", no more time within noise (measured)"
    return f", {more:.0f} us more a batch (measured)"


def print_summary(folder: Path | str, console: Console) -> None:
    """Print the table of the run in ``folder``."""
    folder = Path(folder)
    print_record(read_record(folder / "report.json"), folder, console)


def print_record(record: RunRecord, folder: Path | str | None, console: Console) -> None:
    """Print how the engine was chosen and what costs accuracy, and last, on a screen of its own, the result."""
    if record.choice is not None:
        print_choice(record.choice, console)
    if record.placement is not None and (record.placement.back or record.placement.min_speedup is not None):
        print_lines(placement_lines(record.placement), console, first="")
    print_lines(lines_of_causes(record), console, first="", rest="   ")
    console.print(_table(record))
    if noise := noise_sentence(record.latency):
        print_lines([noise], console, first="")
    _print_facts(record, console)
    if folder is None:
        print_labelled("saved", 'not yet: result.save("FOLDER") writes engines, report and quantizer there', console)
    else:
        _print_paths(record, Path(folder), console)
    if record.choice is not None and record.choice.deploy:
        print_labelled("deploy", record.choice.deploy, console)
    if folder is not None and is_from_python(record):
        print_labelled("load", f"quantizer.load({json.dumps(str(folder))}), and call it as the model", console)


def print_layers(folder: Path | str, console: Console) -> None:
    """Print what the engine of the run in ``folder`` runs in which precision, and the layers that take longest."""
    record = read_record(Path(folder) / "report.json")
    if record.inspection is None:
        raise QuantizerError(f"{folder}: the run built no engine, and has no layers to show")
    print_inspection(record.inspection, console)


def _print_facts(record: RunRecord, console: Console) -> None:
    """Print, a line each, the verdict, the budget, and what the engine runs."""
    print_labelled("verdict", str(verdict_of(record)), console)
    for sentence in record.fixed:
        print_labelled("sizes", sentence, console)
    if record.fallback is not None and record.fallback.outcome is not None:
        print_labelled("budget", budget_line(record.fallback.outcome), console)
    if record.fallback is not None and record.fallback.groups:
        number = text.counted(len(record.fallback.groups), "group")
        print_labelled("float", f"{number} went back: {text.listed(record.fallback.groups)}", console)
    if record.inspection is not None:
        style = None if record.inspection.verified else "yellow"
        print_labelled("runs", shares_line(record.inspection), console, style=style)


def _print_paths(record: RunRecord, folder: Path, console: Console) -> None:
    """Print, a line each, where the engine and the report are, and what shows its layers."""
    if record.inspection is not None:
        print_labelled("layers", f"quantizer show {folder} --layers", console, wrap=False)
    missing = "not built" if record.engine_refused is None else "refused, see the verdict"
    engine = missing if record.engine is None else str(folder / record.engine.path)
    page = folder / "report.html"
    print_labelled("engine", engine, console, wrap=False)
    print_labelled("report", str(page if page.exists() else folder / "report.json"), console, wrap=False)


def _table(record: RunRecord) -> Table:
    if not record.scores:
        return _table_of_outputs(record)
    metric = record.scores[0].metric
    table = _headed(record, ("", metric, "to float", "95% interval", "speed", "size"))
    scores = {entry.which: entry for entry in record.scores}
    costs = _costs(record)
    headline = quantized_score(record.scores)
    for name in dict.fromkeys(["float", *scores, "engine"]):
        entry = scores.get(name)
        speed, size = costs.get(name, ("-", "-"))
        cells = [name, "not measured", "-", "-", speed, size]
        if entry is not None:
            cells[1] = text.score(entry.value)
            cells[2] = "-" if entry.difference is None else text.signed(entry.difference)
            cells[3] = "-" if entry.interval is None else text.interval(entry.interval)
        table.add_row(*map(Text, cells), style="bold" if headline is not None and entry is headline else None)
    return table


def _table_of_outputs(record: RunRecord) -> Table:
    """Return the table where nothing was scored: the worst output in the place of the score."""
    table = _headed(record, ("", "SQNR", "cosine", "speed", "size"))
    costs = _costs(record)
    worst = worst_output(record.outputs)
    for name in ("float", "engine"):
        cells = ["not measured", "-"]
        if name == "float":
            cells = ["-", "-"]
        elif worst is not None:
            sqnr = "no difference" if worst.sqnr_db is None else f"{text.decibels(worst.sqnr_db)} dB"
            cells = [sqnr, f"{worst.cosine:.4f}"]
        table.add_row(*map(Text, [name, *cells, *costs[name]]))
    return table


def _headed(record: RunRecord, titles: Sequence[str]) -> Table:
    reference = None if record.latency is None else record.latency.reference
    name = record.name if reference is None else f"{record.name}; speed over {reference}"
    # Without the empty lines around it: the result is to fit the last ten or so of a terminal.
    table = Table(title=Text(name), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(Text(title), justify="right" if title else "left", no_wrap=not title)
    return table


def _costs(record: RunRecord) -> dict[str, tuple[str, str]]:
    """Return speed and size, as text, of the float model and of the engine."""
    engines = record.latency.engines if record.latency else ()
    costs = {}
    for name, speed, size in (
        ("float", reference_entry(engines), reference_entry(record.size)),
        ("engine", quantized_entry(engines), quantized_entry(record.size)),
    ):
        costs[name] = (
            "not measured" if speed is None else text.times(speed.ratio_to_float),
            "not measured" if size is None else f"{text.times(size.ratio)} ({text.file_size(size.bytes)})",
        )
    return costs
