"""The report of a conversion: the record that ``quantizer run`` writes, made of what a conversion measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantizer.common.records import Score
from quantizer.engines import Inspection
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, collect_machine, collect_versions, write_html, write_record
from quantizer.report.record import EngineChoice, Latency, OutputDistance, latency_entries, size_entries
from quantizer.runs.convert.engine_maker import EngineMaker, Made
from quantizer.runs.convert.folder import ENGINE
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.measure import engine_file
from quantizer.runs.plan_records import placement_record, site_records
from quantizer.sensitivity.fallback import fallback_record


def conversion_record(
    maker: EngineMaker,
    made: Made,
    *,
    outputs: tuple[OutputDistance, ...],
    inspection: Inspection,
    latency: Sequence[ShapeLatency],
    scores: tuple[Score, ...],
    choice: EngineChoice | None,
) -> RunRecord:
    """Return the record of one quantized engine.

    Args:
        maker: what made it.
        made: the engine, with its proxy and its quantizer.
        outputs: how far its outputs are from those of the float model.
        inspection: the precisions of its layers.
        latency: the latency at each shape; empty: it does not run here. The record has that at the usual one.
        scores: the scores of the float model, the proxy and the engine.
        choice: what else was tried; None: the backend was asked for.
    """
    asked, facts, context, quantizer = maker.asked, maker.facts, maker.context, made.quantizer
    assert quantizer is not None
    coverage, chosen = quantizer.coverage, quantizer.chosen_fallback
    plain = maker.known_plain_engine(made.variant)
    return RunRecord(
        name=f"{facts.name} for {made.variant.backend}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        config=conversion_config(asked, facts, made.variant.precision, quantizer),
        model=context.info(facts.source, facts.task),
        scores=scores,
        outputs=outputs,
        fixed=() if made.sizes is None else (made.sizes,),
        latency=_latency(latency[min(facts.usual, len(latency) - 1)], asked.threads) if latency else None,
        size=() if plain is None else size_entries({"float": plain.built.size_bytes, "engine": made.built.size_bytes}),
        coverage=site_records(coverage),
        covered_share=coverage.share,
        escaped=coverage.escaped.rows,
        fallback=None if chosen is None else fallback_record(chosen, asked.max_drop, made.budget, scores),
        choice=choice,
        placement=None if made.prices is None else placement_record(made.prices, (), chosen),
        engine=engine_file(
            made.variant.backend,
            replace(made.built, path=Path(ENGINE)),
            ran=made.engine is not None,
            scored=bool(scores),
        ),
        inspection=inspection,
        diff=quantizer.diff(context.model),
        versions=collect_versions(),
        machine=collect_machine(),
        stages=tuple(context.timer.done),
    )


def conversion_config(
    asked: ConversionRequest, facts: ConversionInputs, precision: str | None, quantizer: Quantizer
) -> dict[str, Any]:
    """Return what was asked for, by the names that the configuration of a run has for it."""
    data = {"calibration": asked.calibration, "tuning": asked.tuning, "evaluation": asked.evaluation}
    return {
        "model": {"source": facts.source, "task": facts.task},
        "data": {name: None if source is None else {"path": str(source)} for name, source in data.items()},
        "quantizer": quantizer.config.model_dump(mode="json"),
        "engine": {"threads": asked.threads, "inference_precision": precision},
    }


def _latency(shape: ShapeLatency, threads: int) -> Latency:
    """Return the latency of the engine and of the float engine; if this one failed, of the float model in PyTorch."""
    *_, plain, low = shape.milliseconds
    times = shape.named({plain: "float", low: "engine"}).times_ms
    entries = latency_entries(times)
    return Latency(batch=shape.batch, sequence=shape.sequence, threads=threads, reference=plain, engines=entries)


def write_report(record: RunRecord, folder: Path) -> None:
    """Write report.json into the folder of an engine, and report.html where the package for it is installed."""
    write_record(record, folder / "report.json")
    if find_spec("jinja2") is not None:
        write_html(record, folder / "report.html")
