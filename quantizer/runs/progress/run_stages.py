"""The stages of a run, told from its configuration before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizer.config import RunConfig
from quantizer.engines import runs_here
from quantizer.report import Stage
from quantizer.runs.budget.engine_budget import CHECK_BY_FUNCTION, CHECK_ON_ROWS
from quantizer.runs.progress.stage_timer import Outlook, earlier_stages

_WORK = ("model", "data", "amp", "fallback", "qat")
"""The sections that tell what a run does."""


def run_outlook(config: RunConfig, folder: Path, *, chooses: bool) -> Outlook:
    """Return the stages of a run into a folder, with the times of an earlier one of the same model and data."""
    return Outlook(list(run_stages(config, chooses=chooses)), earlier_run(config, folder, chooses=chooses))


def earlier_run(config: RunConfig, folder: Path, *, chooses: bool) -> list[Stage]:
    """Return the stages of the last run that did the same work; none if there is none. Arguments as of ``run_outlook``.

    It had the same model and rows, searched and trained the same, and chose its engine, too, or had the same backend.
    """
    wanted = config.model_dump(mode="json")

    def same(report: Mapping[str, Any]) -> bool:
        told, settings = report["config"], report["config"]["quantizer"]
        backend = chooses or settings["backend"] == config.quantizer.backend
        choice = (report["choice"] is not None) is chooses and backend
        same_preset = settings["preset"] == config.quantizer.preset
        return choice and same_preset and all(told[section] == wanted[section] for section in _WORK)

    return earlier_stages(folder, "report.json", same)


def run_stages(config: RunConfig, *, chooses: bool) -> Iterator[str]:
    """Yield the names of the stages, in order; arguments as of ``run_outlook``."""
    here = chooses or runs_here(config.quantizer.backend)
    fallback, function = config.fallback, config.model.task is None
    scored = config.model.metric is not None if function else config.data.evaluation is not None
    searches = fallback is not None and fallback.max_drop is not None
    yield "load model and data"
    if config.data.head is not None:
        yield "fit the head on float embeddings"
    if function and scored:
        yield "score the float"
    yield "calibrate"
    if chooses:
        yield "choose the engine"
    if here:
        yield "quantize"
    if here and not chooses:
        yield from ("export", "build the engines")
    if here:
        yield "time the groups"
    if config.amp is not None:
        yield "measure sensitivity"
    if searches:
        yield "search what goes back to float"
    if config.qat is not None:
        yield "train with rounded operands"
    yield "quantize"
    changed = fallback is not None or config.qat is not None
    if changed or not here:
        yield from ("export", "build the engines")
    yield "compare the outputs"
    if searches and here and config.qat is None:
        yield CHECK_BY_FUNCTION if function else CHECK_ON_ROWS
    if fallback is not None and fallback.min_speedup is not None and here:
        yield "time the engine against its goal"
    if scored:
        forms = ["proxy"] if config.qat is None else ["ptq", "qat"]
        yield from (f"score the {form}" for form in (*(() if chooses or function else ("float",)), *forms))
    yield "inspect the engine"
    if scored and here and (changed or not chooses):
        yield "score the engine"
    if here:
        yield "compare the float engine"
        yield "measure latency"
        yield "measure memory"
    if config.amp is not None and config.qat is None:
        yield "look for causes"
