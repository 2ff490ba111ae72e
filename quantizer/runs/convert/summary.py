"""The printed results of a conversion: tables for each engine, and a summary at the end for one in float."""

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
from quantizer.runs.convert.result import BackendResult
from quantizer.runs.outputs.compare_outputs import OutputCheck


def print_result(result: BackendResult, console: Console) -> None:
    """Print the output check and the latency of one engine."""
    if result.not_verified:
        console.print(Text(_not_verified(result)))
        return
    judged = "frozen" if result.quantization else "float"
    print_lines([f"outputs against the {judged} model in PyTorch: {result.tolerance}"], console, first="")
    table = _table()
    for title in ("shape", "output", "SQNR, dB", "to float", "PyTorch's to float", "cosine to float"):
        table.add_column(title, justify="left" if title == "output" else "right", no_wrap=title == "output")
    for check in result.checks:
        far = [_decibels(value) for value in (check.sqnr_db, check.float_db, check.proxy_float_db)]
        table.add_row(_shape(check), Text(check.output), *far, f"{check.cosine:.4f}")
    console.print(table)
    if result.sizes:
        print_lines([result.sizes], console, first="")
    names = list(result.latency[0].milliseconds)
    told = f"latency in ms, median of rounds that take turns; speed-up over {names[-2]}"
    print_lines([told], console, first="")
    table = _table()
    for title in ("shape", *names, "speed-up", "rounds"):
        table.add_column(title, justify="right")
    for shape in result.latency:
        times = [shape.milliseconds[name] for name in names]
        speed = text.times(times[-2] / times[-1])
        table.add_row(_shape(shape), *(f"{t:.2f}" for t in times), speed, str(shape.rounds))
    console.print(table)


def print_summary(facts: ConversionInputs, result: BackendResult, folder: Path, console: Console) -> None:
    """Print the score, the figures and the folder of one engine in float."""
    console.print(Text(f"{facts.name} for {result.backend}", style="bold"))
    print_lines([*_scores(result), _outputs(result), _costs(result)], console, first="  ", rest="    ")
    console.print(Text(f"  {folder / result.backend}"), soft_wrap=True)


def _shape(of: OutputCheck | ShapeLatency) -> str:
    return f"batch {of.batch}" if of.sequence is None else f"{of.batch} x {of.sequence}"


def _decibels(value: float | None) -> str:
    return "equal" if value is None else text.decibels(value)


def _outputs(result: BackendResult) -> str:
    if result.not_verified:
        return _not_verified(result)
    worst = min((check.sqnr_db for check in result.checks if check.sqnr_db is not None), default=None)
    return "outputs checked against PyTorch's: " + ("equal" if worst is None else f"SQNR {worst:.1f} dB or more")


def _not_verified(result: BackendResult) -> str:
    """Return why an engine was not run, and what runs it elsewhere."""
    script = result.serving.get("gpu_check")
    more = "" if script is None else f"; {script} in its folder checks and times it where there is one"
    return f"{result.not_verified}{more}"


def _costs(result: BackendResult) -> str:
    size = f"engine in {result.inference_precision or result.float_dtype}, {text.file_size(result.engine_bytes)}"
    if not result.latency:
        return size
    # The usual shape is the middle one of three. There are fewer if shapes are equal.
    usual = result.latency[len(result.latency) // 2]
    before, after = list(usual.milliseconds.values())[-2:]
    return f"{size}, {text.times(before / after)} as fast as PyTorch at {_shape(usual)}"


def _scores(result: BackendResult) -> list[str]:
    return [
        f"{entry.metric} {text.score(entry.value)} on {entry.rows} rows, {text.signed(entry.difference)} to PyTorch, "
        f"95% interval {text.interval(entry.interval)}"
        for entry in result.scores
        if entry.difference is not None and entry.interval is not None
    ]


def _table() -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
