"""The content of the page as text and finished tables, which the template only arranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from quantizer.errors import MissingDependencyError
from quantizer.report.charts.axes import sensitivity_bars
from quantizer.report.charts.candidates_plot import candidates_svg
from quantizer.report.charts.frontier_plot import frontier_svg
from quantizer.report.charts.heat_map import sensitivity_heatmap
from quantizer.report.charts.histogram_plot import histogram_figure
from quantizer.report.charts.pareto_plot import pareto_svg
from quantizer.report.charts.training_plot import loss_svg, score_svg, training_caption
from quantizer.report.codec import is_from_python, mapping_from_record, shown_setting
from quantizer.report.page.glossary import GLOSSARY
from quantizer.report.page.page_tables import (
    cost_table,
    coverage_by_kind,
    coverage_by_reason,
    coverage_table,
    escaped_table,
    evaluations_table,
    outputs_table,
    ranges_table,
    score_table,
    sensitivity_table,
)
from quantizer.report.ratios import quantized_entry, reference_entry
from quantizer.report.record import Latency, MemoryEntry, RunRecord, Score, SizeEntry, Stage
from quantizer.report.run_records import OutputDistance, Site, worst_output
from quantizer.report.tables import text
from quantizer.report.tables.headline import covered_share, quantized_score, verdict
from quantizer.report.tables.layer_table import (
    engine_facts,
    engine_table,
    group_table,
    layer_table,
    layers_table,
    verified_words,
)
from quantizer.report.tables.summary import lines_of_causes, placement_lines
from quantizer.report.tables.tables import Column, choice_table, evaluation_caption, html_table, missing_lines
from quantizer.report.tables.text import error_words
from quantizer.report.verdict import THRESHOLDS, verdict_of

if TYPE_CHECKING:
    from markupsafe import Markup


_BARS = 10
_NAMES = {"memory_gib": "memory, GiB", "instructions": "INT8 instructions"}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure of the header."""

    title: str
    """Name of the figure."""
    value: str
    """The figure."""
    note: str
    """The values behind the figure."""
    measured: bool = True
    """Whether there is a figure."""


@dataclass(frozen=True, kw_only=True)
class DiffFile:
    """A file of a unified diff."""

    name: str
    """Name of the file."""
    added: int
    """Lines added."""
    removed: int
    """Lines removed."""
    lines: tuple[tuple[str, str], ...]
    """CSS class and text of each line."""


def view_from_record(record: RunRecord) -> dict[str, Any]:
    """Return the variables of the template."""
    config = mapping_from_record(record)["config"]
    return {
        "record": record,
        "created": record.created.replace("T", " "),
        "parameters": text.count(record.model.parameters),
        **_header(record),
        "tiles": tiles(record),
        "latency": text.typeset(_latency_note(record)),
        "score_table": _safe(score_table(record)),
        "outputs_table": _safe(outputs_table(record)),
        "cost_table": _safe(cost_table(record)),
        **_sites(record),
        "ranges_table": _safe(ranges_table(record.coverage)),
        "histograms": [_safe(histogram_figure(histogram, _by_output(record))) for histogram in record.histograms],
        "bars": _safe(sensitivity_bars(record.sensitivity, measure=record.measure, limit=_BARS)),
        "bars_shown": min(_BARS, len(record.sensitivity)),
        "error_words": error_words(record.measure).heading,
        "heat_map": _safe(sensitivity_heatmap(record.sensitivity, measure=record.measure)),
        "sensitivity_table": _safe(sensitivity_table(record.sensitivity, record.measure)),
        "evaluations_table": _safe(evaluations_table(record.fallback)),
        "put_back": text.counted(len(record.fallback.groups), "group") if record.fallback else "",
        "search": text.typeset(evaluation_caption(record.fallback)) if record.fallback else "",
        "pareto": _safe(pareto_svg(record.fallback) if record.fallback else ""),
        "training": text.typeset(training_caption(record.training)) if record.training else "",
        "loss_curve": _safe(loss_svg(record.training) if record.training else ""),
        "score_curve": _safe(score_svg(record.training) if record.training else ""),
        "engine_note": verified_words(record.inspection) if record.inspection else "",
        "engine_facts": engine_facts(record.inspection) if record.inspection else [],
        "engine_table": _safe(engine_table(record.inspection) if record.inspection else ""),
        "engine_layers_table": _safe(layers_table(record.inspection) if record.inspection else ""),
        "build_time": text.seconds(record.engine.build_seconds) if record.engine else None,
        "diff_files": diff_files(record.diff),
        "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100) if config else "",
        "versions_table": _safe(_pairs("Package", "Version", record.versions)),
        "machine_table": _safe(_pairs("Fact", "Value", record.machine)),
        "stages_table": _safe(_stages(record.stages)),
        "glossary": GLOSSARY,
    }


def _header(record: RunRecord) -> dict[str, Any]:
    """Return the variables of the verdict, of the choice of the engine and its placement, and of what costs most."""
    return {
        "judgement": _judgement(record),
        "thresholds": text.typeset(THRESHOLDS),
        "verdict": text.typeset(verdict(record)),
        "choice": text.typeset(record.choice.headline) if record.choice else "",
        "deploy": text.typeset(record.choice.deploy) if record.choice else "",
        "choice_table": _safe(choice_table(record.choice) if record.choice else ""),
        "choice_plot": _safe(candidates_svg(record.choice) if record.choice else ""),
        "choice_missing": missing_lines(record.choice) if record.choice else [],
        "slower": [one for one in record.placement.groups if one.slower] if record.placement else [],
        "from_python": is_from_python(record),
        "put_back_setting": shown_setting("fallback: {names: [...]}", python=is_from_python(record)),
        "placement": [text.typeset(line) for line in placement_lines(record.placement)] if record.placement else [],
        "frontier": _safe(frontier_svg(record.placement) if record.placement else ""),
        "causes": [text.typeset(line) for line in lines_of_causes(record)],
    }


