"""The HTML page of a run, and the glossary.

``python -m quantizer.report.page > docs/glossary.md`` writes the glossary as a page. A report contains its style and a
small script that sorts and filters tables. A content security policy admits this script by its hash and forbids
everything else, including the network.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from quantizer.errors import MissingDependencyError
from quantizer.report import text
from quantizer.report.charts.axes import histogram_figure
from quantizer.report.charts.plots import (
    candidates_svg,
    frontier_svg,
    loss_svg,
    pareto_svg,
    score_svg,
    training_caption,
)
from quantizer.report.charts.rankings import sensitivity_bars, sensitivity_heatmap
from quantizer.report.record import (
    RunRecord,
    form_of,
    is_from_python,
    mapping_from_record,
    shown_setting,
    write_text_atomic,
)
from quantizer.report.tables import (
    ENGINE_LAYERS,
    Table,
    choice_table,
    cost_table,
    evaluations_table,
    facts_table,
    kinds_table,
    latency_table,
    outputs_table,
    products_table,
    ranges_table,
    reasons_table,
    score_table,
    searched_groups,
    sensitivity_table,
    shares_table,
    sites_table,
    stages_table,
    tables_of_layers,
)
from quantizer.report.terminal import (
    diagnosis_command,
    diagnosis_lines_of,
    engine_facts,
    evaluation_caption,
    latency_fallback_lines,
    missing_lines,
    verified_words,
)
from quantizer.report.text import error_words
from quantizer.report.verdict import THRESHOLDS, covered_share, lacks_diagnosis, loses_accuracy, verdict, verdict_of

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup


GLOSSARY = {
    "amax": "The largest magnitude of a range. Larger values are clipped to it. For symmetric INT8, the "
    "scale is amax / 127.",
    "backend": "An inference library with a kind of processor, such as `openvino` or `tensorrt-rtx`.",
    "calibrator": "The method that estimates a range from calibration data: `max`, `percentile`, `mse` or `entropy`.",
    "coverage": "The share of all multiply-adds of the model that run in low precision. A count of sites says less, "
    "because a residual add is one site with few multiply-adds.",
    "engine": "The file that a backend builds from the ONNX file and runs.",
    "fallback": "Part of the model is kept in floating point, to save accuracy or latency.",
    "frozen": "With fixed ranges and integer weights. `quantize()` returns a frozen model.",
    "operand": "One input of an operation: a weight or an activation. Each operand has a range.",
    "precision group": "Sites that are quantized or kept in floating point together, because they share an input "
    "or an output.",
    "proxy": "A copy of your model that shares its weights and simulates the quantized operations. The model itself is "
    "not changed.",
    "Q/DQ": "QuantizeLinear and DequantizeLinear, the ONNX operators that mark quantized tensors. Engines replace "
    "them by integer kernels.",
    "sensitivity": "The increase of the output's error, or the drop of the score, if one precision group is quantized.",
    "site": "One operation of the model that can be quantized: a linear layer, a convolution, a MatMul or a residual "
    "add.",
    "SQNR": "Signal-to-quantization-noise ratio in dB. At 20 dB, the error is a tenth of the output; at 40 dB, a "
    "hundredth.",
    "zero point": "The quantized value that stands for 0. A symmetric range does not need one.",
}
"""Terms with their meaning, in alphabetical order."""

_UNUSUAL = ("amax", "frozen", "operand", "precision group", "proxy", "Q/DQ", "site", "SQNR", "zero point")
"""Terms that error messages explain."""


def words_in(message: str) -> dict[str, str]:
    """Return the terms of a message that need an explanation, with their sentences, in alphabetical order.

    A term counts as a whole word, also in the plural; quoted terms and parts of dotted names are names.
    """
    return {
        term: GLOSSARY[term]
        for term in _UNUSUAL
        if re.search(rf"(?<![\w.'\"`/-]){re.escape(term)}s?(?![\w'\"`/(=:-]|\.\w)", message)
    }


def glossary_page() -> str:
    """Return the text of ``docs/glossary.md``."""
    lines = [
        "# Glossary",
        "",
        "<!-- made by  python -m quantizer.report.page > docs/glossary.md -->",
        "",
        "Terms of the reports, pages and messages. Each report ends with this list.",
        "",
        "| term | meaning |",
        "|---|---|",
        *(f"| {term} | {sentence} |" for term, sentence in GLOSSARY.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(glossary_page())


_FOLDER = Path(__file__).parent / "templates"


def html_from_record(record: RunRecord) -> str:
    """Return the whole page."""
    return render("template.html", view_from_record(record))


def render(template: str, view: Mapping[str, Any]) -> str:
    """Return a page from a template of ``templates/``, the common style and script, and variables."""
    style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("report.css", "tables.js"))
    return _environment().get_template(template).render(style=style, script=script, **view)


def write_html(record: RunRecord, path: Path | str) -> Path:
    """Write the page to ``path`` atomically."""
    return write_text_atomic(path, html_from_record(record))


def require_html() -> None:
    """Raise ``MissingDependencyError`` unless the library for the page is installed."""
    _environment()


def _environment() -> jinja2.Environment:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("jinja2", "report") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["csp_hash"] = _csp_hash
    return environment


def _csp_hash(script: str) -> str:
    """Return the source expression of a content security policy that admits exactly ``script``."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


