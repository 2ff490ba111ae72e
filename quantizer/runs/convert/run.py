"""The command ``quantizer convert``: from a checkpoint to ONNX files and engines, checked against PyTorch and timed.

The output folder is complete or absent: it is filled under a temporary name and renamed at the end.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from torch import nn

from quantizer.engines import Engine
from quantizer.engines.candidates import Variant
from quantizer.files import require_writable
from quantizer.files import said_complete
from quantizer.files import write_folder
from quantizer.qdq.signature import read_signature
from quantizer.quantizer import Quantizer
from quantizer.report import collect_machine
from quantizer.report import collect_versions
from quantizer.report.candidate_record import EngineChoice
from quantizer.report.tables.choice_table import print_choice
from quantizer.runs.convert.card import write_card
from quantizer.runs.convert.choose import PYTORCH
from quantizer.runs.convert.choose import Chooser
from quantizer.runs.convert.data import Samples
from quantizer.runs.convert.data import read_calibration
from quantizer.runs.convert.data import read_labelled
from quantizer.runs.convert.engine_maker import EngineMaker
from quantizer.runs.convert.engine_maker import Made
from quantizer.runs.convert.folder import CONFIG
from quantizer.runs.convert.folder import ENGINE
from quantizer.runs.convert.folder import ONNX
from quantizer.runs.convert.folder import processor_folder
from quantizer.runs.convert.folder import write_json
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.inputs import conversion_inputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.convert.measure import measure_latency
from quantizer.runs.convert.request import CONVERSION
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.convert.result import BackendResult
from quantizer.runs.convert.result import backend_config
from quantizer.runs.convert.result import quantization_facts
from quantizer.runs.convert.stages import conversion_outlook
from quantizer.runs.convert.summary import print_result
from quantizer.runs.convert.summary import print_summary
from quantizer.runs.preflight import check_rows
from quantizer.runs.preflight import require_tools
from quantizer.runs.preflight.faults import Faults
from quantizer.runs.preflight.packages import check_packages
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.run_context import ResumeFiles
from quantizer.runs.run_context import load_context
from quantizer.runs.run_context import resume_files
from quantizer.runs.scoring import Scoring
from quantizer.targets import profile

__all__ = ["convert"]

_RESAMPLES = 1000


def convert(asked: ConversionRequest, console: Console) -> Path:
    """Carry out a conversion, and return the folder that was written.

    Args:
        console: where stages and results are printed.

    Raises:
        QuantizerError: a stage failed; nothing was written.
    """
    folder = asked.output.absolute()
    data, facts = _ready(asked, folder)
    made: list[tuple[EngineChoice | None, list[BackendResult]]] = []
    with resume_files(folder, searches=asked.max_drop is not None, trains=False) as kept:
        write_folder(
            folder,
            lambda target: made.append(_Run(asked, facts, data, target, kept, console, folder).run()),
            kind=CONVERSION,
            replace=asked.force,
        )
    with said_complete(folder):
        choice, results = made[0]
        if choice is not None:
            print_choice(choice, console)
        print_summary(facts, results, folder, console)
    return folder


def _ready(asked: ConversionRequest, folder: Path) -> tuple[Samples | None, ConversionInputs]:
    """Check all that a conversion needs besides the loaded model; return its calibration data and its inputs.

    Raises:
        QuantizerError: something is missing or wrong; all of it is listed.
    """
    faults = Faults()
    check_packages(faults, asked.task)
    source = asked.calibration
    data = None if source is None else faults.of(lambda: read_calibration(source, asked.rows, asked.column))
    for labelled, option in ((asked.tuning, "--tuning"), (asked.evaluation, "--evaluation")):
        faults.of(partial(read_labelled, labelled, option))
    facts = faults.of(lambda: conversion_inputs(asked, folder.name))
    faults.of(lambda: require_writable(folder))
    faults.raise_all("the conversion cannot start")
    assert facts is not None
    return data, facts


class _Run:
    """One conversion into ``folder`` in progress; ``target`` is filled in its place until it is complete."""

    def __init__(
        self,
        asked: ConversionRequest,
        facts: ConversionInputs,
        data: Samples | None,
        target: Path,
        kept: ResumeFiles,
        console: Console,
        folder: Path,
    ) -> None:
        self.asked = asked
        self.facts = facts
        self.target = target
        self.console = console
        self.stage = StageTimer(console, conversion_outlook(asked, facts, folder))
        self.tuning = read_labelled(asked.tuning, "--tuning")
        self.evaluation = read_labelled(asked.evaluation, "--evaluation")
        with self.stage("load the model"):
            sizes = facts.sequence
            lengths = {} if sizes is None else {"min_length": sizes[0], "max_length": sizes[2]}
            self.context = load_context(
                self.stage,
                kept,
                target,
                asked.model,
                facts.task,
                # An ONNX file and an engine for each backend, in which integers take a quarter.
                copies=len(asked.backends) / (2 if asked.quantization else 1),
                needed_for="what is written for this model",
                sizes={"batch_size": facts.batch[1], **lengths},
            )
        self.model, self.task = self.context.model, self.context.task
        # Errors that would otherwise come after minutes of calibration.
        maker = EngineMaker(asked, facts, self.context, [], [], self.tuning, target)
        maker.budget(asked.backends[0]).warn("--max-drop")
        require_tools({name: maker.options(maker.variant(name)) for name in asked.backends}, html=False)
        check_rows(self.task, [*self.tuning, *self.evaluation], [] if data is None else data.rows)
        self.calibration, held_out = ([], []) if data is None else data.of(self.task)
        self.batches = self.task.sample_batches(self.calibration)
        self.check_batches = [self.task.inputs.filled(held_out or self.calibration, *shape) for shape in facts.shapes]
        self.scoring = Scoring(self.context, self.evaluation, _RESAMPLES)
        self.calibrated: Quantizer | None = None

    def run(self) -> tuple[EngineChoice | None, list[BackendResult]]:
        """Carry out all stages, in order; return the choice, if one was to be made, and what is delivered."""
        choice = None
        # In the folder itself, so that after a kill both are removed together.
        with tempfile.TemporaryDirectory(dir=self.target) as scratch:
            maker = EngineMaker(
                self.asked, self.facts, self.context, self.batches, self.check_batches, self.tuning, Path(scratch)
            )
            if self.asked.chooses:
                choice, results = self._chosen(maker)
            else:
                results = [self._each(name, maker) for name in self.asked.backends]
        document = {
            "model": asdict(self.facts),
            "choice": None if choice is None else asdict(choice),
            "backends": [asdict(result) for result in results],
            "stages": [asdict(stage) for stage in self.stage.done],
            "versions": collect_versions(),
            "machine": collect_machine(),
        }
        write_json(self.target / "conversion.json", document)
        return choice, results

    def _quantizer(self, name: str, ranges: str | None = None) -> Quantizer:
        """Return the quantizer for a backend; all are from one calibration, with the first that is asked for.

        Args:
            name: the backend.
            ranges: ``dynamic`` for ranges that are taken at run time.
        """
        if self.calibrated is None:
            self.calibrated = Quantizer(backend=name, dtype=self.asked.dtype or "int8")
            with self.stage("calibrate"):
                self.stage.tell(f"on {len(self.calibration)} {self.task.reads}s, for {name}")
                self.calibrated.calibrate(self.model, self.batches)
                self.calibrated.save(self.target / "quantizer")
        if self.calibrated.config.backend == name and ranges is None:
            return self.calibrated
        other = self.calibrated.for_backend(name, ranges=ranges)
        # What went back for one engine is another one's to choose.
        other.clear_fallback()
        return other

    def _quantizer_of(self, variant: Variant) -> Quantizer:
        return self._quantizer(variant.backend, "dynamic" if variant.dynamic else None)

    def _each(self, name: str, maker: EngineMaker) -> BackendResult:
        """Return the results of one backend, in a folder of its own."""
        quantizer = self._quantizer(name) if self.asked.quantization else None
        folder, variant = self.target / name, maker.variant(name)
        folder.mkdir()
        self.console.print(f"[bold]{name}[/bold]")
        if quantizer is None:
            made = maker.float_engine(variant, folder / ONNX, folder / ENGINE)
        else:
            made = maker.quantized(variant, quantizer, folder)
        latency: tuple[ShapeLatency, ...] = ()
        if made.engine is not None:
            models: dict[str, nn.Module | Engine] = {PYTORCH: self.model}
            if made.quantized is not None:
                plain = maker.plain_engine(variant).engine
                assert plain is not None
                models["float engine"] = plain
            models["engine"] = made.engine
            with self.stage("measure latency"):
                latency = tuple(measure_latency(models, batch, self.asked.threads) for batch in self.check_batches)
        return self._result(maker, made, folder, latency)

    def _chosen(self, maker: EngineMaker) -> tuple[EngineChoice, list[BackendResult]]:
        """Make the engines of all candidates, in float and quantized, and keep the fastest that is right."""
        if self.asked.quantization:
            # What is wrong with the data is no fault of a candidate.
            self._quantizer(self.asked.backends[0])
        chooser = Chooser(maker, self.scoring, self._quantizer_of)
        chosen = chooser.choose()
        kept, folder = chosen.made, self.target / chosen.made.variant.backend
        chooser.deliver(kept, folder)
        result = self._result(maker, kept, folder, chosen.latency, chosen.choice.instructions)
        if kept.quantizer is not None:
            # As it was calibrated, before any group was put back.
            kept.quantizer.clear_fallback()
            kept.quantizer.save(self.target / "quantizer")
        return chosen.choice, [result]

    def _result(
        self,
        maker: EngineMaker,
        made: Made,
        folder: Path,
        latency: tuple[ShapeLatency, ...],
        chosen_on: str | None = None,
    ) -> BackendResult:
        """Return what is delivered for a backend, after writing the rest of its folder."""
        name, facts = made.variant.backend, None
        forms: dict[str, nn.Module | Engine] = {} if made.quantized is None else {"proxy": made.quantized}
        scores = () if made.engine is None else self.scoring.scores({**forms, "engine": made.engine})
        if made.quantizer is not None:
            source, rows = str(self.asked.calibration), len(self.calibration)
            facts = quantization_facts(made.quantizer, made.budget, scores, source, rows)
        self.context.processor.save_pretrained(folder / processor_folder(self.facts.task))
        result = BackendResult(
            backend=name,
            float_dtype=profile(name).float_dtype,
            compute_capability=maker.capability(name),
            inference_precision=made.variant.precision,
            quantization=facts,
            signature=read_signature(folder / ONNX),
            onnx_bytes=(folder / ONNX).stat().st_size,
            engine_bytes=made.built.size_bytes,
            build_seconds=made.built.seconds,
            chosen_on=chosen_on,
            not_verified=None if made.checks else "not verified: built ahead of time, and there is no GPU here",
            tolerance=str(maker.tolerance(made.variant)),
            checks=made.checks,
            latency=latency,
            scores=scores,
        )
        write_json(folder / CONFIG, backend_config(self.facts, result))
        write_card(self.facts, result, None if self.asked.evaluation is None else str(self.asked.evaluation), folder)
        print_result(result, self.console)
        return result