def _judgement(record: RunRecord) -> tuple[str, str, str]:
    """Return the verdict as a CSS class, its level and its reasons."""
    found = verdict_of(record)
    return found.level.replace(" ", "-"), found.level, text.typeset("; ".join(found.reasons))


def _by_output(record: RunRecord) -> bool:
    """Return whether ranges were chosen by the output of the model."""
    activations = record.config.get("quantizer", {}).get("activations", {})
    return activations.get("calibrator") in ("auto", "output")


def _sites(record: RunRecord) -> dict[str, Any]:
    """Return the variables of the sections on layers and coverage."""
    ran, never = ([site for site in record.coverage if site.ran is wanted] for wanted in (True, False))
    return {
        "coverage_by_kind": _safe(coverage_by_kind(record.coverage)),
        "coverage_by_reason": _safe(coverage_by_reason(record.coverage)),
        "coverage_table": _safe(coverage_table(ran)),
        "sites_ran": text.counted(len(ran), "site"),
        "never_ran_table": _safe(coverage_table(never)),
        "sites_never_ran": text.counted(len(never), "site"),
        "escaped_table": _safe(escaped_table(record.escaped)),
        "layer_table": _safe(layer_table(record)),
        "group_table": _safe(group_table(record)),
    }


def tiles(record: RunRecord) -> tuple[Tile, ...]:
    """Return the figures of the header: speed, size, memory, score, coverage."""
    return (
        _speed_tile(record.latency),
        _size_tile(record.size),
        _memory_tile(record.memory),
        _score_tile(quantized_score(record.scores)) if record.scores else _output_tile(record.outputs),
        _coverage_tile(record.coverage, covered_share(record)),
    )


def _speed_tile(latency: Latency | None) -> Tile:
    entries = () if latency is None else latency.engines
    entry, float_entry = quantized_entry(entries), reference_entry(entries)
    if latency is None or entry is None or float_entry is None:
        return _tile("Speed-up", None)
    plain = latency.reference or "float"
    medians = f"{text.milliseconds(entry.median_ms)}, {plain} {text.milliseconds(float_entry.median_ms)}"
    return _tile("Speed-up", text.times(entry.ratio_to_float), medians)


def _size_tile(entries: Sequence[SizeEntry]) -> Tile:
    entry, float_entry = quantized_entry(entries), reference_entry(entries)
    if entry is None or float_entry is None:
        return _tile("Times smaller", None)
    sizes = f"{text.file_size(entry.bytes)}, float {text.file_size(float_entry.bytes)}"
    return _tile("Times smaller", text.times(entry.ratio), sizes)


def _memory_tile(entries: Sequence[MemoryEntry]) -> Tile:
    entry, float_entry = quantized_entry(entries), reference_entry(entries)
    if entry is None or float_entry is None:
        return _tile("Times less memory", None)
    peaks = f"peak {entry.peak_mib:,.0f} MiB, float {float_entry.peak_mib:,.0f} MiB"
    return _tile("Times less memory", text.times(entry.ratio), peaks)


def _output_tile(outputs: Sequence[OutputDistance]) -> Tile:
    worst = worst_output(outputs)
    if worst is None:
        return _tile("Score", None)
    found = "no difference" if worst.sqnr_db is None else f"{text.decibels(worst.sqnr_db)} dB"
    return _tile("Output beside float", found, f"cosine {worst.cosine:.4f}, not scored")


def _score_tile(score: Score | None) -> Tile:
    if score is None:
        return _tile("Score", None)
    if score.difference is None:
        return _tile(f"{score.metric}, {score.which}", text.score(score.value), "not compared with float")
    interval = f"95% interval {text.interval(score.interval)}" if score.interval else "no interval computed"
    return _tile(f"{score.metric} against float", text.signed(score.difference), interval)


def _coverage_tile(sites: Sequence[Site], share: float | None) -> Tile:
    sites = [site for site in sites if site.ran]
    if not sites:
        return _tile("Sites quantized", None)
    count = f"{sum(site.quantized for site in sites)} of {len(sites)}"
    if share is None:
        return _tile("Sites quantized", count, "multiply-adds not counted")
    return _tile("Work in low precision", text.percent(share), f"of the multiply-adds, in {count} sites")


def _tile(title: str, value: str | None, note: str = "") -> Tile:
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
    shape = text.shape(record.latency.batch, record.latency.sequence, " tokens")
    return f"batch {shape}, {text.counted(record.latency.threads, 'thread')}, engines interleaved"


def _pairs(left: str, right: str, values: Any) -> str:
    rows = [(_NAMES.get(name, name), None if value is None else str(value)) for name, value in values.items()]
    return html_table([left, Column(title=right)], rows, label=left, style=False) if rows else ""


def _stages(stages: Sequence[Stage]) -> str:
    if not stages:
        return ""
    named = [(f"{one.name}, in: {one.inside}" if one.inside else one.name, one.seconds) for one in stages]
    rows = [*named, ("all", sum(one.seconds for one in stages if one.inside is None))]
    return html_table(["Stage", Column(title="Time", show=text.seconds)], rows, label="Stages", style=False)


def _safe(markup: str) -> Markup:
    """Return markup of this package's tables and pictures, which have escaped all values, as safe for jinja2."""
    try:
        from markupsafe import Markup
    except ImportError as error:
        raise MissingDependencyError("jinja2", "report") from error
    return Markup(markup)
