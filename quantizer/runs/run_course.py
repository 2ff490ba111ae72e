"""The stages of ``quantizer run`` in their order, from a calibration to the record of what was measured.

Several processes go through them together: each has its part of the batches and of the rows that are scored. What needs
the machine to itself the first process does alone, and tells the others what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from quantizer.common.data.batches_of import in_several
from quantizer.common.distributed import get_world_size
from quantizer.config import AmpConfig, RunConfig, dump_yaml
from quantizer.engines import BuildResult, Inspection, observe_engine, runs_here
from quantizer.errors import EngineError
from quantizer.plan.histograms import noisiest
from quantizer.quantizer import Quantizer
from quantizer.report import Latency, RunRecord, Score, collect_machine, collect_versions
from quantizer.report.record import EngineChoice, OutputDistance
from quantizer.runs.measure import build_options, engine_file, measure_latency, measure_memory, run_sizes, with_deployed
from quantizer.runs.outputs.check_batches import check_batches, checked_shapes
from quantizer.runs.outputs.compare_outputs import (
    NOTHING_DB,
    OutputCheck,
    References,
    Tolerance,
    WrongEngineError,
    distances_of,
    output_distances,
    tolerance,
)
from quantizer.runs.outputs.right_engine import refusal, right_engine
from quantizer.runs.pick_backend import Picked, pick_backend
from quantizer.runs.placement.run_placement import RunPlacement
from quantizer.runs.plan_records import site_records
from quantizer.runs.preflight import require_tools
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.ranks.process_group import from_first_rank, require_same_work
from quantizer.runs.ranks.variants import for_all_variants, quantizer_of
from quantizer.runs.run_context import ResumeFiles, sizes_of
from quantizer.runs.run_engines import RunEngines, nearest_form
from quantizer.runs.run_reports import write_reports
from quantizer.runs.saved.kept_engines import KeptEngines
from quantizer.runs.search import measure_sensitivity, search_fallback, with_causes_of
from quantizer.runs.task_metric import Metric
from quantizer.runs.train import TrainingResult, train
from quantizer.runs.workload.open_axes import settle_axes
from quantizer.runs.workload.workload import Load
from quantizer.sensitivity.fallback import fallback_record
from quantizer.tasks import Batch

QUANTIZER = "quantizer"
"""The folder in it with the calibrated quantizer."""

_HISTOGRAMS = 6

Value = TypeVar("Value")


class RunCourse:
    """One run in progress.

    Attributes:
        target: the folder that is being filled.
        work: the model, the rows and the scores.
        budget: the budget of a search for fallback, checked on tuning rows that it does not see.
        fixed: which sizes the model fixes, in sentences.
        outputs: how far the engine's outputs are from the float model's, at several sizes.
        alone: the sizes that an engine takes alone, by its name, in sentences.
        refused: why an engine is not delivered, by its name.
    """

    def __init__(
        self, config: RunConfig, name: str, target: Path, kept: ResumeFiles, timer: StageTimer, load: Load
    ) -> None:
        self.name = name
        self.target = target
        with timer("load model and data"):
            self.work = load(timer, kept, target)
            self.fixed = settle_axes(self.work.context, config.export.opset, target)
        self.config = config = self.work.fit(config)
        settings = dump_yaml(config)
        (target / "config.yaml").write_text(settings, encoding="utf-8")
        self.context, self.rows, self.scoring = self.work.context, self.work.rows, self.work.scorer
        # Those of the calibration are compared when they are dealt out.
        dealt = {"evaluation": self.rows.evaluation, "tuning": self.rows.tuning, "training": self.rows.training}
        require_same_work(settings, self.context.model, {**dealt, "head": self.rows.head})
        max_drop = None if config.fallback is None else config.fallback.max_drop
        checked = config.qat is None and runs_here(config.quantizer.backend)
        self.budget = self.work.budget(max_drop, checked=checked)
        self.budget.warn("fallback.max_drop")
        self.model = self.context.model
        self.placement = RunPlacement(self.context, config, target)
        self.choice: EngineChoice | None = None
        self.quantizer = Quantizer(config.quantizer)
        self.engines = RunEngines(self.context, config, target)
        self.forms: dict[str, nn.Module] = {}
        self.built: dict[str, BuildResult] = {}
        self.outputs: tuple[OutputDistance, ...] = ()
        self.alone: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._compared: BuildResult | None = None
        self._references = References([])
        self.training: TrainingResult | None = None

    def make(self, among: Sequence[str] | None) -> None:
        """Carry out the stages up to the scores of frozen models; all processes come here."""
        self._check(self.quantizer)
        batches = self._calibrate(self.quantizer)
        if among is not None:
            self._pick(among)
        quantizer = self.quantizer
        self.placement.price(quantizer, self.engines)
        proxy = self._choose(quantizer, batches)
        while True:
            self.forms, self.training = self._quantize(quantizer)
            max_drop = from_first_rank(self._drop_of_engine, float | None)
            if max_drop is not None:
                assert proxy is not None
                self._search(quantizer, proxy, max_drop)
            elif self.placement.is_fast_enough(quantizer, proxy, self.engines):
                break
        self.scoring.take({"float": self.model, **self.forms})

    def _pick(self, among: Sequence[str]) -> None:
        """Go on with the fastest engine, its configuration and its quantizer."""
        calibrated = for_all_variants(self.config, self.quantizer, among)
        picked: list[Picked] = []

        def choose() -> dict[str, Any]:
            kept = KeptEngines(self.context.resume.engines, self.work.scored_rows)
            rows = self.rows.evaluation
            picked.append(
                pick_backend(self.context, self.config, calibrated, self.scoring, rows, self.target, among, kept)
            )
            return picked[0].config.model_dump(mode="json")

        told = from_first_rank(choose, Any)
        if picked:
            self.config, self.quantizer, self.choice = picked[0].config, picked[0].quantizer, picked[0].choice
            self.engines = picked[0].engines
        else:
            self.config = RunConfig.model_validate(told)
            self.quantizer = quantizer_of(self.config, calibrated)
        (self.target / "config.yaml").write_text(dump_yaml(self.config), encoding="utf-8")

    def _drop_of_engine(self) -> float | None:
        """Build the engines, and return what the next search may drop; None if the engine meets the budget."""
        form, trained = self.forms["proxy" if self.training is None else "qat"], self.training is not None
        self.built = self.engines.build(self.quantizer, form, trained=trained)
        self._compare(form)
        chosen, engine = self.quantizer.chosen_fallback, self.engines.load().get("engine")
        return self._scored(lambda: self.budget.next_drop(engine, 0 if chosen is None else len(chosen.groups)), None)

    def report(self) -> RunRecord:
        """Carry out what is left: save the quantizer, measure the engines, and write the reports."""
        quantizer, forms, built = self.quantizer, self.forms, self.built
        quantizer.save(self.target / QUANTIZER)
        # An engine without the precision that was asked for is found before the time for its score is spent.
        inspection = self._inspect(built["engine"])
        near = nearest_form(self.engines.load(), quantizer, self.model)
        plain = self.scoring.scores(forms)
        scores = self._scored(lambda: self.scoring.scores({**forms, **near}), plain) if near else plain
        float_engine_db = self._compare_float()
        loaded = self.engines.load()
        if "engine" in self.refused:
            # Nobody runs the float engine of it alone.
            loaded, built = {}, {name: one for name, one in built.items() if name != "engine"}
        latency = measure_latency(self.context, self.config, loaded, self.engines.float_name)
        record = self._record(scores, built, latency, inspection)
        record = replace(
            record,
            outputs=self.outputs,
            float_engine_db=float_engine_db,
            fixed=(*self.fixed, *self.alone.values()),
            engine_refused=self.refused.get("engine"),
            float_engine_refused=self.refused.get("float"),
        )
        for name in self.refused:
            self.built[name].path.unlink()
        # A sweep looks for them when the folder is in its place.
        if self.work.calibrations is None:
            record = with_causes_of(record, self.context, self.config, quantizer, self.rows.calibration)
        record = replace(record, stages=tuple(self.context.timer.done))
        write_reports(record, self.config.report.formats, self.target)
        self.work.write_call(self.target)
        return record

    def _check(self, quantizer: Quantizer) -> None:
        """Raise errors now that would otherwise come after minutes of calibration."""
        config = self.config
        require_tools({config.quantizer.backend: build_options(self.config)}, html="html" in config.report.formats)
        self.work.check()
        if config.quantizer.formats:
            # Raises if a rule matches nothing, which would otherwise happen when the plan is made.
            quantizer.inspect(self.model)

    def _calibrate(self, quantizer: Quantizer) -> list[Batch]:
        """Calibrate, after fitting the head if the task has one, and return the calibration batches."""
        self.work.fit_head()
        batches = in_several(self.context.feed.batches, self.rows.calibration)
        with self.context.timer("calibrate"):
            self.work.calibrate(quantizer, batches)
            if get_world_size() > 1:
                # Here all choose ranges and codes together; one process does when it first needs the plan.
                _ = quantizer.plan
        return batches

    @cached_property
    def metric(self) -> Metric:
        """The score on tuning rows, or by a function, for what is chosen by it."""
        return self.work.metric(self.budget.searched)

    def _choose(self, quantizer: Quantizer, batches: list[Batch]) -> nn.Module | None:
        """Measure sensitivity, and let the groups fall back to float that are asked for; return the proxy, if any."""
        asked, amp = self.config.fallback, self.config.amp or AmpConfig()
        if self.config.amp is None and asked is None:
            return None
        by_metric = amp.measure == "metric"

        def measured(mine: Quantizer) -> nn.Module:
            proxy = mine.amp(
                self.model,
                measure=amp.measure,
                granularity=amp.granularity,
                metric=self.metric if by_metric else None,
                higher_is_better=not by_metric or self.metric.higher_is_better,
            )
            if self.config.amp is not None:
                measure_sensitivity(self.context, mine, proxy, [] if by_metric else batches[: amp.batches])
            return proxy

        # A score is taken on tuning rows, which the budgets of runs share out differently.
        proxy = measured(quantizer) if by_metric else self.work.amp(quantizer, str(self.config.amp), measured)
        if asked is not None and asked.max_drop is None:
            how = asked.model_dump(include={"num", "ratio", "names", "min_speedup", "costs"})
            quantizer.fallback(proxy, prices=self.placement.prices, **how)
        elif asked is not None and asked.max_drop is not None:
            self._search(quantizer, proxy, asked.max_drop)
        return proxy

    def _search(self, quantizer: Quantizer, proxy: nn.Module, max_drop: float) -> None:
        asked = self.config.fallback
        assert asked is not None
        most, costs, prices = asked.evaluations, asked.costs, self.placement.prices
        search_fallback(
            self.context, quantizer, proxy, self.metric, max_drop, max_evaluations=most, costs=costs, prices=prices
        )

    def _quantize(self, quantizer: Quantizer) -> tuple[dict[str, nn.Module], TrainingResult | None]:
        """Return the frozen model, with training also that of PTQ before it; and the result of the training."""
        settings, course = self.config.qat, None
        forms = {}
        if settings is not None:
            forms["ptq"] = quantizer.quantize(self.model)
            # Of the float model that training changes.
            self.context.exported.clear()
            course = train(self.context, settings, quantizer, self.rows.training, self.metric)
        with self.context.timer("quantize"):
            forms["proxy" if course is None else "qat"] = quantizer.quantize(self.model)
        return forms, course

    def _compare(self, proxy: nn.Module) -> None:
        """Compare the engine's outputs with those of the proxy and the float model, at several sizes.

        A model for all sizes that is wrong is replaced by such for fixed sizes. An engine that is wrong is refused.
        """
        if self.built["engine"] is self._compared:
            return
        feed, self.outputs = self.context.feed, ()
        self.alone.pop("engine", None)
        self.refused.pop("engine", None)
        with self.context.timer("compare the outputs"):
            samples = feed.samples(self.rows.evaluation or self.rows.calibration)
            batches = check_batches(feed, samples, checked_shapes(self.config))
            self._references = References(batches, apart=feed.rows_apart)
            try:
                if not self.engines.runs_here:
                    self.outputs = output_distances(self.model, proxy, None, batches, apart=feed.rows_apart)
                else:
                    checks = self._right("engine", proxy, tolerance(None, True, torch.float32))
                    self.outputs = distances_of(checks, engine=True)
            except WrongEngineError as wrong:
                self.outputs = distances_of(wrong.checks, engine=True)
                self._refuse(str(wrong))
            except EngineError as error:
                # What was measured until here is not thrown away for it; the verdict says that nothing was compared.
                self.context.timer.say(f"warning: {error}")
        self.built = self.engines.built
        self._compared = self.built["engine"]

    def _compare_float(self) -> float | None:
        """Return the SQNR of the float engine's worst output at any size; None: there is no difference."""
        if not self.engines.runs_here:
            return None
        precision = self.config.engine.inference_precision
        computed = self.config.quantizer.target.torch_dtype if precision is None else getattr(torch, precision)
        with self.context.timer("compare the float engine"):
            try:
                checks = self._right("float", self.model, tolerance(None, False, computed))
            except WrongEngineError as wrong:
                self.refused["float"] = str(wrong)
                return wrong.decibels
            except EngineError as error:
                self.context.timer.say(f"warning: the float engine: {error}")
                return NOTHING_DB
        return min((one.sqnr_db for one in checks if one.sqnr_db is not None), default=None)

    def _right(self, name: str, model: nn.Module, bound: Tolerance) -> tuple[OutputCheck, ...]:
        """Return the checks of an engine that is right, as it is or, from now on, for fixed sizes."""
        right = right_engine(
            self.engines.load()[name],
            self.built[name],
            self._references,
            (model, self.model),
            bound,
            partial(self.engines.build_for, name),
        )
        self.built = self.engines.built
        if right.note is not None:
            self.alone[name] = f"the {'engine' if name == 'engine' else 'float engine'} takes {right.note}"
            self.context.timer.say(f"warning: {self.alone[name]}")
        return right.checks

    def _refuse(self, why: str) -> None:
        self.refused["engine"] = why
        self.engines.refuse()
        self.context.timer.say(f"warning: {refusal(why)}")

    def _scored(self, take: Callable[[], Value], otherwise: Value) -> Value:
        """Return what scores an engine; where that needs a size that it does not take alone, it is refused."""
        try:
            return take()
        except EngineError as error:
            if "engine" not in self.alone:
                raise
            self._refuse(f"{self.alone.pop('engine')}, and its score needs others: {error}")
            return otherwise

    def _inspect(self, built: BuildResult) -> Inspection:
        """Return the precisions of the engine's layers; the verdict tells which of those asked for are missing."""
        with self.context.timer("inspect the engine"):
            return observe_engine(
                self.config.quantizer.backend,
                built.path,
                built.path.with_suffix(".onnx"),
                threads=self.config.engine.threads,
                sizes=run_sizes(self.config, self.context),
                required=False,
            )

    def _record(
        self,
        scores: tuple[Score, ...],
        built: Mapping[str, BuildResult],
        latency: Latency | None,
        inspection: Inspection,
    ) -> RunRecord:
        """Return the record of the run, after measuring memory."""
        config, quantizer, course = self.config, self.quantizer, self.training
        coverage, chosen = quantizer.coverage, quantizer.chosen_fallback
        return RunRecord(
            name=self.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=config.model_dump(mode="json"),
            model=self.work.info,
            scores=scores,
            latency=latency,
            size=sizes_of(built),
            memory=measure_memory(self.context, config, built) if latency else (),
            coverage=site_records(coverage),
            covered_share=coverage.share,
            escaped=coverage.escaped.rows,
            histograms=tuple(quantizer.histogram(name).data for name in noisiest(quantizer.plan, _HISTOGRAMS)),
            sensitivity=quantizer.sensitivity.rows if config.amp is not None else (),
            measure=quantizer.sensitivity.measure if config.amp is not None else None,
            fallback=None if chosen is None else fallback_record(chosen, self.budget.asked, self.budget.checks, scores),
            training=None if course is None else course.record(self.context.task),
            choice=with_deployed(self.choice, latency, config.quantizer.backend, "float" not in self.refused),
            placement=self.placement.record(quantizer),
            engine=None
            if "engine" not in built
            else engine_file(config.quantizer.backend, built["engine"], ran=latency is not None, scored=bool(scores)),
            inspection=inspection,
            diff=quantizer.diff(self.model),
            versions=collect_versions(),
            machine=collect_machine(),
        )
