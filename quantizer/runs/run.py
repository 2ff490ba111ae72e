"""One run: a configuration in, a folder with the model, the engine and the report out.

A run's folder is complete or absent: all is written into a temporary folder beside it, which takes its name at the end
and is removed on any error or interruption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.syntax import Syntax
from torch import nn
from tqdm.auto import tqdm

from quantizer.common.fingerprint import Fingerprint
from quantizer.config import AmpConfig
from quantizer.config import FallbackConfig
from quantizer.config import QatConfig
from quantizer.config import RunConfig
from quantizer.config import dump_yaml
from quantizer.config.feasibility import check_run
from quantizer.engines import BuildOptions
from quantizer.engines import BuildResult
from quantizer.engines import Engine
from quantizer.engines import Inspection
from quantizer.engines import interleaved_latency
from quantizer.engines import load_engine
from quantizer.engines import observe_engine
from quantizer.engines import peak_memory_mib
from quantizer.engines import runs_here
from quantizer.export import export_onnx
from quantizer.files import checked_folder
from quantizer.files import require_room
from quantizer.files import restore_folder
from quantizer.files import said_complete
from quantizer.files import write_folder
from quantizer.quantizer import Quantizer
from quantizer.report import EngineFile
from quantizer.report import Latency
from quantizer.report import MemoryEntry
from quantizer.report import ModelInfo
from quantizer.report import RunRecord
from quantizer.report import Score
from quantizer.report import collect_machine
from quantizer.report import collect_versions
from quantizer.report import latency_entries
from quantizer.report import memory_entries
from quantizer.report import print_record
from quantizer.report import write_html
from quantizer.report import write_record
from quantizer.report.search_records import fallback_reason
from quantizer.report.search_records import fallback_record
from quantizer.runs.plan_records import escaped_records
from quantizer.runs.plan_records import site_records
from quantizer.runs.preflight import check_rows
from quantizer.runs.preflight import require_tools
from quantizer.runs.stages import ResumeFiles
from quantizer.runs.stages import StageTimer
from quantizer.runs.stages import as_predictor
from quantizer.runs.stages import bar
from quantizer.runs.stages import engine_inputs
from quantizer.runs.stages import parameter_bytes
from quantizer.runs.stages import resume_files
from quantizer.runs.stages import rows_of
from quantizer.runs.stages import score_record
from quantizer.runs.stages import sizes_of
from quantizer.runs.task_metric import TaskMetric
from quantizer.runs.train import Training
from quantizer.runs.train import TrainingResult
from quantizer.sensitivity import ScoreCache
from quantizer.sensitivity import fingerprint
from quantizer.tasks import Predictions
from quantizer.tasks import Row
from quantizer.tasks import Task
from quantizer.tasks import batch_shape
from quantizer.tasks import build_task
from quantizer.tasks import load_model
from quantizer.tasks import load_processor
from quantizer.tasks.datasets.rows import content_of
from quantizer.views.histograms import noisiest

__all__ = ["inspect", "run"]

RUN = "run"
"""What its folder says that it is."""

_LATENCY_ROUNDS = 15
_HISTOGRAMS = 6


def run(config: RunConfig, output: Path | None, force: bool, console: Console) -> Path:
    """Carry out a run and write its folder.

    Args:
        config: the resolved configuration.
        output: the folder; None: ``config.output``.
        force: replace the folder of a run that stands there already; one that holds anything else is kept.
        console: where stages and results are printed.

    Raises:
        QuantizerError: the target cannot do what is asked, the folder stands there already or cannot be written, or a
            stage failed.
    """
    check_run(config)
    folder = Path(config.output if output is None else output).absolute()
    restore_folder(folder)
    checked_folder(folder, RUN, replace=force)
    record: list[RunRecord] = []
    searches = config.fallback is not None and config.fallback.max_drop is not None
    with resume_files(folder, searches=searches, trains=config.qat is not None) as kept:
        write_folder(
            folder,
            lambda target: record.append(_Run(config, folder.name, target, kept, console).carry_out()),
            kind=RUN,
            replace=force,
        )
    with said_complete(folder):
        print_record(record[0], folder, console)
    return folder


def inspect(config: RunConfig, diff: bool, console: Console) -> None:
    """Print what of the model would be quantized, and with ``diff`` the rewritten source."""
    model = load_model(config.model.source, config.model.task, config.model.attention)
    quantizer = Quantizer(config.quantizer)
    console.print(quantizer.inspect(model).text(), markup=False, highlight=False, soft_wrap=True)
    if diff and console.is_terminal:
        console.print(Syntax(quantizer.diff(model), "diff", background_color="default", word_wrap=True))
    elif diff:
        # A file or a pipe has no width: no line is cut or broken.
        console.out(quantizer.diff(model), highlight=False)


class _Run:
    """One run in progress.

    Attributes:
        target: the folder that is being filled.
        kept: where a search and a training keep what they have.
        training: the rows that are trained on.
    """

    def __init__(self, config: RunConfig, name: str, target: Path, kept: ResumeFiles, console: Console) -> None:
        self.config = config
        self.name = name
        self.target = target
        self.kept = kept
        self.console = console
        self.training: list[Row] = []
        self._stage = StageTimer(console)

    def carry_out(self) -> RunRecord:
        """All stages, in order."""
        config = self.config
        (self.target / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        with self._stage("load model and data"):
            model, task = self._model_and_task()
            calibration, evaluation = rows_of(config.data.calibration), rows_of(config.data.evaluation)
            head, tuning, self.training = map(rows_of, (config.data.head, config.data.tuning, config.data.training))
        quantizer = Quantizer(config.quantizer)
        self._check(task, [*evaluation, *tuning, *head], [*calibration, *self.training])
        if config.quantizer.formats:
            # A rule that matches nothing would be told when the plan is made.
            quantizer.inspect(model)
        if head:
            with self._stage("fit the head on float embeddings"), bar("head") as progress:
                task.fit_head(as_predictor(model), head, progress)
        batches = task.batches(calibration)
        with self._stage("calibrate"):
            quantizer.calibrate(model, batches)
        score = self._tuning_score(task, tuning, head)
        self._choose(quantizer, model, batches, score)
        forms, course = self._quantize(quantizer, model, task, score)
        predictions = self._predictions({"float": model, **forms}, task, evaluation)
        built = self._export_and_build(quantizer, forms["proxy" if course is None else "qat"], model, task)
        inspection = self._inspect(built["engine"])
        engines = self._load(built)
        predictions |= self._predictions(self._nearest(engines, quantizer, model), task, evaluation)
        coverage = quantizer.coverage
        record = RunRecord(
            name=self.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=config.model_dump(mode="json"),
            model=ModelInfo(
                source=config.model.source,
                task=config.model.task,
                parameters=sum(parameter.numel() for parameter in model.parameters()),
            ),
            scores=tuple(
                self._score(which, task, predictions["float"], p, evaluation) for which, p in predictions.items()
            ),
            latency=self._latency(engines, task),
            size=sizes_of(built),
            memory=self._memory(built) if engines else (),
            coverage=site_records(coverage, quantizer.plan),
            covered_share=coverage.share,
            escaped=escaped_records(coverage.escaped),
            histograms=tuple(quantizer.histogram(name).data for name in noisiest(quantizer.plan, _HISTOGRAMS)),
            sensitivity=quantizer.sensitivity.rows if config.amp is not None else (),
            measure=quantizer.sensitivity.measure if config.amp is not None else None,
            fallback=fallback_record(chosen) if (chosen := quantizer.chosen_fallback) is not None else None,
            training=None if course is None else course.record(task),
            engine=self._engine(built["engine"], bool(engines)),
            inspection=inspection,
            diff=quantizer.diff(model),
            versions=collect_versions(),
            machine=collect_machine(),
            stages=tuple(self._stage.done),
        )
        self._report(record)
        return record

    def _check(self, task: Task, scored: list[Row], others: list[Row]) -> None:
        """Tell now, and not after minutes of calibration, what would be told then."""
        config = self.config
        require_tools({config.quantizer.backend: self._options()}, html="html" in config.report.formats)
        check_rows(task, scored, others)
        # The shape that latency is measured at: the model may have fewer positions.
        task.random_batch(1, config.report.latency_sequence)

    def _report(self, record: RunRecord) -> None:
        if "json" in self.config.report.formats:
            write_record(record, self.target / "report.json")
        if "html" in self.config.report.formats:
            write_html(record, self.target / "report.html")

    def _model_and_task(self) -> tuple[nn.Module, Task]:
        config = self.config
        model = load_model(config.model.source, config.model.task, config.model.attention)
        # Four files of the model come of it, and two of them hold it in float.
        require_room(self.target, parameter_bytes(model), "what a run writes of this model")
        task = build_task(
            config.model.task,
            model,
            load_processor(config.model.source, config.model.task),
            max_length=config.model.max_length,
            batch_size=config.data.batch_size,
            # A shorter batch would fall below the engine's range.
            min_length=config.export.dynamic.sequence[0],
        )
        return model, task

    def _tuning_score(self, task: Task, tuning: list[Row], head: list[Row]) -> TaskMetric:
        config = self.config
        settings = (config.model, config.data.batch_size, config.export.dynamic.sequence[0])
        return TaskMetric(settings, task, tuning, head, self._stage.tell)

    def _choose(self, quantizer: Quantizer, model: nn.Module, batches: list[Any], score: TaskMetric) -> None:
        """Measure what the groups cost, and put back those that the file asks for."""
        config, amp = self.config, self.config.amp or AmpConfig()
        if config.amp is None and config.fallback is None:
            return
        metric = score if amp.measure == "metric" else None
        proxy = quantizer.amp(
            model,
            measure=amp.measure,
            granularity=amp.granularity,
            metric=metric,
            higher_is_better=score.higher_is_better,
        )
        if config.amp is not None:
            with self._stage("measure sensitivity"), torch.no_grad():
                for batch in tqdm(
                    batches[: amp.batches] if metric is None else [], "batches", leave=False, disable=None
                ):
                    proxy(**batch)
                # What is measured by the metric is measured when it is asked for.
                len(quantizer.sensitivity)
        if config.fallback is not None:
            self._put_back(quantizer, model, proxy, config.fallback, score)

    def _put_back(
        self, quantizer: Quantizer, model: nn.Module, proxy: nn.Module, asked: FallbackConfig, score: TaskMetric
    ) -> None:
        if asked.max_drop is None:
            quantizer.fallback(proxy, num=asked.num, ratio=asked.ratio, names=asked.names, costs=asked.costs)
            return
        with self._stage("search what goes back to float"):
            known = ScoreCache(self.kept.scores, fingerprint(quantizer.plan, score, Fingerprint.of(model))).known
            kept = f"going on with {known} scores of" if known else "until the run is complete, each score is kept in"
            self._say(f"{kept} {self.kept.scores}")
            chosen = quantizer.fallback(
                proxy,
                max_drop=asked.max_drop,
                metric=score,
                higher_is_better=score.higher_is_better,
                max_evaluations=asked.evaluations,
                costs=asked.costs,
                cache=self.kept.scores,
            )
            self._say(f"{len(chosen.groups)} groups put back to float, {fallback_reason(chosen)}")

    def _quantize(
        self, quantizer: Quantizer, model: nn.Module, task: Task, score: TaskMetric
    ) -> tuple[dict[str, nn.Module], TrainingResult | None]:
        """The frozen model, and before it the one of PTQ where it is trained, with what came of the training."""
        settings, course = self.config.qat, None
        forms = {}
        if settings is not None:
            forms["ptq"] = quantizer.quantize(model)
            course = self._train(settings, quantizer, model, task, score)
        with self._stage("quantize"):
            forms["proxy" if course is None else "qat"] = quantizer.quantize(model)
            quantizer.save(self.target / "quantizer")
        return forms, course

    def _train(
        self, settings: QatConfig, quantizer: Quantizer, model: nn.Module, task: Task, score: TaskMetric
    ) -> TrainingResult:
        """Train a copy, so that the float model stays what all is compared with."""
        rows = self.training
        known = fingerprint(quantizer.plan, score, Fingerprint.of(model))
        parts = known, settings.model_dump(mode="json"), content_of(rows)
        training = Training(
            settings,
            task,
            rows,
            score,
            higher_is_better=score.higher_is_better,
            folder=self.kept.training,
            identity=hashlib.sha256(repr(parts).encode()).hexdigest(),
            tell=self._say,
        )
        with self._stage("train with rounded operands"):
            course = training.carry_out(model, quantizer.qat(model, scales=settings.scales, copy=True))
            self._say(
                f"kept the state after {course.best} of {course.steps} steps: {dict(course.scores)[course.best]:.5f} "
                f"on the tuning rows, {course.scores[0][1]:.5f} before training, {course.float_score:.5f} in float"
            )
        return course

    def _say(self, line: str) -> None:
        with tqdm.external_write_mode():
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _predict(self, which: str, model: nn.Module | Engine, task: Task, rows: list[Row]) -> Predictions:
        with self._stage(f"score the {which}"), bar(which) as progress:
            return task.predict(as_predictor(model), rows, progress)

    def _nearest(
        self, engines: Mapping[str, Engine], quantizer: Quantizer, model: nn.Module
    ) -> dict[str, nn.Module | Engine]:
        """The engine, or what foresees its score where nothing here runs it; nothing, where the proxy does."""
        if engines:
            return {"engine": engines["engine"]}
        half = self.config.quantizer.target.torch_dtype is not torch.float32
        return {"simulation": quantizer.simulate(model)} if half else {}

    def _predictions(
        self, forms: Mapping[str, nn.Module | Engine], task: Task, rows: list[Row]
    ) -> dict[str, Predictions]:
        return {which: self._predict(which, form, task, rows) for which, form in forms.items()}

    def _score(self, which: str, task: Task, base: Predictions, other: Predictions, rows: list[Row]) -> Score:
        return score_record(which, task, base, other, rows, self.config.report.bootstrap)

    def _export_and_build(
        self, quantizer: Quantizer, quantized: nn.Module, model: nn.Module, task: Task
    ) -> dict[str, BuildResult]:
        """Write model.onnx and model.engine, and beside them the float model's engine, to compare with."""
        config = self.config
        example, options = task.example(), self._options()
        backend = config.quantizer.backend
        paths = {"float": self.target / "float.onnx", "engine": self.target / "model.onnx"}
        with self._stage("export"):
            quantizer.export(quantized, paths["engine"], example, opset=config.export.opset)
            export_onnx(model, paths["float"], example, opset=config.export.opset, dtype=torch.float32)
        with self._stage("build the engines"):
            return {
                name: self._stage.build(backend, path, path.with_suffix(".engine"), options)
                for name, path in paths.items()
            }

    def _options(self) -> BuildOptions:
        config = self.config
        return BuildOptions(
            dynamic={"batch": config.export.dynamic.batch, "sequence": config.export.dynamic.sequence},
            compute_capability=config.engine.compute_capability,
            inference_precision=config.engine.inference_precision,
            strip_weights=config.engine.strip_weights,
        )

    def _inspect(self, built: BuildResult) -> Inspection:
        """What the engine runs in which precision; an engine without the precision that was asked for ends the run."""
        report = self.config.report
        with self._stage("inspect the engine"):
            return observe_engine(
                self.config.quantizer.backend,
                built.path,
                built.path.with_suffix(".onnx"),
                threads=self.config.engine.threads,
                batch=report.latency_batch,
                sequence=report.latency_sequence,
            )

    def _load(self, built: Mapping[str, BuildResult]) -> dict[str, Engine]:
        """Engines that this machine can run: none, where they need a GPU and there is none."""
        backend = self.config.quantizer.backend
        if not runs_here(backend):
            return {}
        return {name: load_engine(backend, r.path, threads=self.config.engine.threads) for name, r in built.items()}

    def _latency(self, engines: Mapping[str, Engine], task: Task) -> Latency | None:
        report = self.config.report
        if not engines:
            return None
        batch = task.random_batch(report.latency_batch, report.latency_sequence)
        with self._stage("measure latency"):
            calls = {name: partial(engine, engine_inputs(engine, batch)) for name, engine in engines.items()}
            seconds = interleaved_latency(calls, rounds=_LATENCY_ROUNDS)
        return Latency(
            batch=report.latency_batch,
            sequence=batch_shape(batch)[1],
            threads=self.config.engine.threads,
            engines=latency_entries({name: [1000 * s for s in times] for name, times in seconds.items()}),
        )

    def _memory(self, built: Mapping[str, BuildResult]) -> tuple[MemoryEntry, ...]:
        report, backend = self.config.report, self.config.quantizer.backend
        with self._stage("measure memory"):
            peaks = {
                name: peak_memory_mib(
                    result.path,
                    backend,
                    batch=report.latency_batch,
                    sequence=report.latency_sequence,
                    threads=self.config.engine.threads,
                )
                for name, result in built.items()
            }
        return memory_entries({name: peak.peak_mib - peak.baseline_mib for name, peak in peaks.items()})

    def _engine(self, built: BuildResult, ran: bool) -> EngineFile:
        verified = "ran here, and was scored" if ran else "not verified: built ahead of time, and there is no GPU here"
        return EngineFile(
            backend=self.config.quantizer.backend,
            path=built.path.name,
            build_seconds=built.seconds,
            verified=verified,
        )
