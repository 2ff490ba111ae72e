"""The short table that a run prints at its end, and ``quantizer show`` later."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantizer.report.json_file import read_record
from quantizer.report.ratios import quantized_entry
from quantizer.report.ratios import reference_entry
from quantizer.report.record import RunRecord
from quantizer.report.tables import text
from quantizer.report.tables.cause_lines import cause_lines
from quantizer.report.tables.choice_table import print_choice
from quantizer.report.tables.engine_table import print_inspection
from quantizer.report.tables.headline import quantized_score
from quantizer.report.tables.placement_lines import placement_lines
from quantizer.report.verdict import verdict_of

__all__ = ["print_record", "print_summary"]


def print_summary(folder: Path | str, console: Console) -> None:
    """Print the table of the run in ``folder``.

    Raises:
        QuantizerError: the folder has no readable report.json.
    """
    folder = Path(folder)
    print_record(read_record(folder / "report.json"), folder, console)


def print_record(record: RunRecord, folder: Path | str, console: Console) -> None:
    """Print score, speed and size of float, proxy and engine, the engine's precisions, and the paths of the files."""
    folder = Path(folder)
    if record.choice is not None:
        print_choice(record.choice, console)
    if record.placement is not None and (record.placement.back or record.placement.min_speedup is not None):
        for line in placement_lines(record.placement):
            console.print(Text(line), soft_wrap=True)
    for line in cause_lines(record.causes, record.placement):
        console.print(Text(line))
    console.print(_table(record))
    if record.inspection is not None:
        print_inspection(record.inspection, console)
    console.print(Text("verdict ", style="bold") + Text(str(verdict_of(record))))
    engine = Text("not built") if record.engine is None else Text(str(folder / record.engine.path))
    page = folder / "report.html"
    console.print(Text("engine  ", style="bold") + engine, soft_wrap=True)
    console.print(
        Text("report  ", style="bold") + Text(str(page if page.exists() else folder / "report.json")), soft_wrap=True
    )
    if record.choice is not None and record.choice.deploy:
        console.print(Text("deploy  ", style="bold") + Text(record.choice.deploy), soft_wrap=True)


def _table(record: RunRecord) -> Table:
    metric = record.scores[0].metric if record.scores else "score"
    table = Table(title=Text(record.name), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for title in ("", metric, "to float", "95% interval", "speed", "size"):
        table.add_column(Text(title), justify="right" if title else "left", no_wrap=not title)
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
            "not measured" if size is None else f"{text.times(size.ratio)} ({text.mebibytes(size.bytes)})",
        )
    return costs
