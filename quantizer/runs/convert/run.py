"""The command ``quantizer convert``: from a checkpoint to ONNX files and engines, checked against PyTorch and timed.

The output folder is complete or absent: it is filled under a temporary name and renamed at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from torch import nn

from quantizer.engines import Engine
from quantizer.engines import Inspection
from quantizer.engines import inspect_engine
from quantizer.errors import EngineError
from quantizer.errors import QuantizerError
from quantizer.files import said_complete
from quantizer.files import write_folder
from quantizer.qdq.signature import read_signature
from quantizer.quantizer import Quantizer
from quantizer.report import Score
from quantizer.report import collect_machine
from quantizer.report import collect_versions
from quantizer.report.candidate_record import Candidate
from quantizer.report.candidate_record import EngineChoice
from quantizer.report.tables.choice_table import print_choice
from quantizer.runs.choose_engine import bound
from quantizer.runs.choose_engine import choose
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
from quantizer.runs.convert.summary import print_result
from quantizer.runs.convert.summary import print_summary
from quantizer.runs.preflight import check_rows
from quantizer.runs.preflight import require_tools
from quantizer.runs.run_context import ResumeFiles
from quantizer.runs.run_context import StageTimer
from quantizer.runs.run_context import load_context
from quantizer.runs.run_context import predict
from quantizer.runs.run_context import resume_files
from quantizer.runs.run_context import score_record
from quantizer.targets import profile
from quantizer.tasks import Predictions

__all__ = ["convert"]

_RESAMPLES = 1000
_PYTORCH = "PyTorch float"


def convert(asked: ConversionRequest, console: Console) -> Path:
    """Carry out a conversion, and return the folder that was written.

    Args:
        console: where stages and results are printed.

    Raises:
        QuantizerError: a stage failed; nothing was written.
    """
    folder = asked.output.absolute()
    # Data first: reading it is fast, and a mistake in it should be reported before the model is loaded.
    data = None if asked.calibration is None else read_calibration(asked.calibration, asked.rows, asked.column)
    facts = conversion_inputs(asked, folder.name)
    made: list[tuple[EngineChoice | None, list[BackendResult]]] = []
    with resume_files(folder, searches=asked.max_drop is not None, trains=False) as kept:
        write_folder(
            folder,
            lambda target: made.append(_Run(asked, facts, data, target, kept, console).run()),
            kind=CONVERSION,
            replace=asked.force,
        )
    with said_complete(folder):
        choice, results = made[0]
        if choice is not None:
            print_choice(choice, console)
        print_summary(facts, results, folder, console)
    return folder


class _Run:
    """One conversion in progress; ``target`` is the folder that is being filled."""

    def __init__(
        self,
        asked: ConversionRequest,
        facts: ConversionInputs,
        data: Samples | None,
        target: Path,
        kept: ResumeFiles,
        console: Console,
    ) -> None:
        self.asked = asked
        self.facts = facts
        self.target = target
        self.console = console
        self.stage = StageTimer(console)
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
        maker = EngineMaker(asked, facts, self.context, [], [], [], target)
        require_tools({name: maker.options(name) for name in asked.backends}, html=False)
        check_rows(self.task, [*self.tuning, *self.evaluation], [] if data is None else data.rows)
        self.calibration, held_out = ([], []) if data is None else data.of(self.task)
        self.batches = self.task.sample_batches(self.calibration)
        self.check_batches = [self.task.inputs.filled(held_out or self.calibration, *shape) for shape in facts.shapes]
        self.float_predictions: Predictions | None = None
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

    def _quantizer(self, name: str) -> Quantizer:
        """Return the quantizer for a backend; all are from one calibration, with the first that is asked for."""
        if self.calibrated is None:
            self.calibrated = Quantizer(backend=name, dtype=self.asked.dtype or "int8")
            with self.stage(f"calibrate on {len(self.calibration)} {self.task.reads}s"):
                self.calibrated.calibrate(self.model, self.batches)
                self.calibrated.save(self.target / "quantizer")
        return self.calibrated if self.calibrated.config.backend == name else self.calibrated.for_backend(name)

    def _each(self, name: str, maker: EngineMaker) -> BackendResult:
        """Return the results of one backend, in a folder of its own."""
        quantizer = self._quantizer(name) if self.asked.quantization else None
        folder = self.target / name
        folder.mkdir()
        self.console.print(f"[bold]{name}[/bold]")
        if quantizer is None:
            made = maker.float_engine(name, folder / ONNX, folder / ENGINE)
        else:
            made = maker.quantized(name, quantizer, folder)
        latency: tuple[ShapeLatency, ...] = ()
        if made.engine is not None:
            models: dict[str, nn.Module | Engine] = {_PYTORCH: self.model}
            if made.quantized is not None:
                plain = maker.plain_engine(name).engine
                assert plain is not None
                models["float engine"] = plain
            latency = self._latency({**models, "engine": made.engine})
        return self._result(maker, made, folder, latency, self._scored(made))

    def _chosen(self, maker: EngineMaker) -> tuple[EngineChoice, list[BackendResult]]:
        """Make the engines of all candidates, in float and quantized, and keep the fastest that is right."""
        made: dict[str, Made] = {}
        failed: list[Candidate] = []
        if self.asked.quantization:
            # What is wrong with the data is no fault of a candidate.
            self._quantizer(self.asked.backends[0])
        for name in self.asked.backends:
            self.console.print(f"[bold]{name}[/bold]")
            for quantized in (False, True)[: 2 if self.asked.quantization else 1]:
                dtype = (self.asked.dtype or "int8") if quantized else profile(name).float_dtype
                try:
                    one = self._candidate(name, maker, quantized=quantized)
                except QuantizerError as error:
                    failed.append(Candidate(backend=name, format=dtype, verdict=f"failed: {error}"))
                    self.stage.say(f"{name} {dtype} failed: {error}")
                else:
                    made[f"{name} {dtype}"] = one
        engines = {name: one.engine for name, one in made.items() if one.engine is not None}
        latency = self._latency({_PYTORCH: self.model, **engines}) if engines else ()
        scores = {name: self._scored(one) for name, one in made.items() if one.quantized is not None}
        tried = [self._record(name, one, latency, scores.get(name, ())) for name, one in made.items()]
        choice = choose([*tried, *failed], [str(shape) for shape in latency], self.asked.missing)
        choice = bound(choice, lambda candidate: self._inspected(made[candidate.name]))
        best = choice.candidates[0]
        kept, folder = made[best.name], self.target / best.backend
        for name in self.asked.backends:
            if (self.target / name).exists() and not (name == best.backend and kept.quantized is not None):
                shutil.rmtree(self.target / name)
        if kept.quantizer is None:
            folder.mkdir()
            maker.export_float(best.backend, folder / ONNX)
            kept.built.path.rename(folder / ENGINE)
        plain = f"{best.backend} {profile(best.backend).float_dtype}"
        names = {_PYTORCH: _PYTORCH, **({plain: "float engine"} if plain in made else {}), best.name: "engine"}
        taken = tuple(
            replace(shape, milliseconds={told: shape.milliseconds[name] for name, told in names.items()})
            for shape in latency
        )
        scored = scores[best.name] if best.name in scores else self._scored(kept)
        result = self._result(maker, kept, folder, taken, scored, choice.instructions)
        if kept.quantizer is not None:
            # As it was calibrated, before any group was put back.
            kept.quantizer.clear_fallback()
            kept.quantizer.save(self.target / "quantizer")
        return choice, [result]

    def _candidate(self, name: str, maker: EngineMaker, *, quantized: bool) -> Made:
        """Return one engine to choose from.

        Raises:
            QuantizerError: it cannot be made, is wrong, or misses ``max_drop``; nothing of it stays.
        """
        if not quantized:
            return maker.checked_plain_engine(name)
        folder = self.target / name
        folder.mkdir()
        try:
            made = maker.quantized(name, self._quantizer(name), folder)
            if made.budget and self.asked.max_drop is not None and made.budget[-1].drop > self.asked.max_drop:
                raise EngineError(
                    f"its score drops by {made.budget[-1].drop:.5f}, and --max-drop allows {self.asked.max_drop:g}"
                )
        except QuantizerError:
            shutil.rmtree(folder)
            raise
        return made

    def _record(self, name: str, made: Made, latency: Sequence[ShapeLatency], scores: Sequence[Score]) -> Candidate:
        far = [check.float_db for check in made.checks if check.float_db is not None]
        return Candidate(
            backend=made.name,
            format=name.rpartition(" ")[2],
            milliseconds=tuple(shape.milliseconds[name] for shape in latency),
            score_difference=scores[-1].difference if scores else None,
            sqnr_db=min(far, default=None),
        )

    def _inspected(self, made: Made) -> Inspection:
        batch, sequence = self.facts.shapes[len(self.facts.shapes) // 2]
        return inspect_engine(
            made.name, made.built.path, threads=self.asked.threads, batch=batch, sequence=sequence or batch
        )

    def _result(
        self,
        maker: EngineMaker,
        made: Made,
        folder: Path,
        latency: tuple[ShapeLatency, ...],
        scores: tuple[Score, ...],
        chosen_on: str | None = None,
    ) -> BackendResult:
        """Return what is delivered for a backend, after writing the rest of its folder."""
        name, facts = made.name, None
        if made.quantizer is not None:
            facts = quantization_facts(made.quantizer, made.budget, str(self.asked.calibration), len(self.calibration))
        self.context.processor.save_pretrained(folder / processor_folder(self.facts.task))
        result = BackendResult(
            backend=name,
            float_dtype=profile(name).float_dtype,
            compute_capability=maker.capability(name),
            inference_precision=maker.precision(name),
            quantization=facts,
            signature=read_signature(folder / ONNX),
            onnx_bytes=(folder / ONNX).stat().st_size,
            engine_bytes=made.built.size_bytes,
            build_seconds=made.built.seconds,
            chosen_on=chosen_on,
            not_verified=None if made.checks else "not verified: built ahead of time, and there is no GPU here",
            tolerance=str(maker.tolerance(name, made.quantized is not None)),
            checks=made.checks,
            latency=latency,
            scores=scores,
        )
        write_json(folder / CONFIG, backend_config(self.facts, result))
        print_result(result, self.console)
        return result

    def _latency(self, models: Mapping[str, nn.Module | Engine]) -> tuple[ShapeLatency, ...]:
        with self.stage("measure latency"):
            return tuple(measure_latency(models, batch, self.asked.threads) for batch in self.check_batches)

    def _scored(self, made: Made) -> tuple[Score, ...]:
        """Return the task's scores of the float model, the proxy and the engine on the evaluation rows."""
        if not self.evaluation or made.engine is None:
            return ()
        if self.float_predictions is None:
            self.float_predictions = self._predict("float model", self.model)
        scores = [self._score("float", self.float_predictions)]
        if made.quantized is not None:
            scores.append(self._score("proxy", self._predict("proxy", made.quantized)))
        scores.append(self._score("engine", self._predict("engine", made.engine)))
        return tuple(scores)

    def _predict(self, which: str, model: nn.Module | Engine) -> Predictions:
        return predict(self.context, which, model, self.evaluation)

    def _score(self, which: str, predictions: Predictions) -> Score:
        base = self.float_predictions or predictions
        return score_record(which, self.task, base, predictions, self.evaluation, _RESAMPLES)
