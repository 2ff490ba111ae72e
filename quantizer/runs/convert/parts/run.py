"""``quantizer convert`` for a model in parts: one calibration over what it writes, an engine for each part.

The whole model is calibrated and quantized at once, and its parts are taken out of the frozen model: all of them have
the same scales. They are checked against PyTorch one by one, and together in what they write.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from quantizer.engines.candidates import Variant
from quantizer.files import said_complete
from quantizer.files import write_folder
from quantizer.qdq.signature import read_signature
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord
from quantizer.report import Score
from quantizer.report import collect_machine
from quantizer.report import collect_versions
from quantizer.report import print_record
from quantizer.report.candidate_record import Candidate
from quantizer.report.candidate_record import EngineChoice
from quantizer.report.tables.choice_table import print_choice
from quantizer.runs.choose_engine import FAILURES
from quantizer.runs.choose_engine import candidate_line
from quantizer.runs.choose_engine import choose
from quantizer.runs.choose_engine import failed
from quantizer.runs.convert.choose import PYTORCH
from quantizer.runs.convert.data import Samples
from quantizer.runs.convert.data import read_labelled
from quantizer.runs.convert.folder import CONFIG
from quantizer.runs.convert.folder import processor_folder
from quantizer.runs.convert.folder import write_json
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.parts.card import write_card
from quantizer.runs.convert.parts.limits import most_tokens
from quantizer.runs.convert.parts.limits import require_possible
from quantizer.runs.convert.parts.loaded import MODEL
from quantizer.runs.convert.parts.measure import agreements
from quantizer.runs.convert.parts.measure import part_latency
from quantizer.runs.convert.parts.measure import whole_latency
from quantizer.runs.convert.parts.part_batches import calibration_batches
from quantizer.runs.convert.parts.part_maker import PartMaker
from quantizer.runs.convert.parts.part_maker import PartsMade
from quantizer.runs.convert.parts.record import parts_record
from quantizer.runs.convert.parts.result import PartResult
from quantizer.runs.convert.parts.result import PartsResult
from quantizer.runs.convert.parts.result import WholeLatency
from quantizer.runs.convert.parts.result import parts_config
from quantizer.runs.convert.parts.summary import print_parts
from quantizer.runs.convert.record import write_report
from quantizer.runs.convert.request import CONVERSION
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.convert.result import quantization_facts
from quantizer.runs.preflight import check_rows
from quantizer.runs.preflight import require_tools
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.run_context import load_context
from quantizer.runs.run_context import resume_files
from quantizer.runs.scoring import Scoring
from quantizer.tasks import save_processor
from quantizer.tasks.seq2seq.writer import Writer

__all__ = ["convert_parts"]

_RESAMPLES = 1000
_COMPARED = 32
"""Samples whose texts are compared with those of the float model."""


def convert_parts(
    asked: ConversionRequest, facts: ConversionInputs, data: Samples | None, folder: Path, console: Console
) -> Path:
    """Carry out the conversion of a model in parts, and return the folder that was written.

    Args:
        asked: the request.
        facts: what it means for the checkpoint.
        data: the calibration data; None: the float model is converted.
        folder: the folder, which is complete or absent.
        console: where stages and results are printed.

    Raises:
        QuantizerError: a stage failed; nothing was written.
    """
    require_possible(asked, facts)
    made: list[_Run] = []

    def fill(target: Path) -> None:
        made.append(_Run(asked, facts, data, target, console))
        made[0].run()

    write_folder(folder, fill, kind=CONVERSION, replace=asked.force)
    with said_complete(folder):
        done = made[0]
        if done.choice is not None and not done.records:
            print_choice(done.choice, console)
        for result in done.results:
            print_parts(facts, result, folder, console)
            if (record := done.records.get(result.backend)) is not None:
                print_record(record, folder / result.backend, console)
    return folder


class _Run:
    """One conversion in progress; ``target`` is filled in the place of the folder until it is complete."""

    def __init__(
        self, asked: ConversionRequest, facts: ConversionInputs, data: Samples | None, target: Path, console: Console
    ) -> None:
        self.asked = asked
        self.facts = facts
        self.target = target
        self.choice: EngineChoice | None = None
        self.results: list[PartsResult] = []
        self.records: dict[str, RunRecord] = {}
        self.calibrated: Quantizer | None = None
        self.stage = stage = StageTimer(console)
        with stage("load the model"), resume_files(target, searches=False, trains=False) as kept:
            sizes = facts.sequence
            lengths = {} if sizes is None else {"min_length": sizes[0], "max_length": sizes[2]}
            self.context = load_context(
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
        self.task = self.context.task
        self.model: Any = self.context.model
        self.tokens = most_tokens(asked, self.model.config)
        evaluation = read_labelled(asked.evaluation, "--evaluation")
        check_rows(self.task, evaluation, [] if data is None else data.rows)
        self.calibration, held_out = ([], []) if data is None else data.of(self.task)
        self.samples = (held_out or self.calibration)[:_COMPARED]
        self.writer = Writer(self.model, self.tokens)
        self.scoring = Scoring(replace(self.context, model=self.writer), evaluation, _RESAMPLES)

    def run(self) -> None:
        """Carry out all stages, in order."""
        with tempfile.TemporaryDirectory(dir=self.target) as scratch:
            maker = PartMaker(self.asked, self.facts, self.context, self.samples, self.tokens, Path(scratch))
            require_tools({name: maker.options(maker.variant(name)) for name in self.asked.backends}, html=False)
            if self.asked.quantization:
                self._quantizer(self.asked.backends[0])
            if self.asked.chooses:
                self._choose(maker)
            else:
                for name in self.asked.backends:
                    self._each(maker, name)
        document = {
            "model": asdict(self.facts),
            "choice": None if self.choice is None else asdict(self.choice),
            "backends": [asdict(result) for result in self.results],
            "stages": [asdict(stage) for stage in self.stage.done],
            "versions": collect_versions(),
            "machine": collect_machine(),
        }
        write_json(self.target / "conversion.json", document)

    def _quantizer(self, name: str) -> Quantizer:
        """Return the quantizer for a backend; all are from one calibration, on what the model itself writes."""
        if self.calibrated is None:
            self.calibrated = self._calibrate()
        is_it = self.calibrated.config.backend == name
        return self.calibrated if is_it else self.calibrated.for_backend(name)

    def _calibrate(self) -> Quantizer:
        quantizer = Quantizer(self.asked.settings(self.asked.backends[0]))
        with self.stage("write what calibrates"):
            batches = calibration_batches(self.model, self.task.sample_batches(self.calibration), self.tokens)
        with self.stage("calibrate"):
            told = f"on {len(self.calibration)} {self.task.reads}s and what is written for them"
            self.stage.tell(f"{told}, for {self.asked.backends[0]}")
            quantizer.calibrate(self.model, batches)
            quantizer.save(self.target / "quantizer")
        return quantizer

    def _each(self, maker: PartMaker, name: str) -> None:
        """Make the engines of one backend, in a folder of its own."""
        low = maker.variant(name)
        made = self._made(maker, low)
        plain = None if low.dtype is None else self._made(maker, replace(low, dtype=None))
        with self.stage("measure latency"):
            models = {} if plain is None else {"float engine": plain.model}
            whole = whole_latency(maker, {PYTORCH: self.model, **models, "engine": made.model})
        self._deliver(maker, made, plain, whole)

    def _made(self, maker: PartMaker, variant: Variant) -> PartsMade:
        return maker.made(variant, None if variant.dtype is None else self._quantizer(variant.backend))

    def _choose(self, maker: PartMaker) -> None:
        """Make the engines of all candidates, and deliver those that write the fastest."""
        made: dict[str, PartsMade] = {}
        records: dict[str, Candidate] = {}
        variants = [one for one in self.asked.variants if not one.dynamic]
        with self.stage("choose the engine"):
            for variant in variants:
                record, before = Candidate(backend=variant.backend, format=variant.format), len(self.stage.done)
                try:
                    made[variant.name] = one = self._made(maker, variant)
                except FAILURES as error:
                    record = failed(record, error)
                else:
                    far = [check.float_db for check in one.checks if check.float_db is not None]
                    record = replace(record, sqnr_db=min(far, default=None))
                records[variant.name] = record
                seconds = sum(stage.seconds for stage in self.stage.done[before:])
                self.stage.tell(candidate_line(record, [one.name for one in variants], seconds))
        with self.stage("measure latency"):
            whole = whole_latency(maker, {PYTORCH: self.model, **{name: one.model for name, one in made.items()}})
        for name in made:
            records[name] = replace(records[name], milliseconds=(whole.latency.milliseconds[name],))
        self.choice = choose(list(records.values()), [f"{whole.latency}, {whole.tokens} new"], self.asked.missing)
        best = made[self.choice.candidates[0].name]
        floats = [one for one in self.choice.candidates if one.is_float and one.backend == best.variant.backend]
        plain = None if best.quantized is None or not floats else made.get(floats[0].name)
        names = {PYTORCH: PYTORCH} | ({} if plain is None else {plain.variant.name: "float engine"})
        names[best.variant.name] = "engine"
        self._deliver(maker, best, plain, replace(whole, latency=whole.latency.named(names)))

    def _deliver(self, maker: PartMaker, made: PartsMade, plain: PartsMade | None, whole: WholeLatency) -> None:
        """Compare and score the engines of a backend, and write its folder."""
        folder = self.target / made.variant.backend
        (folder / MODEL).mkdir(parents=True)
        with self.stage("measure the parts"):
            latency = {name: part_latency(maker, name, made, plain) for name in made.parts}
        forms: dict[str, Any] = {} if made.quantized is None else {"proxy": made.quantized}
        forms["engine"] = made.model
        with self.stage("compare what is written"):
            batches = self.task.sample_batches(self.samples) or [maker.checked_on[0].read]
            agreement = agreements(self.task, forms, batches, self.tokens, self.model)
        scores = self.scoring.scores({name: Writer(model, self.tokens) for name, model in forms.items()})
        for name, part in made.parts.items():
            for file in part.onnx.parent.glob(f"{part.onnx.name}*"):
                shutil.copy2(file, folder / MODEL / file.name)
            part.built.path.replace(folder / f"{name}.engine")
        for told in (self.model.config, self.model.generation_config):
            told.save_pretrained(folder / MODEL)
        save_processor(self.context.processor, self.model.config, folder / processor_folder(self.facts.task))
        result = PartsResult(
            backend=made.variant.backend,
            inference_precision=made.variant.precision,
            quantization=self._facts(made, scores),
            tolerance=str(maker.tolerance(made.variant)),
            tokens=self.tokens,
            chosen_on=None if self.choice is None else self.choice.instructions,
            parts=tuple(
                PartResult(
                    name=name,
                    signature=read_signature(part.onnx),
                    onnx_bytes=part.onnx.stat().st_size,
                    engine_bytes=part.built.size_bytes,
                    build_seconds=part.built.seconds,
                    checks=part.checks,
                    latency=latency[name],
                )
                for name, part in made.parts.items()
            ),
            steps=made.steps,
            agreement=agreement,
            whole=whole,
            scores=scores,
        )
        write_json(folder / CONFIG, parts_config(self.facts, result))
        write_card(self.facts, result, None if self.asked.evaluation is None else str(self.asked.evaluation), folder)
        self.results.append(result)
        if made.quantized is not None:
            record = parts_record(
                maker,
                made,
                plain,
                result,
                self._quantizer(made.variant.backend),
                folder=folder,
                choice=self.choice,
            )
            write_report(record, folder)
            self.records[result.backend] = record

    def _facts(self, made: PartsMade, scores: tuple[Score, ...]) -> Any:
        if made.quantized is None:
            return None
        quantizer = self._quantizer(made.variant.backend)
        return quantization_facts(quantizer, (), scores, str(self.asked.calibration), len(self.calibration))
