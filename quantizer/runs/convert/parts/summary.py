"""The printed results of a conversion of a model in parts."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantizer.report import text
from quantizer.report.text import print_lines
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.convert.parts.result import PartsResult, WholeLatency
from quantizer.runs.outputs.compare_outputs import OutputCheck


def print_parts(facts: ConversionInputs, result: PartsResult, folder: Path, console: Console) -> None:
    """Print what came of the engines of one backend; scores and place only of the float model, which has no report."""
    console.print(Text(f"{facts.name} for {result.backend}", style="bold"))
    if result.whole is None:
        print_lines([str(result.not_verified)], console, first="")
    else:
        judged = "float" if result.quantization is None else "frozen"
        print_lines([f"outputs against the {judged} model in PyTorch: {result.tolerance}"], console, first="")
        console.print(_outputs(result))
        console.print(f"latency in ms at {result.parts[0].latency[facts.usual]}, medians of rounds that take turns")
        console.print(_latency(result, result.whole, facts.usual))
    print_lines([*_covered(result), *_texts(result)], console, first="  ", rest="    ")
    if result.quantization is None:
        print_lines(_scores(result), console, first="  ", rest="    ")
        console.print(Text(f"  {folder}"), soft_wrap=True)


def _outputs(result: PartsResult) -> Table:
    """Return the least SQNR of each part over all its outputs and shapes."""
    table = _table("part", "engine to PyTorch, dB", "engine to float, dB", "PyTorch to float, dB")
    for name, checks in [*((part.name, part.checks) for part in result.parts), ("token by token", result.steps)]:
        far = (_least(checks, which) for which in ("sqnr_db", "float_db", "proxy_float_db"))
        table.add_row(name, *far)
    return table


def _least(checks: tuple[OutputCheck, ...], which: str) -> str:
    found = [value for check in checks if (value := getattr(check, which)) is not None]
    return text.decibels(min(found)) if found else "equal"


def _latency(result: PartsResult, whole: WholeLatency, usual: int) -> Table:
    names = list(whole.latency.milliseconds)
    table = _table("part", *names, "speed-up")
    for part in result.parts:
        _add(table, part.name, part.latency[usual], names)
    _add(table, f"{whole.tokens} tokens in all", whole.latency, names)
    return table


def _add(table: Table, title: str, shape: ShapeLatency, names: list[str]) -> None:
    times = [shape.milliseconds[name] for name in names]
    table.add_row(title, *(f"{value:.2f}" for value in times), text.times(times[-2] / times[-1]))


def _covered(result: PartsResult) -> list[str]:
    facts = result.quantization
    if facts is None or facts.multiply_adds is None:
        return []
    sites = ", ".join(f"{kind} {quantized} of {count}" for kind, (quantized, count) in facts.sites.items())
    return [f"{facts.dtype.upper()} {text.percent(facts.multiply_adds)} of multiply-adds of all parts: {sites}"]


def _texts(result: PartsResult) -> list[str]:
    return [
        f"{name}: {text.percent(one.tokens)} of tokens and {text.percent(one.texts)} of {one.rows} texts are those of "
        "the float model"
        for name, one in result.agreement.items()
    ]


def _scores(result: PartsResult) -> list[str]:
    return [
        f"{entry.which}: {entry.metric} {text.score(entry.value)} on {entry.rows} rows"
        + ("" if entry.difference is None else f", {text.signed(entry.difference)} to float")
        + ("" if entry.interval is None else f", 95% interval {text.interval(entry.interval)}")
        for entry in result.scores
    ]


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title == "part" else "right", no_wrap=title == "part")
    return table
