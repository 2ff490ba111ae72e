"""The stages that make the engines of a model in parts: one calibration over what it writes, an engine for each part.

The whole model is calibrated and quantized at once, and its parts are taken out of the frozen model: all of them have
the same scales. They are checked against PyTorch one by one, and together in what they write.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantizer.engines.candidates import Variant
from quantizer.qdq.structure import read_signature
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, Score
from quantizer.report.record import Candidate, EngineChoice
from quantizer.runs.choose_engine import FAILURES, candidate_line, choose, failed, quantized_of, timed
from quantizer.runs.convert.choose import PYTORCH
from quantizer.runs.convert.folder import CONFIG, processor_folder, write_json
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.convert.parts.card import write_card
from quantizer.runs.convert.parts.loaded import MODEL
from quantizer.runs.convert.parts.measure import agreements, part_latency, whole_latency, write_once
from quantizer.runs.convert.parts.part_batches import calibration_batches
from quantizer.runs.convert.parts.part_maker import PartMaker, PartsMade
from quantizer.runs.convert.parts.record import parts_record
from quantizer.runs.convert.parts.request import PartsRequest
from quantizer.runs.convert.parts.result import Agreement, PartResult, PartsResult, WholeLatency, parts_config
from quantizer.runs.convert.parts.served import serve_parts
from quantizer.runs.convert.result import quantization_facts
from quantizer.runs.measure import NOT_VERIFIED
from quantizer.runs.outputs.compare_outputs import far_from_float
from quantizer.runs.preflight import require_tools
from quantizer.runs.run_context import RunContext
from quantizer.runs.run_course import QUANTIZER
from quantizer.runs.run_engines import nearest_form
from quantizer.runs.scoring import Scoring
from quantizer.tasks import Row, Sample, save_processor
from quantizer.tasks.seq2seq.writer import Writer

_COMPARED = 32
"""Samples whose texts are compared with those of the float model."""


@dataclass(frozen=True, kw_only=True)
class PartsWork:
    """The loaded model and its data.

    Attributes:
        context: the float model and its task.
        calibration: the samples to calibrate on.
        held_out: others, to which nothing is fitted.
        evaluation: labelled rows, on which all is scored.
        tokens: the most tokens that are written for a row.
    """

    context: RunContext
    calibration: Sequence[Sample]
    held_out: Sequence[Sample]
    evaluation: list[Row]
    tokens: int


@dataclass
class PartsDone:
    """The results.

    Attributes:
        choice: what was tried; None: backends were asked for.
        results: what is delivered, by backend.
        records: the reports of the quantized engines, by backend; none of them is written yet.
    """

    choice: EngineChoice | None = None
    results: list[PartsResult] = field(default_factory=list)
    records: dict[str, RunRecord] = field(default_factory=dict)


class PartsCourse:
    """One model in parts on its way to engines."""

    def __init__(
        self,
        asked: PartsRequest,
        facts: ConversionInputs,
        work: PartsWork,
        target: Path,
        place: Callable[[str], Path],
        scratch: Path,
        scores: Path | None = None,
    ) -> None:
        self.asked = asked
        self.facts = facts
        self.work = work
        self.target = target
        self.place = place
        self.context, self.stage = work.context, work.context.timer
        self.task = work.context.task
        self.model: Any = work.context.model
        self.samples = list(work.held_out or work.calibration)[:_COMPARED]
        self.writer = Writer(self.model, work.tokens)
        writing = replace(self.context, model=self.writer)
        self.scoring = Scoring(writing, work.evaluation, asked.resamples, scores)
        self.calibrated: Quantizer | None = None
        self.done = PartsDone()
        self.maker = PartMaker(asked, facts, self.context, self.samples, work.tokens, scratch)

    def run(self) -> PartsDone:
        """Carry out all stages, in order."""
        options = {name: self.maker.options(self.maker.variant(name)) for name in self.asked.backends}
        require_tools(options, html=False)
        if self.asked.dtype is not None:
            self.quantizer(self.asked.backends[0])
        if self.asked.variants:
            self._choose()
        else:
            for name in self.asked.backends:
                self._each(name)
        return self.done

    def quantizer(self, name: str) -> Quantizer:
        """Return the quantizer for a backend; all are from one calibration, on what the model itself writes."""
        if self.calibrated is None:
            self.calibrated = self._calibrate()
        is_it = self.calibrated.config.backend == name
        return self.calibrated if is_it else self.calibrated.for_backend(name)

    def _calibrate(self) -> Quantizer:
        quantizer, samples = Quantizer(self.asked.settings(self.asked.backends[0])), list(self.work.calibration)
        with self.stage("write what calibrates"):
            batches = calibration_batches(self.model, self.task.sample_batches(samples), self.work.tokens)
        with self.stage("calibrate"):
            kind = {"audio": "recording"}.get(self.task.reads, self.task.reads)
            told = f"on {len(samples)} {kind}s and what is written for them"
            self.stage.tell(f"{told}, for {self.asked.backends[0]}")
            quantizer.calibrate(self.model, batches)
            quantizer.save(self.target / QUANTIZER)
        return quantizer

    def _each(self, name: str) -> None:
        """Make the engines of one backend, in a folder of its own."""
        low = self.maker.variant(name)
        made = self._made(low)
        plain = None if low.dtype is None else self._made(replace(low, dtype=None))
        whole = None
        if made.model is not None:
            with self.stage("measure latency"):
                models = {} if plain is None else {"float engine": plain.model}
                whole = self._beside_pytorch({**models, "engine": made.model})
        self._deliver(made, plain, whole)

    def _beside_pytorch(self, models: Mapping[str, Any]) -> WholeLatency:
        return whole_latency(self.maker, {PYTORCH: self.model, **models})

    def _made(self, variant: Variant) -> PartsMade:
        return self.maker.made(variant, None if variant.dtype is None else self.quantizer(variant.backend))

    def _choose(self) -> None:
        """Make the engines of all candidates, and deliver those that write the fastest."""
        made: dict[str, PartsMade] = {}
        records: dict[str, Candidate] = {}
        variants = [one for one in self.asked.variants if not one.dynamic]
        with self.stage("choose the engine"):
            for variant in variants:
                record, before = Candidate(backend=variant.backend, format=variant.format), len(self.stage.done)
                try:
                    made[variant.name] = one = self._made(variant)
                except FAILURES as error:
                    record = failed(record, error)
                else:
                    record = replace(record, sqnr_db=far_from_float(one.checks))
                records[variant.name] = record
                seconds = sum(stage.seconds for stage in self.stage.done[before:])
                self.stage.tell(candidate_line(record, [one.name for one in variants], seconds))
        with self.stage("measure latency"):
            models = {name: one.model for name, one in made.items()}
            whole, broken = timed(models, self._beside_pytorch, partial(write_once, self.maker))
        for name, why in broken.items():
            del made[name]
            records[name] = failed(records[name], why)
            self.stage.tell(f"{name} {records[name].verdict}")
        for name in made:
            records[name] = replace(records[name], milliseconds=(whole.latency.milliseconds[name],))
        shapes = [f"{whole.latency}, {whole.tokens} new"]
        self.done.choice = choice = choose(list(records.values()), shapes, self.asked.missing)
        best = made[self._best(choice)]
        floats = [one for one in choice.candidates if one.is_float and one.backend == best.variant.backend]
        plain = None if best.quantized is None or not floats else made.get(floats[0].name)
        names = {PYTORCH: PYTORCH} | ({} if plain is None else {plain.variant.name: "float engine"})
        names[best.variant.name] = "engine"
        self._deliver(best, plain, replace(whole, latency=whole.latency.named(names)))

    def _best(self, choice: EngineChoice) -> str:
        """Return the candidate to deliver, the fastest, or the fastest that is quantized if one is needed."""
        return (quantized_of(choice) if self.asked.needs_quantized else choice.candidates)[0].name

    def _forms(self, made: PartsMade) -> dict[str, Any]:
        """Return what writes: the proxy, and the engines, or a simulation of their types where they do not run here."""
        if made.quantized is None:
            return {} if made.model is None else {"engine": made.model}
        if made.model is not None:
            return {"proxy": made.quantized, "engine": made.model}
        return {"proxy": made.quantized, **nearest_form({}, self.quantizer(made.variant.backend), self.model)}

    def _deliver(self, made: PartsMade, plain: PartsMade | None, whole: WholeLatency | None) -> None:
        """Compare and score the engines of a backend, and write its folder."""
        backend = made.variant.backend
        folder = self.place(backend)
        (folder / MODEL).mkdir(parents=True)
        latency: dict[str, tuple[ShapeLatency, ...]] = {}
        if made.model is not None:
            with self.stage("measure the parts"):
                latency = {name: part_latency(self.maker, name, made, plain) for name in made.parts}
        forms, tokens = self._forms(made), self.work.tokens
        with self.stage("compare what is written"):
            batches = self.task.sample_batches(self.samples) or [self.maker.checked_on[0].read]
            agreement = agreements(self.task, forms, batches, tokens, self.model)
        scores = self.scoring.scores({name: Writer(model, tokens) for name, model in forms.items()}) if forms else ()
        self._place_files(made, folder)
        result = self._result(made, folder, latency, agreement, whole, scores)
        write_json(folder / CONFIG, parts_config(self.facts, result))
        write_card(self.facts, result, self.asked.evaluation, folder)
        self.done.results.append(result)
        if made.quantized is not None:
            with self.stage("inspect the engine"):
                quantizer, choice = self.quantizer(backend), self.done.choice
                record = parts_record(self.maker, made, plain, result, quantizer, folder=folder, choice=choice)
            self.done.records[result.backend] = record

    def _result(
        self,
        made: PartsMade,
        folder: Path,
        latency: Mapping[str, tuple[ShapeLatency, ...]],
        agreement: Mapping[str, Agreement],
        whole: WholeLatency | None,
        scores: tuple[Score, ...],
    ) -> PartsResult:
        """Return what was measured, after the files for servers are written."""
        signatures = {name: read_signature(part.onnx) for name, part in made.parts.items()}
        served = serve_parts(self.maker, self.facts, made, signatures, folder) if self.asked.serves else {}
        backend, choice = made.variant.backend, self.done.choice
        return PartsResult(
            backend=backend,
            compute_capability=self.maker.capability(backend),
            not_verified=None if made.model is not None else NOT_VERIFIED,
            inference_precision=made.variant.precision,
            quantization=self._facts(made, scores),
            tolerance=str(self.maker.tolerance(made.variant)),
            tokens=self.work.tokens,
            chosen_on=None if choice is None else choice.instructions,
            parts=tuple(
                PartResult(
                    name=name,
                    signature=signatures[name],
                    serving=served.get(name, {}),
                    checks=part.checks,
                    latency=latency.get(name, ()),
                )
                for name, part in made.parts.items()
            ),
            steps=made.steps,
            agreement=agreement,
            whole=whole,
            scores=scores,
        )

    def _place_files(self, made: PartsMade, folder: Path) -> None:
        """Put the files of all parts into the folder of their backend, with what reads and writes texts for them."""
        for name, part in made.parts.items():
            for file in part.onnx.parent.glob(f"{part.onnx.name}*"):
                shutil.copy2(file, folder / MODEL / file.name)
            part.built.path.replace(folder / f"{name}.engine")
        for told in (self.model.config, self.model.generation_config):
            told.save_pretrained(folder / MODEL)
        save_processor(self.context.processor, self.model.config, folder / processor_folder(self.facts.task))

    def _facts(self, made: PartsMade, scores: tuple[Score, ...]) -> Any:
        if made.quantized is None:
            return None
        quantizer = self.quantizer(made.variant.backend)
        return quantization_facts(quantizer, (), scores, self.asked.calibration, len(self.work.calibration))
