"""``quantizer convert`` for a model in parts, which becomes several engines."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from quantizer.engines.candidates import Variant
from quantizer.files import said_complete, write_folder
from quantizer.quantizer import Quantizer
from quantizer.report import collect_machine, collect_versions, print_record
from quantizer.report.terminal import print_choice
from quantizer.runs.convert.data import Samples, read_labelled
from quantizer.runs.convert.folder import write_json
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.parts.course import PartsCourse, PartsDone, PartsWork
from quantizer.runs.convert.parts.limits import most_tokens, require_possible
from quantizer.runs.convert.parts.request import PartsRequest
from quantizer.runs.convert.parts.summary import print_parts
from quantizer.runs.convert.record import conversion_config, write_report
from quantizer.runs.convert.request import CONVERSION, ConversionRequest
from quantizer.runs.preflight import check_rows
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.run_context import load_context, resume_files


def convert_parts(
    asked: ConversionRequest, facts: ConversionInputs, data: Samples | None, folder: Path, console: Console
) -> Path:
    """Carry out the conversion of a model in parts, and return the folder that was written."""
    require_possible(asked, facts)
    made: list[PartsDone] = []

    def fill(target: Path) -> None:
        stage = StageTimer(console)
        work = _loaded(asked, facts, data, target, stage)
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            course = PartsCourse(_request(asked, facts), facts, work, target, lambda name: target / name, Path(scratch))
            made.append(course.run())
        done = made[0]
        for name, record in done.records.items():
            write_report(record, target / name)
        document = {
            "model": asdict(facts),
            "choice": None if done.choice is None else asdict(done.choice),
            "backends": [asdict(result) for result in done.results],
            "stages": [asdict(one) for one in stage.done],
            "versions": collect_versions(),
            "machine": collect_machine(),
        }
        write_json(target / "conversion.json", document)

    write_folder(folder, fill, kind=CONVERSION, replace=asked.force)
    with said_complete(folder):
        done = made[0]
        if done.choice is not None and not done.records:
            print_choice(done.choice, console)
        for result in done.results:
            print_parts(facts, result, folder / result.backend, console)
            if (record := done.records.get(result.backend)) is not None:
                print_record(record, folder / result.backend, console)
    return folder


def _request(asked: ConversionRequest, facts: ConversionInputs) -> PartsRequest:
    def described(variant: Variant, quantizer: Quantizer) -> dict[str, Any]:
        return conversion_config(asked, facts, variant.precision, quantizer)

    return PartsRequest(
        backends=asked.backends,
        variants=asked.variants if asked.chooses else (),
        missing=asked.missing,
        dtype=(asked.dtype or "int8") if asked.quantization else None,
        settings=asked.settings,
        described=described,
        calibration=str(asked.calibration),
        evaluation=None if asked.evaluation is None else str(asked.evaluation),
        inference_precision=asked.inference_precision,
        capability=asked.compute_capability,
        tolerance=asked.tolerance,
        threads=asked.threads,
        serves=True,
    )


def _loaded(
    asked: ConversionRequest, facts: ConversionInputs, data: Samples | None, target: Path, stage: StageTimer
) -> PartsWork:
    """Return the model of a conversion with its data, checked before the model first runs."""
    sizes = facts.sequence
    lengths = {} if sizes is None else {"min_length": sizes[0], "max_length": sizes[2]}
    with stage("load the model"), resume_files(target, searches=False, trains=False) as kept:
        context = load_context(
            stage,
            kept,
            target,
            asked.model,
            facts.task,
            # Each backend's ONNX files and engines hold the decoder twice.
            copies=3 * len(asked.backends) / (2 if asked.quantization else 1),
            needed_for="what is written for this model",
            sizes={**lengths, "batch_size": facts.batch[1], "seconds": facts.seconds},
        )
    tokens = most_tokens(asked.new_tokens, context.model.config, "--new-tokens")
    evaluation = read_labelled(asked.evaluation, "--evaluation")
    check_rows(context.task, evaluation, [] if data is None else data.rows)
    calibration, held_out = ([], []) if data is None else data.of(context.task)
    return PartsWork(context=context, calibration=calibration, held_out=held_out, evaluation=evaluation, tokens=tokens)
