"""The command ``quantizer convert``: from a checkpoint to ONNX files and engines, checked against PyTorch and timed.

The output folder is complete or absent: it is filled under a temporary name and renamed at the end.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from torch import nn

from quantizer.common.data.batches_of import in_several
from quantizer.common.label_texts import label_texts
from quantizer.engines import Engine, InputSizes, inspect_file
from quantizer.engines.candidates import Variant
from quantizer.files import said_complete, write_folder
from quantizer.qdq.structure import read_signature
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, Score, collect_machine, collect_versions, print_record
from quantizer.report.record import EngineChoice
from quantizer.report.terminal import print_choice
from quantizer.runs.convert.card import write_card
from quantizer.runs.convert.choose import PYTORCH, Chooser
from quantizer.runs.convert.data import Samples, read_labelled
from quantizer.runs.convert.engine_maker import EngineMaker, Made
from quantizer.runs.convert.folder import CONFIG, ENGINE, ONNX, processor_folder, write_json
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.measure import ShapeLatency, measure_latency
from quantizer.runs.convert.parts.run import convert_parts
from quantizer.runs.convert.ready import ready_to_convert
from quantizer.runs.convert.record import conversion_record, write_report
from quantizer.runs.convert.request import CONVERSION, ConversionRequest
from quantizer.runs.convert.result import BackendResult, backend_config, quantization_facts
from quantizer.runs.convert.served import serving_files
from quantizer.runs.convert.stages import conversion_outlook
from quantizer.runs.convert.summary import print_result, print_summary
from quantizer.runs.measure import NOT_VERIFIED
from quantizer.runs.outputs.check_batches import check_batches
from quantizer.runs.outputs.compare_outputs import distances_of, output_distances
from quantizer.runs.preflight import check_rows, require_tools
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.run_context import ResumeFiles, load_context, resume_files
from quantizer.runs.saved.kept_engines import KeptEngines
from quantizer.runs.scoring import Scoring
from quantizer.targets import profile
from quantizer.tasks import batch_shape, save_processor, tasks
from quantizer.tasks.datasets.rows import content_of

_RESAMPLES = 1000


def convert(asked: ConversionRequest, console: Console) -> Path:
    """Carry out a conversion, and return the folder that was written."""
    folder = asked.output.absolute()
    data, facts, told = ready_to_convert(asked, folder)
    for line in filter(None, [told]):
        console.print(line, highlight=False, markup=False)
    if tasks[facts.task].in_parts:
        return convert_parts(asked, facts, data, folder, console)
    made: list[_Done] = []
    searches = asked.max_drop is not None
    with resume_files(folder, searches=searches, trains=False, chooses=asked.chooses) as kept:
        write_folder(
            folder,
            lambda target: made.append(_Run(asked, facts, data, target, kept, console, folder).run()),
            kind=CONVERSION,
            replace=asked.force,
        )
    with said_complete(folder):
        done = made[0]
        if done.choice is not None and not done.records:
            print_choice(done.choice, console)
        for result in done.results:
            record = done.records.get(result.backend)
            if record is None:
                print_summary(facts, result, folder, console)
            else:
                print_record(record, folder / result.backend, console)
    return folder


@dataclass
class _Done:
    """Results of a conversion."""

    choice: EngineChoice | None = None
    results: list[BackendResult] = field(default_factory=list)
    records: dict[str, RunRecord] = field(default_factory=dict)


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
            options = {**lengths, "batch_size": facts.batch[1], "seconds": facts.seconds}
            self.context = load_context(
                self.stage,
                kept,
                target,
                asked.model,
                facts.task,
                # An ONNX file and an engine for each backend, in which integers take a quarter.
                copies=len(asked.backends) / (2 if asked.quantization else 1),
                needed_for="what is written for this model",
                sizes=options,
                texts=label_texts(asked.labels, asked.template),
            )
        self.model, self.task = self.context.model, self.context.task
        # Errors that would otherwise come after minutes of calibration.
        maker = EngineMaker(asked, facts, self.context, [], [], [], self.tuning, target)
        maker.budget(asked.backends[0]).warn("--max-drop")
        require_tools({name: maker.options(maker.variant(name)) for name in asked.backends}, html=False)
        check_rows(self.task, [*self.tuning, *self.evaluation], [] if data is None else data.rows)
        self.calibration, held_out = ([], []) if data is None else data.of(self.task)
        self.batches = in_several(self.task.sample_batches, self.calibration)
        samples = held_out or self.calibration
        self.timed_batches = [self.task.inputs.filled(samples, *shape) for shape in facts.shapes]
        self.check_batches = check_batches(self.task, samples, facts.checked_shapes)
        self.scoring = Scoring(self.context, self.evaluation, _RESAMPLES)
        self.calibrated: Quantizer | None = None
        self.done = _Done()

    def run(self) -> _Done:
        """Carry out all stages, in order."""
        # In the folder itself, so that after a kill both are removed together.
        with tempfile.TemporaryDirectory(dir=self.target) as scratch:
            batches = self.batches, self.check_batches, self.timed_batches
            maker = EngineMaker(self.asked, self.facts, self.context, *batches, self.tuning, Path(scratch))
            if self.asked.chooses:
                self._chosen(maker)
            else:
                for name in self.asked.backends:
                    self._each(name, maker)
        choice = self.done.choice
        document = {
            "model": asdict(self.facts),
            "choice": None if choice is None else asdict(choice),
            "backends": [asdict(result) for result in self.done.results],
            "stages": [asdict(stage) for stage in self.stage.done],
            "versions": collect_versions(),
            "machine": collect_machine(),
        }
        write_json(self.target / "conversion.json", document)
        return self.done

    def _quantizer(self, name: str, ranges: str | None = None) -> Quantizer:
        """Return the quantizer for a backend; all are from one calibration, with the first that is asked for."""
        if self.calibrated is None:
            self.calibrated = Quantizer(self.asked.settings(name))
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

    def _each(self, name: str, maker: EngineMaker) -> None:
        """Make the engine of one backend, in a folder of its own."""
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
                plain = maker.plain_engine(variant)
                assert plain.engine is not None
                models[plain.variant.name] = plain.engine
            models["engine"] = made.engine
            with self.stage("measure latency"):
                # An engine for some sizes alone has the usual one.
                timed_on = [self.timed_batches[self.facts.usual]] if made.only_sizes else self.timed_batches
                latency = tuple(measure_latency(models, batch, self.asked.threads) for batch in timed_on)
        self._deliver(maker, made, folder, latency)

    def _chosen(self, maker: EngineMaker) -> None:
        """Make the engines of all candidates, in float and quantized, and keep the fastest that is right."""
        if self.asked.quantization:
            # What is wrong with the data is no fault of a candidate.
            self._quantizer(self.asked.backends[0])
        maker.kept = KeptEngines(self.context.resume.engines, content_of(self.evaluation))
        chooser = Chooser(maker, self.scoring, self._quantizer_of)
        chosen = chooser.choose()
        kept, folder = chosen.made, self.target / chosen.made.variant.backend
        chooser.deliver(kept, folder)
        self.done.choice = chosen.choice
        self._deliver(maker, kept, folder, chosen.latency)
        if kept.quantizer is not None:
            # As it was calibrated, before any group was put back.
            kept.quantizer.clear_fallback()
            kept.quantizer.save(self.target / "quantizer")

    def _deliver(self, maker: EngineMaker, made: Made, folder: Path, latency: tuple[ShapeLatency, ...]) -> None:
        """Score the engine of a backend, and write the rest of its folder."""
        name, facts, choice = made.variant.backend, None, self.done.choice
        forms: dict[str, nn.Module | Engine] = {} if made.quantized is None else {"proxy": made.quantized}
        scores = () if made.engine is None else self.scoring.scores({**forms, "engine": made.engine})
        if made.quantizer is not None:
            source, rows = str(self.asked.calibration), len(self.calibration)
            facts = quantization_facts(made.quantizer, made.budget, scores, source, rows)
        save_processor(self.context.processor, self.model.config, folder / processor_folder(self.facts.task))
        signature = read_signature(folder / ONNX)
        result = BackendResult(
            backend=name,
            float_dtype=profile(name).float_dtype,
            compute_capability=maker.capability(name),
            inference_precision=made.variant.precision,
            quantization=facts,
            signature=signature,
            sizes=made.sizes,
            only_sizes=made.only_sizes,
            # A server reads the file, and would compile the model for all sizes.
            serving={} if made.only_sizes else serving_files(maker, made, folder, signature),
            engine_bytes=made.built.size_bytes,
            chosen_on=None if choice is None else choice.instructions,
            not_verified=None if made.checks else NOT_VERIFIED,
            tolerance=str(maker.tolerance(made.variant)),
            checks=made.checks,
            latency=latency,
            scores=scores,
        )
        write_json(folder / CONFIG, backend_config(self.facts, result))
        write_card(self.facts, result, None if self.asked.evaluation is None else str(self.asked.evaluation), folder)
        print_result(result, self.console)
        self.done.results.append(result)
        if made.quantized is not None:
            record = self._record(maker, made, folder, latency, scores)
            write_report(record, folder)
            self.done.records[name] = record

    def _record(
        self,
        maker: EngineMaker,
        made: Made,
        folder: Path,
        latency: tuple[ShapeLatency, ...],
        scores: tuple[Score, ...],
    ) -> RunRecord:
        """Return the record of a quantized engine, after the last measurements for it."""
        assert made.quantized is not None
        place = self.facts.usual
        batch, sequence = self.facts.shapes[place]
        # An engine that runs here was checked at every shape.
        outputs = distances_of(made.checks, engine=True)
        if not outputs:
            with self.stage("compare the outputs"):
                usual = [one for one in self.check_batches if batch_shape(one) == batch_shape(self.check_batches[0])]
                outputs = output_distances(self.model, made.quantized, made.engine, usual)
        with self.stage("inspect the engine"):
            inspection = inspect_file(
                folder / ENGINE,
                made.variant.backend,
                threads=self.asked.threads,
                sizes=InputSizes(batch, sequence or batch),
            )
        return conversion_record(
            maker,
            made,
            outputs=outputs,
            inspection=inspection,
            latency=latency,
            scores=scores,
            choice=self.done.choice,
        )
