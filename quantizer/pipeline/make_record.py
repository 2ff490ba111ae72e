"""The record of a job: all measurements as data for the reports, and the files of the reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantizer.algorithms.fallback import fallback_record
from quantizer.pipeline.benchmark import engine_file, with_deployed
from quantizer.pipeline.context import sizes_of
from quantizer.pipeline.job import Job
from quantizer.plan.histograms import noisiest
from quantizer.report import RunRecord, collect_machine, collect_versions, write_html, write_record
from quantizer.utils.records import Site

_HISTOGRAMS = 6


def record_of(job: Job) -> RunRecord:
    """Return the report record of a job after its last measurement."""
    config, backend = job.config, job.config.quantizer.backend
    built = {name: entry for name, entry in job.built.items() if "engine" not in job.refused or name != "engine"}
    latency = job.latencies[0] if job.latencies else None
    # load_converted loads the engines of an encoder-decoder model.
    load_float = "" if job.graphs.several else 'quantizer.load("FOLDER", float_engine=True)'
    engine = None
    if "engine" in built:
        engine = engine_file(backend, built["engine"], ran=latency is not None, scored=bool(job.scores))
    return RunRecord(
        name=f"{job.name} for {backend}" if job.converts else job.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        config=config.model_dump(mode="json"),
        model=job.work.info,
        fixed_sizes=(*job.fixed, *job.alone.values()),
        scores=job.scores,
        agreement=job.agreement,
        outputs=job.outputs,
        float_engine_db=job.float_engine_db,
        engine_refused=job.refused.get("engine"),
        float_engine_refused=job.refused.get("float"),
        latency=latency,
        other_latencies=job.latencies[1:],
        size=sizes_of(built) if "float" in built else (),
        memory=job.memory,
        training=None if job.training is None else job.training.record(job.context.task),
        choice=with_deployed(job.choice, latency, backend, "float" not in job.refused, load_float),
        engine=engine,
        inspection=job.inspection,
        versions=collect_versions(),
        machine=collect_machine(),
        **(_of_plan(job) if config.quantize else {}),
    )


def _of_plan(job: Job) -> Mapping[str, Any]:
    """Return the fields of the record about the plan: coverage, sensitivity and fallback."""
    quantizer, is_ranked = job.quantizer, job.config.amp is not None
    coverage, chosen = quantizer.coverage, quantizer.chosen_fallback
    values = {
        "coverage": site_records(coverage),
        "covered_share": coverage.share,
        "not_quantized": coverage.not_quantized.rows,
        "histograms": tuple(quantizer.histogram(name).data for name in noisiest(quantizer.plan, _HISTOGRAMS)),
        "sensitivity": quantizer.sensitivity.rows if is_ranked else (),
        "measure": quantizer.sensitivity.measure if is_ranked else None,
        "fallback": None
        if chosen is None
        else fallback_record(chosen, job.budget.asked, job.budget.checks, job.scores),
        "latency_fallback": job.latency_fallback.record(quantizer),
        "diff": quantizer.diff(job.model),
    }
    assert values.keys() <= {entry.name for entry in fields(RunRecord)}
    return values


def site_records(coverage: Iterable[Site]) -> tuple[Site, ...]:
    """Return the coverage without quiet sites."""
    return tuple(row for row in coverage if not row.quiet)


def write_reports(record: RunRecord, formats: Sequence[str], folder: Path) -> None:
    """Write the configured reports of a run, each atomically."""
    if "html" in formats:
        write_html(record, folder / "report.html")
    # Written last, so that its presence means that the others are complete.
    if "json" in formats:
        write_record(record, folder / "report.json")
