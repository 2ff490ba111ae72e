"""``quantizer run`` for a model in parts: what a configuration says, as a request for its engines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantizer.common.distributed import get_world_size
from quantizer.config import QuantizerConfig, RunConfig, dump_yaml
from quantizer.engines.candidates import Variant, cpu_candidates
from quantizer.errors import ConfigError
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, write_html, write_record
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.parts.course import PartsCourse, PartsWork
from quantizer.runs.convert.parts.limits import most_tokens
from quantizer.runs.convert.parts.request import PartsRequest
from quantizer.runs.convert.parts.summary import print_parts
from quantizer.runs.pick_backend import with_backend
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.ranks.variants import variants_of
from quantizer.runs.run_context import ResumeFiles
from quantizer.runs.run_course import QUANTIZER
from quantizer.runs.workload.workload import Load
from quantizer.runs.written_sizes import is_in_parts


def require_possible_run(config: RunConfig) -> None:
    """Raise if a run asks for something that its model in parts cannot have, or for what other models do not have."""
    problems = list(_problems(config) if is_in_parts(config) else _problems_of_one(config))
    if problems:
        raise ConfigError(problems)


def _problems_of_one(config: RunConfig) -> Iterator[str]:
    if config.model.new_tokens is not None:
        got = config.model.new_tokens
        yield f"model.new_tokens: got {got}, and task {config.model.task!r} writes no text; remove it"


def _problems(config: RunConfig) -> Iterator[str]:
    of = f"task {config.model.task!r} is of a model in several parts"
    for name in ("amp", "fallback", "qat"):
        if getattr(config, name) is not None:
            yield f"{name}: {of}, for which nothing is put back to float and nothing is trained; remove it"
    if config.engine.strip_weights:
        yield f"engine.strip_weights: {of}, whose engines hold their weights; remove it"
    if get_world_size() > 1:
        yield f"{of}, which one process quantizes: start it without torchrun"


def run_parts(
    config: RunConfig,
    among: Sequence[str] | None,
    name: str,
    target: Path,
    kept: ResumeFiles,
    timer: StageTimer,
    load: Load,
) -> RunRecord:
    """Carry out the stages of a run, and return its record; the folder has the engine of each part."""
    with timer("load model and data"):
        work = load(timer, kept, target)
    config = work.fit(config)
    work.check()
    task, source, sizes = work.context.task, config.model.source, config.export.dynamic
    facts = ConversionInputs(
        name=name,
        source=source,
        task=task.name,
        labels=(),
        batch=_around(sizes.batch, config.report.latency_batch),
        sequence=_around(sizes.sequence, config.report.latency_sequence) if task.reads == "text" else None,
        seconds=config.model.seconds,
    )
    parts_work = PartsWork(
        context=work.context,
        calibration=task.samples(work.rows.calibration),
        held_out=task.samples(work.rows.evaluation),
        evaluation=work.rows.evaluation,
        tokens=most_tokens(config.model.new_tokens, work.context.model.config, "model.new_tokens: got"),
    )
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        asked, place = _request(config, among), Path(scratch)
        course = PartsCourse(asked, facts, parts_work, target, lambda _: target, place, scores=target)
        done = course.run()
        (result,) = done.results
        # As in any run: the one that the engines are of, and not that of the first backend.
        course.quantizer(result.backend).save(target / QUANTIZER)
    record = replace(done.records[result.backend], name=name)
    (target / "config.yaml").write_text(dump_yaml(RunConfig.model_validate(record.config)), encoding="utf-8")
    if "html" in config.report.formats:
        write_html(record, target / "report.html")
    if "json" in config.report.formats:
        write_record(record, target / "report.json")
    print_parts(facts, result, target, timer.console)
    return record


def _around(sizes: tuple[int, int, int], timed: int) -> tuple[int, int, int]:
    """Return the least, the timed and the largest size."""
    return sizes[0], timed, sizes[2]


def _request(config: RunConfig, among: Sequence[str] | None) -> PartsRequest:
    variants = () if among is None else variants_of(config, among)
    backends = [one.backend for one in variants] or [config.quantizer.backend]

    def settings(backend: str) -> QuantizerConfig:
        return with_backend(config, backend).quantizer

    def described(variant: Variant, quantizer: Quantizer) -> dict[str, Any]:
        told = {"inference_precision": variant.precision, "compiled": variant.compiled}
        engine = config.engine.model_copy(update=told)
        return config.model_copy(update={"engine": engine, "quantizer": quantizer.config}).model_dump(mode="json")

    assert config.data.calibration is not None
    evaluation = config.data.evaluation
    return PartsRequest(
        backends=list(dict.fromkeys(backends)),
        variants=variants,
        missing=() if among is None else cpu_candidates(among)[1],
        needs_quantized=True,
        dtype=config.quantizer.dtype,
        settings=settings,
        described=described,
        calibration=config.data.calibration.path or config.data.calibration.name,
        evaluation=None if evaluation is None else evaluation.path or evaluation.name,
        inference_precision=config.engine.inference_precision,
        compiled=config.engine.compiled,
        capability=config.engine.compute_capability,
        opset=config.export.opset,
        threads=config.engine.threads,
        resamples=config.report.bootstrap,
    )