_BARS = 10


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure of the header, with the values behind it."""

    title: str
    value: str
    note: str
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class DiffFile:
    """A file of a unified diff: its numbers of changes, and the CSS class and text of each line."""

    name: str
    added: int
    removed: int
    lines: tuple[tuple[str, str], ...]


def view_from_record(record: RunRecord) -> dict[str, Any]:
    """Return the variables of the template."""
    config = mapping_from_record(record)["config"]
    ranges = [(site.name, operand) for site in record.coverage for operand in site.operands]
    return {
        "record": record,
        "created": record.created.replace("T", " "),
        "parameters": text.count(record.model.parameters),
        **_header(record),
        "tiles": tiles(record),
        "latency": text.typeset(_latency_note(record)),
        "score_table": _table(score_table(record)),
        "outputs_table": _table(outputs_table(record)),
        "cost_table": _table(cost_table(record)),
        "latency_table": _table(latency_table(record) if record.other_latencies else None),
        **_sites(record),
        "ranges_table": _table(ranges_table(ranges, page=True)),
        "histograms": [_safe(histogram_figure(histogram, _by_output(record))) for histogram in record.histograms],
        "sensitivity_title": _sensitivity_title(record),
        "bars": _safe(sensitivity_bars(record.sensitivity, measure=record.measure, limit=_BARS)),
        "bars_shown": min(_BARS, len(record.sensitivity)),
        "error_words": error_words(record.measure).heading,
        "heat_map": _safe(sensitivity_heatmap(record.sensitivity, measure=record.measure)),
        "sensitivity_table": _table(sensitivity_table(record.sensitivity, record.measure, page=True)),
        "evaluations_table": _evaluations(record),
        "float_groups": text.counted(len(record.fallback.groups), "group") if record.fallback else "",
        "search": text.typeset(evaluation_caption(record.fallback)) if record.fallback else "",
        "pareto": _safe(pareto_svg(record.fallback) if record.fallback else ""),
        "training": text.typeset(training_caption(record.training)) if record.training else "",
        "loss_curve": _safe(loss_svg(record.training) if record.training else ""),
        "score_curve": _safe(score_svg(record.training) if record.training else ""),
        "engine_note": verified_words(record.inspection) if record.inspection else "",
        "engine_facts": engine_facts(record.inspection) if record.inspection else [],
        "engine_table": _table(shares_table(record.inspection) if record.inspection else None),
        "engine_layers_table": _table(
            Table("Layers of the engine", ENGINE_LAYERS, record.inspection.layers) if record.inspection else None
        ),
        "build_time": text.seconds(record.engine.build_seconds) if record.engine else None,
        "diff_files": diff_files(record.diff),
        "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100) if config else "",
        "versions_table": _table(facts_table("Package", "Version", record.versions)),
        "machine_table": _table(facts_table("Fact", "Value", record.machine)),
        "stages_table": _table(stages_table(record.stages)),
        "glossary": GLOSSARY,
    }


def _header(record: RunRecord) -> dict[str, Any]:
    """Return the variables of the verdict, the choice of the engine, the latency fallback, and the diagnosis."""
    return {
        "judgement": _judgement(record),
        "thresholds": text.typeset(THRESHOLDS),
        "verdict": text.typeset(verdict(record)),
        "choice": text.typeset(record.choice.headline) if record.choice else "",
        "deploy": text.typeset(record.choice.deploy) if record.choice else "",
        "choice_table": _table(choice_table(record.choice, page=True) if record.choice else None),
        "choice_plot": _safe(candidates_svg(record.choice) if record.choice else ""),
        "choice_missing": missing_lines(record.choice) if record.choice else [],
        "slower": [group for group in record.latency_fallback.groups if group.slower_reason]
        if record.latency_fallback
        else [],
        "from_python": is_from_python(record),
        "fallback_setting": shown_setting("fallback: {names: [...]}", form_of(record)),
        "latency_fallback": [text.typeset(line) for line in latency_fallback_lines(record.latency_fallback)]
        if record.latency_fallback
        else [],
        "frontier": _safe(frontier_svg(record.latency_fallback) if record.latency_fallback else ""),
        "diagnoses": [text.typeset(line) for line in diagnosis_lines_of(record)],
        "needs_fix": loses_accuracy(record),
        "diagnose": diagnosis_command(record, None) if lacks_diagnosis(record) else "",
    }


def _judgement(record: RunRecord) -> tuple[str, str, str, list[str]]:
    """Return the CSS class and level of the verdict, its reason, and the other findings."""
    judged = verdict_of(record)
    reason, *findings = map(text.typeset, judged.reasons)
    return judged.level.replace(" ", "-"), judged.level, reason, findings


def _sensitivity_title(record: RunRecord) -> str:
    """Return the title of the section on sensitivity and fallback; empty if it has nothing to show."""
    if record.sensitivity or record.diagnoses or record.diagnosis_error is not None:
        return "Sensitivity"
    return "" if record.fallback is None else "Kept in float"


def _by_output(record: RunRecord) -> bool:
    """Return whether ranges were chosen by the output of the model."""
    activations = record.config.get("quantizer", {}).get("activations", {})
    return activations.get("calibrator") in ("auto", "output")


def _sites(record: RunRecord) -> dict[str, Any]:
    """Return the variables of the sections on layers and coverage."""
    layers, groups = tables_of_layers(record)
    ran, never = ([site for site in record.coverage if site.ran is has_run] for has_run in (True, False))
    return {
        "coverage_by_kind": _table(kinds_table(record.coverage)),
        "coverage_by_reason": _table(reasons_table(record.coverage)),
        "coverage_table": _table(sites_table(ran)),
        "sites_ran": text.counted(len(ran), "site"),
        "never_ran_table": _table(sites_table(never)),
        "sites_never_ran": text.counted(len(never), "site"),
        "unquantized_table": _table(products_table(record.not_quantized, page=True)),
        "layer_table": _table(layers),
        "group_table": _table(groups),
    }


def tiles(record: RunRecord) -> tuple[Tile, ...]:
    """Return the figures of the header: speed, size, memory if measured, score, coverage."""
    speed, size, memory = _tile("Speed-up"), _tile("Size"), []
    if record.speeds is not None and record.latency is not None:
        fast, slow = (text.milliseconds(entry.median_ms) for entry in record.speeds)
        ratio = text.times(record.speeds[0].ratio_to_float)
        speed = _tile("Speed-up", ratio, f"{fast}, {record.latency.reference} {slow}")
    if record.sizes is not None:
        small, large = (text.file_size(entry.bytes) for entry in record.sizes)
        size = _tile("Size", text.compared(record.sizes[0].ratio, "smaller", "larger"), f"{small}, float {large}")
    if record.peaks is not None:
        low, high = (f"{entry.peak_mib:,.0f} MiB" for entry in record.peaks)
        ratio = text.compared(record.peaks[0].ratio, "lower", "higher")
        memory = [_tile("Peak memory", ratio, f"{low}, float {high}")]
    return speed, size, *memory, _accuracy_tile(record), _coverage_tile(record)


def _accuracy_tile(record: RunRecord) -> Tile:
    score, worst = record.score, record.worst_output
    if score is not None and score.difference is not None:
        interval = f"95% interval {text.interval(score.interval)}" if score.interval else "no interval computed"
        return _tile(f"{score.metric} against float", text.signed(score.difference), interval)
    if score is not None:
        return _tile(f"{score.metric} of the {score.form}", text.score(score.value), "float was not scored")
    if record.scores or worst is None:
        return _tile("Score")
    sqnr = "no difference" if worst.sqnr_db is None else f"{text.decibels(worst.sqnr_db)} dB"
    return _tile("Output SQNR", sqnr, f"cosine {worst.cosine:.4f}, not scored")


def _coverage_tile(record: RunRecord) -> Tile:
    sites, share = [site for site in record.coverage if site.ran], covered_share(record)
    if not sites:
        return _tile("Sites quantized")
    count = f"{sum(site.quantized for site in sites)} of {len(sites)}"
    if share is None:
        return _tile("Sites quantized", count, "multiply-adds not counted")
    return _tile("Multiply-adds in low precision", text.percent(share), f"in {count} sites")


def _tile(title: str, value: str | None = None, note: str = "") -> Tile:
    if value is None:
        return Tile(title=title, value=text.MISSING, note="not measured", measured=False)
    return Tile(title=title, value=text.typeset(value), note=text.typeset(note))


def diff_files(diff: str) -> tuple[DiffFile, ...]:
    """Return a unified diff, split by file; text before the first ``---`` becomes a file named ``diff``."""
    blocks: list[list[str]] = []
    lines = diff.splitlines()
    for index, line in enumerate(lines):
        starts = line.startswith("--- ") and index + 1 < len(lines) and lines[index + 1].startswith("+++ ")
        if starts or not blocks:
            blocks.append([])
        blocks[-1].append(line)
    return tuple(_diff_file(block) for block in blocks)


def _diff_file(block: Sequence[str]) -> DiffFile:
    named = block[0].startswith("--- ")
    body = block[2:] if named else block
    return DiffFile(
        name=block[1][4:].split("\t")[0].strip() if named else "diff",
        added=sum(line.startswith("+") for line in body),
        removed=sum(line.startswith("-") for line in body),
        lines=tuple((_line_class(line), line) for line in body),
    )


def _line_class(line: str) -> str:
    return {"+": "add", "-": "del", "@": "hunk"}.get(line[:1], "same")


def _latency_note(record: RunRecord) -> str:
    if record.latency is None:
        return ""
    shape = text.timed_shape(record)
    return f"batch {shape}, {text.counted(record.latency.threads, 'thread')}, engines interleaved"


def _table(table: Table | None) -> Markup:
    """Return a table; empty without rows."""
    return _safe(table.html(breaks=True) if table is not None and table.rows else "")


def _evaluations(record: RunRecord) -> Markup:
    if record.fallback is None:
        return _table(None)
    table = evaluations_table(record.fallback)
    return _table(replace(table, columns=[*table.columns, searched_groups()]))


def _safe(markup: str) -> Markup:
    """Return HTML of this package, in which all values are escaped, as safe for jinja2."""
    try:
        from markupsafe import Markup
    except ImportError as error:
        raise MissingDependencyError("jinja2", "report") from error
    return Markup(markup)
