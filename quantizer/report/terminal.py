"""The summary of a run in a terminal, printed at its end and by ``quantizer show``; its page has the same sentences."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from quantizer.errors import QuantizerError
from quantizer.plan.reasons import counted
from quantizer.report import text
from quantizer.report.record import (
    EngineChoice,
    Form,
    LatencyFallback,
    RunRecord,
    is_from_python,
    read_record,
    shown_setting,
)
from quantizer.report.tables import ENGINE_LAYERS, Table, choice_table, latency_table, precision_name, shares_table
from quantizer.report.text import noise_sentence, print_labelled, print_lines
from quantizer.report.verdict import LOOK, NOT, USABLE, lacks_diagnosis, loses_accuracy, verdict_of
from quantizer.utils.records import BudgetOutcome, Diagnosis, FallbackRecord, Fix, Inspection, Score, Site

_STYLES = {USABLE: "green", LOOK: "yellow", NOT: "red"}
"""Styles of verdicts."""
_SLOWEST = 10
_WIDE = 1000
"""Columns in which the widest table fits."""
_LEAST = 0.01
"""Smaller shares are omitted from a line."""


def print_choice(choice: EngineChoice, console: Console) -> None:
    """Print the chosen engine, and all candidates in a table."""
    print_lines([choice.headline], console, first="", style="bold")
    legend = "shortest latency in ms, engines interleaved; SQNR of the outputs against the float model"
    scored = any(candidate.score_difference is not None for candidate in choice.candidates)
    legend += "; score difference: score minus float score" if scored else ""
    print_lines([legend], console, first="")
    table = choice_table(choice, page=False).terminal(titled=False, compact=True)
    table.columns[0].no_wrap = True
    console.print(table)
    names_of: dict[str, list[str]] = {}
    for candidate in choice.candidates:
        if candidate.verdict != text.short_verdict(candidate.verdict):
            names_of.setdefault(candidate.verdict, []).append(candidate.name)
    for verdict, names in names_of.items():
        # Not wrapped: a reason may hold a path.
        console.print(Text(f"{', '.join(names)}: {verdict}"), soft_wrap=True)
    print_lines(missing_lines(choice), console, first="")


def missing_lines(choice: EngineChoice) -> list[str]:
    """Return a sentence for each candidate without an installed library."""
    reason = ", because it is not installed" if choice.gpu is None else ""
    return [f"not tried{reason}: {missing}" for missing in choice.missing]


def budget_line(outcome: BudgetOutcome) -> str:
    """Return the outcome of a budget in a line: the verdict first, then the measured drops."""
    words = [f"{outcome.verdict}: max_drop {outcome.max_drop:g}"]
    if outcome.evaluation_drop is not None:
        low, high = outcome.interval or (None, None)
        span = "" if low is None or high is None else f" (95% interval {text.drop(low)} to {text.drop(high)})"
        words.append(f"drop of the {outcome.form} on the evaluation samples {text.drop(outcome.evaluation_drop)}{span}")
    words.append(f"drop of the plan on the tuning samples {text.drop(outcome.tuning_drop)}")
    return "; ".join(words)


def evaluation_caption(fallback: FallbackRecord) -> str:
    """Return the budget and the result of the search in a line."""
    words = [text.counted(len(fallback.evaluations), "evaluation")]
    if fallback.float_score is not None:
        words.append(f"the float model scores {text.plain(fallback.float_score)}")
    if fallback.max_drop is not None:
        words.append(f"a drop of {fallback.max_drop:g} is allowed")
    chosen = next((entry for entry in fallback.evaluations if entry.chosen), None)
    if chosen is not None:
        words.append(
            f"with {text.counted(len(chosen.groups), 'group')} kept in float it scores {text.plain(chosen.score)}"
        )
    else:
        words.append(f"all groups are kept in float, {len(fallback.groups)}")
    words += [
        ("" if entry.samples is None else f"on {text.counted(entry.samples, 'sample')} that the search did not see, ")
        + f"the engine with {text.counted(entry.groups, 'group')} kept in float drops by {text.error(entry.drop)}"
        for entry in fallback.checks
    ]
    if fallback.outcome is not None:
        words.append(budget_line(fallback.outcome))
    if fallback.checks and fallback.max_drop is not None and fallback.checks[-1].drop > fallback.max_drop:
        words.append("the engine does not meet the budget; this is the best plan that was found")
    return "; ".join(words)


def latency_fallback_lines(latency_fallback: LatencyFallback) -> list[str]:
    """Return sentences on the measured times, the predicted latency of the plan, and the speed goal."""
    low, plain, predicted = (
        text.milliseconds(value)
        for value in (latency_fallback.low_ms, latency_fallback.float_ms, latency_fallback.predicted_ms)
    )
    lines = [f"measured with {latency_fallback.conditions}: {low} with all groups in low precision, {plain} in float"]
    slower = sum(group.slower_reason is not None for group in latency_fallback.groups)
    if slower:
        lines.append(f"{text.counted(slower, 'group')} fell back to float because low precision is slower there")
    if latency_fallback.float_groups:
        groups = text.counted(latency_fallback.float_groups, "group")
        lines.append(f"predicted latency with {groups} in float: {predicted}")
    if latency_fallback.min_speedup is not None and latency_fallback.speedup is not None:
        met = "reached" if latency_fallback.speedup >= latency_fallback.min_speedup else "not reached"
        goal, result = text.times(latency_fallback.min_speedup), text.times(latency_fallback.speedup)
        lines.append(f"the goal of {goal} the speed of float (min_speedup) is {met}: the engine has {result}")
    return lines


def diagnosis_lines_of(record: RunRecord, form: Form | None = None) -> list[str]:
    """Return the lines on the groups that cost most accuracy; fixes are included if the run loses too much.

    ``form`` is that of the fixes; None: YAML. It is always Python for a run from Python.
    """
    fixes, form = loses_accuracy(record), "python" if is_from_python(record) else form or "yaml"
    lines = diagnosis_lines(record.diagnoses, record.latency_fallback, form=form, fixes=fixes)
    if record.diagnosis_error is not None:
        lines.append(
            f"the diagnosis failed, so the groups that cost most accuracy are unknown: {record.diagnosis_error}"
        )
    return lines


def diagnosis_command(record: RunRecord, folder: Path | str | None, form: Form | None = None) -> str:
    """Return how to diagnose a run: a command for its folder, or the call for a run from Python."""
    if not is_from_python(record):
        return f"quantizer diagnose {'FOLDER' if folder is None else shlex.quote(str(folder))}"
    return "quantizer convert ... --diagnose --force" if form == "options" else "result.diagnose()"


def diagnosis_lines(
    diagnoses: Sequence[Diagnosis],
    latency_fallback: LatencyFallback | None = None,
    *,
    form: Form = "yaml",
    fixes: bool = True,
) -> list[str]:
    """Return a numbered line for each group that costs most accuracy; a fix of several groups is given once."""
    lines: list[str] = []
    number_of: dict[str, int] = {}
    for number, diagnosis in enumerate(diagnoses, start=1):
        sqnr = f"output SQNR {text.decibels(diagnosis.sqnr_db)} dB if only it is quantized"
        parts = [f"{number}. {diagnosis.group}: {sqnr}", *(diagnosis.findings or ["no cause found"]), *diagnosis.notes]
        if fixes and diagnosis.fix is not None:
            known = number_of.setdefault(diagnosis.fix.setting, number)
            fix = _fix(diagnosis.fix, diagnosis.group, latency_fallback, form)
            parts.append(fix if known == number else f"fix: as in line {known}")
        elif fixes and diagnosis.findings:
            parts.append("no setting that was tried improves it")
        lines.append("; ".join(parts))
    return lines


def _fix(fix: Fix, group: str, latency_fallback: LatencyFallback | None, form: Form) -> str:
    in_float = math.isinf(fix.gain_alone_db)
    setting = shown_setting(fix.setting, form)
    cost = _cost(group, latency_fallback) if in_float else ", no latency cost"
    return f"fix: {'keep it in float, ' if in_float else ''}{setting}, output SQNR {fix.gain_db:+.1f} dB{cost}"


def _cost(group: str, latency_fallback: LatencyFallback | None) -> str:
    """Return the latency cost of keeping a group in float, in words; empty if unknown."""
    times = [time for time in latency_fallback.groups if time.group == group] if latency_fallback else []
    if not times:
        return ""
    cost = times[0].float_us - times[0].low_us
    if cost <= 0:
        # Groups that are faster in float by more than noise are already in float.
        return ", latency cost within noise"
    return f", latency cost {cost:.0f} us per batch"


def print_summary(folder: Path | str, console: Console) -> None:
    """Print the table of the run in ``folder``."""
    folder = Path(folder)
    print_record(read_record(folder / "report.json"), folder, console)


def print_record(record: RunRecord, folder: Path | str | None, console: Console, *, form: Form | None = None) -> None:
    """Print the choice of the engine, then the verdict, the table of results, and the facts of the run.

    ``form`` is that of the fixes, as in ``diagnosis_lines_of``; ``options`` for a conversion.
    """
    if record.choice is not None:
        print_choice(record.choice, console)
    if record.latency_fallback is not None and (
        record.latency_fallback.float_groups or record.latency_fallback.min_speedup is not None
    ):
        print_lines(latency_fallback_lines(record.latency_fallback), console, first="")
    _print_verdict(record, folder, console, form)
    heading = record.name if record.latency is None else f"{record.name}; speed relative to {record.latency.reference}"
    print_lines([heading], console, first="")
    table = _table(record)
    if console.measure(table, options=console.options.update(max_width=_WIDE)).maximum > console.width:
        table = _table(record, narrow=True)
    console.print(table)
    if noise := noise_sentence(record.latency):
        print_lines([noise], console, first="")
    if record.other_latencies:
        console.print(latency_table(record).terminal(titled=False, compact=True))
    _print_facts(record, console)
    if folder is None:
        print_labelled("saved", 'not yet: result.save("FOLDER") writes engines, report and quantizer', console)
    else:
        _print_paths(record, Path(folder), console)
    if record.choice is not None and record.choice.deploy:
        print_labelled("deploy", record.choice.deploy, console)
    if folder is not None and is_from_python(record):
        print_labelled("load", f"quantizer.load({json.dumps(str(folder))}) returns a function like the model", console)


def print_diagnosis(record: RunRecord, folder: Path, console: Console) -> None:
    """Print the groups of a run that cost most accuracy, with all fixes, and the path of its report."""
    lines = diagnosis_lines(record.diagnoses, record.latency_fallback)
    print_lines(lines or ["no quantized group costs accuracy"], console, first="", rest="   ")
    _print_report(folder, console)


def print_layers(folder: Path | str, console: Console) -> None:
    """Print the precisions of the engine of a run, and its slowest layers."""
    record = read_record(Path(folder) / "report.json")
    if record.inspection is None:
        raise QuantizerError(f"{folder}: the run built no engine, so there are no layers to show")
    print_inspection(record.inspection, console)


def unquantized_words(coverage: Sequence[Site]) -> str | None:
    """Return how many sites are not quantized, with the most frequent reason; None if all are quantized."""
    sites = [site for site in coverage if site.ran]
    reasons = counted(site.reason for site in sites if not site.quantized)
    if not reasons:
        return None
    total = sum(number for _, number in reasons)
    reason, number = reasons[0]
    cause = "" if number == total else f"; main reason ({text.counted(number, 'site')})"
    return f"{total} of {len(sites)} sites {'is' if total == 1 else 'are'} not quantized{cause}: {reason}"


def _print_verdict(record: RunRecord, folder: Path | str | None, console: Console, form: Form | None) -> None:
    """Print the verdict with its reason, the other findings, and the diagnosis, or its command, if accuracy is lost."""
    verdict = verdict_of(record)
    print_labelled("verdict", str(verdict), console, style=_STYLES[verdict.level])
    for finding in verdict.reasons[1:]:
        print_labelled("", finding, console)
    if loses_accuracy(record) or record.diagnosis_error is not None:
        print_lines(diagnosis_lines_of(record, form), console, first="", rest="   ")
    if lacks_diagnosis(record):
        print_labelled("causes", diagnosis_command(record, folder, form), console, wrap=False)


def _print_facts(record: RunRecord, console: Console) -> None:
    """Print one line each on sizes, budget, fallback, texts and the engine."""
    for sentence in record.fixed_sizes:
        print_labelled("sizes", sentence, console)
    if record.coverage and (sites := unquantized_words(record.coverage)) is not None:
        print_labelled("sites", sites, console)
    if record.fallback is not None and record.fallback.outcome is not None:
        print_labelled("budget", budget_line(record.fallback.outcome), console)
    if record.fallback is not None and record.fallback.groups:
        number = text.counted(len(record.fallback.groups), "group")
        print_labelled("float", f"{number} kept in float: {text.listed(record.fallback.groups)}", console)
    for agreement in record.agreement:
        tokens, texts = text.percent(agreement.tokens), text.percent(agreement.texts)
        words = f"{tokens} of tokens and {texts} of {agreement.samples} texts equal those of the float model"
        print_labelled("texts", f"{agreement.form}: {words}", console)
    if record.inspection is not None:
        style = None if record.inspection.verified else "yellow"
        print_labelled("runs", shares_line(record.inspection), console, style=style)


def _print_paths(record: RunRecord, folder: Path, console: Console) -> None:
    """Print the paths of engine and report, and the commands that show layers and coverage."""
    if record.inspection is not None:
        print_labelled("layers", f"quantizer show {folder} --layers", console, wrap=False)
    if any(not site.quantized for site in record.coverage):
        print_labelled("reasons", f"quantizer show {folder} --coverage", console, wrap=False)
    missing = "not built" if record.engine_refused is None else "refused, see the verdict"
    engine = missing if record.engine is None else str(folder / record.engine.path)
    print_labelled("engine", engine, console, wrap=False)
    _print_report(folder, console)


def _print_report(folder: Path, console: Console) -> None:
    page = folder / "report.html"
    print_labelled("report", str(page if page.exists() else folder / "report.json"), console, wrap=False)


def _table(record: RunRecord, *, narrow: bool = False) -> RichTable:
    """Return score (or worst output), speed and size of each form of the model; ``narrow``: a size has two lines."""
    # Without empty lines around it, so that the result fits ten lines or so of a terminal.
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    scores = {entry.form: entry for entry in record.scores}
    titles = (record.scores[0].metric, "difference", "95% interval") if scores else ("SQNR", "cosine")
    for title in ("", *titles, "speed", "size"):
        table.add_column(Text(title), justify="right" if title else "left", no_wrap=not title)
    for name in dict.fromkeys(["float", *scores, "engine"]):
        entry = scores.get(name)
        cells = _score_cells(entry) if scores else _output_cells(None if name == "float" else record)
        style = "bold" if entry is not None and entry is record.score else None
        speed, size = _costs(record, name)
        table.add_row(*map(Text, [name, *cells, speed, size.replace(" (", "\n(") if narrow else size]), style=style)
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
    shown_size = None if size is None else text.file_size(size.bytes) if at else text.size_words(size.bytes, size.ratio)
    return [speed or "not measured", shown_size or "not measured"]


def verified_words(inspection: Inspection) -> str:
    """Return whether the engine was observed, with how or why not: ``verified: seen in a run ...``."""
    return f"{'verified' if inspection.verified else 'not verified'}: {inspection.note}"


def engine_facts(inspection: Inspection) -> list[str]:
    """Return facts besides the shares: attention, conversions, float outputs, and reasons."""
    lines = []
    if inspection.attention_fused or inspection.attention_apart:
        apart = f", {inspection.attention_apart} not fused" if inspection.attention_apart else ""
        lines.append(f"attention: {inspection.attention_fused} fused{apart}")
    lines.append(
        f"conversion layers: {inspection.quantizers} quantize or dequantize, {inspection.casts} cast, "
        f"{inspection.reformats} reformat"
    )
    if inspection.verified:
        lines.append(f"MatMul/Conv/Gemm layers in low precision with float outputs: {inspection.float_outputs}")
    if inspection.uncounted:
        lines.append(f"MatMul/Conv/Gemm layers with unknown multiply-adds, not in the shares: {inspection.uncounted}")
    return [*lines, *inspection.reasons]


def shares_line(inspection: Inspection) -> str:
    """Return the shares of each precision in multiply-adds and time, and whether they were observed, in a line."""
    lines = []
    for share in inspection.shares:
        parts = [("of multiply-adds", share.multiply_add_share), ("of the time", share.time_share)]
        shown = [f"{text.percent(value)} {unit}" for unit, value in parts if value is not None and value >= _LEAST]
        if shown:
            # No precision of data: integers such as token numbers and shapes.
            name = "integers of indices" if share.precision == "index" else precision_name(share.precision)
            lines.append(f"{name} {' and '.join(shown)}")
    return "; ".join([*lines, verified_words(inspection)])


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print whether the engine was observed, the shares, the facts, and the slowest layers."""
    style = "bold" if inspection.verified else "bold yellow"
    print_lines([verified_words(inspection)], console, first="", style=style)
    if not inspection.shares:
        return
    shares = shares_table(inspection)
    # Headings of several lines fit a terminal of 60 columns.
    titles = (
        "precision",
        "layers",
        "share of\nlayers",
        "MatMul/\nConv/\nGemm",
        "share of\nmultiply-\nadds",
        "share of\ntime",
    )
    columns = [replace(column, title=title) for column, title in zip(shares.columns, titles, strict=True)]
    shares = replace(shares, title="precision in the ONNX file", columns=columns)
    console.print(shares.terminal(titled=not inspection.verified, compact=True))
    print_lines(engine_facts(inspection), console)
    timed = [layer for layer in inspection.layers if layer.time_us is not None]
    if timed:
        slowest = sorted(timed, key=lambda layer: -(layer.time_us or 0.0))[:_SLOWEST]
        # Headings of two lines fit a terminal of 80 columns.
        titles = ("layer", "type", "computes\nin", "writes", "multiply-\nadds", "time\nus")
        columns = [replace(column, title=title) for column, title in zip(ENGINE_LAYERS, titles, strict=True)]
        console.print(Table(f"the {len(slowest)} slowest layers", columns, slowest).terminal(compact=True))
