"""Summary of a run as it is printed at its end, and by ``quantizer show``; its page has the same sentences."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quantizer.errors import QuantizerError
from quantizer.report import text
from quantizer.report.record import EngineChoice, LatencyFallback, RunRecord, is_from_python, read_record, shown_setting
from quantizer.report.tables import ENGINE_LAYERS, Table, choice_table, latency_table, precision_name, shares_table
from quantizer.report.text import noise_sentence, print_labelled, print_lines
from quantizer.report.verdict import verdict_of
from quantizer.utils.records import BudgetOutcome, Diagnosis, FallbackRecord, Inspection, Score

_SLOWEST = 10
_LEAST = 0.01
"""A share under 1% has no place in a line."""


def print_choice(choice: EngineChoice, console: Console) -> None:
    """Print what was chosen, and all candidates in a table."""
    print_lines([choice.headline], console, first="", style="bold")
    told = "latency in ms, medians of rounds that take turns; dB of the outputs against float"
    scored = any(candidate.score_difference is not None for candidate in choice.candidates)
    told += "; to float: the difference of the score" if scored else ""
    print_lines([told], console, first="")
    table = choice_table(choice, page=False).terminal(titled=False, compact=True)
    table.columns[0].no_wrap = True
    console.print(table)
    for candidate in choice.candidates:
        if candidate.verdict != text.short_verdict(candidate.verdict):
            # Not wrapped: a reason may hold a path.
            console.print(Text(f"{candidate.name}: {candidate.verdict}"), soft_wrap=True)
    print_lines(missing_lines(choice), console, first="")


def missing_lines(choice: EngineChoice) -> list[str]:
    """Return a sentence for each candidate that is not installed."""
    return [f"not tried, as it is not installed: {missing}" for missing in choice.missing]


def budget_line(outcome: BudgetOutcome) -> str:
    """Return whether a budget is met, in a line: what was asked, and the drops that were measured."""
    words = [f"asked {text.error(outcome.asked)}", f"drop in tuning {text.drop(outcome.tuning)}"]
    if outcome.evaluation is not None:
        low, high = outcome.interval or (None, None)
        span = "" if low is None or high is None else f" (95%: {text.drop(low)} to {text.drop(high)})"
        words.append(f"in evaluation of the {outcome.which} {text.drop(outcome.evaluation)}{span}")
    return f"{'; '.join(words)}: {outcome.verdict}"


def evaluation_caption(fallback: FallbackRecord) -> str:
    """Return the budget and the result of the search, in a line."""
    words = [text.counted(len(fallback.evaluations), "evaluation")]
    if fallback.float_score is not None:
        words.append(f"the float model scores {text.plain(fallback.float_score)}")
    if fallback.max_drop is not None:
        words.append(f"a drop of {text.error(fallback.max_drop)} is allowed")
    found = next((entry for entry in fallback.evaluations if entry.chosen), None)
    if found is not None:
        words.append(
            f"with {text.counted(len(found.groups), 'group')} kept in float it scores {text.plain(found.score)}"
        )
    else:
        words.append(f"kept in float: all, {text.counted(len(fallback.groups), 'group')}")
    words += [
        ("" if entry.samples is None else f"on {text.counted(entry.samples, 'row')} that the search did not see, ")
        + f"the engine with {text.counted(entry.groups, 'group')} kept in float drops by {text.error(entry.drop)}"
        for entry in fallback.checks
    ]
    if fallback.outcome is not None:
        words.append(budget_line(fallback.outcome))
    if fallback.checks and fallback.max_drop is not None and fallback.checks[-1].drop > fallback.max_drop:
        words.append("the budget is not met on the engine, and this is the best plan found")
    return "; ".join(words)


def latency_fallback_lines(latency_fallback: LatencyFallback) -> list[str]:
    """Return what low precision wins, what the plan is predicted to take, and how a goal was met, in sentences."""
    low, plain, taken = (
        text.milliseconds(value)
        for value in (latency_fallback.low_ms, latency_fallback.float_ms, latency_fallback.predicted_ms)
    )
    lines = [f"measured: {latency_fallback.where}; everything in low precision takes {low}, the float model {plain}"]
    slower = sum(group.slower is not None for group in latency_fallback.groups)
    if slower:
        lines.append(f"{text.counted(slower, 'group')} fell back because low precision makes the engine slower there")
    if latency_fallback.back:
        lines.append(
            f"with {text.counted(latency_fallback.back, 'group')} in float the plan is predicted to take {taken}"
        )
    if latency_fallback.min_speedup is not None and latency_fallback.speedup is not None:
        met = "reached" if latency_fallback.speedup >= latency_fallback.min_speedup else "not reached"
        asked, got = text.times(latency_fallback.min_speedup), text.times(latency_fallback.speedup)
        lines.append(f"asked for {asked} the speed of float: the engine has {got}, {met}")
    return lines


def diagnosis_lines_of(record: RunRecord) -> list[str]:
    """Return the lines on what costs most in a run, or on why this is not known."""
    lines = diagnosis_lines(record.diagnoses, record.latency_fallback, python=is_from_python(record))
    if record.diagnosis_error is not None:
        lines.append(f"what costs most is not known, as the search for it failed: {record.diagnosis_error}")
    return lines


def diagnosis_lines(
    diagnoses: Sequence[Diagnosis], latency_fallback: LatencyFallback | None = None, *, python: bool = False
) -> list[str]:
    """Return a line for each cause, numbered."""
    return [
        f"{number}. {_line(cause, latency_fallback, python=python)}" for number, cause in enumerate(diagnoses, start=1)
    ]


def _line(cause: Diagnosis, latency_fallback: LatencyFallback | None, *, python: bool) -> str:
    parts = [f"{cause.group}: {text.decibels(cause.sqnr_db)} dB alone", *cause.findings, *cause.notes]
    fix = cause.fix
    if fix is None:
        parts.append("no setting that was tried gains" if cause.findings else "nothing stands out in its inputs")
    elif math.isinf(fix.alone_db):
        gain = f"measured gain {text.decibels(fix.gain_db)} dB"
        setting = shown_setting(fix.setting, python=python)
        parts.append(f"fix: leave it in float, {setting}, {gain}{_cost(cause.group, latency_fallback)}")
    else:
        setting = shown_setting(fix.setting, python=python)
        parts.append(f"fix: {setting}, measured gain {text.decibels(fix.gain_db)} dB, no time")
    return "; ".join(parts)


def _cost(group: str, latency_fallback: LatencyFallback | None) -> str:
    """Return what a group takes more in float than in low precision, in words; empty: it was not timed."""
    taken = [one for one in latency_fallback.groups if one.group == group] if latency_fallback else []
    if latency_fallback is None or not taken:
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
    if record.latency_fallback is not None and (
        record.latency_fallback.back or record.latency_fallback.min_speedup is not None
    ):
        print_lines(latency_fallback_lines(record.latency_fallback), console, first="")
    print_lines(diagnosis_lines_of(record), console, first="", rest="   ")
    console.print(_table(record))
    if noise := noise_sentence(record.latency):
        print_lines([noise], console, first="")
    if record.other_latencies:
        console.print(latency_table(record).terminal(titled=False, compact=True))
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
        print_labelled("float", f"{number} fell back: {text.listed(record.fallback.groups)}", console)
    for one in record.agreement:
        told = f"{text.percent(one.tokens)} of tokens and {text.percent(one.texts)} of {one.samples} texts"
        print_labelled("texts", f"{one.which}: {told} are those of the float model", console)
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


def _table(record: RunRecord) -> RichTable:
    """Return score, or else the worst output, speed and size of each form of the model."""
    heading = record.name if record.latency is None else f"{record.name}; speed over {record.latency.reference}"
    # Without the empty lines around it: the result is to fit the last ten or so of a terminal.
    table = RichTable(title=Text(heading), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    scores = {entry.which: entry for entry in record.scores}
    titles = (record.scores[0].metric, "to float", "95% interval") if scores else ("SQNR", "cosine")
    for title in ("", *titles, "speed", "size"):
        table.add_column(Text(title), justify="right" if title else "left", no_wrap=not title)
    for name in dict.fromkeys(["float", *scores, "engine"]):
        entry = scores.get(name)
        cells = _score_cells(entry) if scores else _output_cells(None if name == "float" else record)
        style = "bold" if entry is not None and entry is record.score else None
        table.add_row(*map(Text, [name, *cells, *_costs(record, name)]), style=style)
    return table


def _score_cells(entry: Score | None) -> list[str]:
    if entry is None:
        return ["not measured", "-", "-"]
    difference = "-" if entry.difference is None else text.signed(entry.difference)
    return [text.score(entry.value), difference, "-" if entry.interval is None else text.interval(entry.interval)]


def _output_cells(record: RunRecord | None) -> list[str]:
    worst = None if record is None else record.worst_output
    if worst is None:
        return ["-" if record is None else "not measured", "-"]
    sqnr = "no difference" if worst.sqnr_db is None else f"{text.decibels(worst.sqnr_db)} dB"
    return [sqnr, f"{worst.cosine:.4f}"]


def _costs(record: RunRecord, name: str) -> list[str]:
    """Return speed and size of the float model or of the engine."""
    if name not in ("engine", "float"):
        return ["-", "-"]
    at = name == "float"
    speed = None if record.speeds is None else text.times(record.speeds[at].ratio_to_float)
    size = None if record.sizes is None else record.sizes[at]
    told = None if size is None else f"{text.times(size.ratio)} ({text.file_size(size.bytes)})"
    return [speed or "not measured", told or "not measured"]


def verified_words(inspection: Inspection) -> str:
    """Return whether the engine was observed, and how, or why not: ``verified: seen in a run ...``."""
    return f"{'verified' if inspection.verified else 'not verified'}: {inspection.note}"


def engine_facts(inspection: Inspection) -> list[str]:
    """Return the facts besides the shares: attention, conversions, float outputs, and reasons in words."""
    lines = []
    if inspection.attention_fused or inspection.attention_apart:
        apart = f", {inspection.attention_apart} taken apart" if inspection.attention_apart else ""
        lines.append(f"attention: {inspection.attention_fused} fused{apart}")
    lines.append(
        f"layers that only convert: {inspection.quantizers} quantize or dequantize, {inspection.casts} cast, "
        f"{inspection.reformats} reformat"
    )
    if inspection.verified:
        lines.append(f"products in low precision that write floats: {inspection.float_outputs}")
    if inspection.uncounted:
        lines.append(f"products whose multiply-adds are not told, and not in the shares: {inspection.uncounted}")
    return [*lines, *inspection.reasons]


def shares_line(inspection: Inspection) -> str:
    """Return how much of the products and of the time each precision has, and whether that was observed, in a line."""
    said = []
    for share in inspection.shares:
        parts = [("of multiply-adds", share.multiply_add_share), ("of the time", share.time_share)]
        told = [f"{text.percent(value)} {what}" for what, value in parts if value is not None and value >= _LEAST]
        if told:
            said.append(f"{precision_name(share.precision)} {' and '.join(told)}")
    return "; ".join([*said, verified_words(inspection)])


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print whether the engine was observed, the shares, the facts, and the slowest layers."""
    style = "bold" if inspection.verified else "bold yellow"
    print_lines([verified_words(inspection)], console, first="", style=style)
    if not inspection.shares:
        return
    shares = replace(shares_table(inspection), title="products, as the ONNX file asks for them")
    console.print(shares.terminal(titled=not inspection.verified))
    print_lines(engine_facts(inspection), console)
    timed = [layer for layer in inspection.layers if layer.time_us is not None]
    if timed:
        slowest = sorted(timed, key=lambda layer: -(layer.time_us or 0.0))[:_SLOWEST]
        # A terminal of 80 has room for shorter titles.
        titles = ("layer", "type", "runs in", "writes", "MACs", "us")
        columns = [replace(one, title=title) for one, title in zip(ENGINE_LAYERS, titles, strict=True)]
        console.print(Table(f"the {len(slowest)} layers that take longest", columns, slowest).terminal(compact=True))
