"""Engines of one conversion: quantized, exported, built, and held to PyTorch's outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quantizer.common.records import EngineCheck
from quantizer.engines import (
    BuildOptions,
    BuildResult,
    Engine,
    InputSizes,
    interleaved_latency,
    load_engine,
    medians,
    runs_here,
)
from quantizer.engines.candidates import Variant
from quantizer.export import export_onnx
from quantizer.quantizer import Quantizer
from quantizer.runs.budget.engine_budget import EngineBudget
from quantizer.runs.choose_engine import HOPELESS, require_sites
from quantizer.runs.convert.folder import ENGINE, ONNX
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.outputs.compare_outputs import OutputCheck, References, Tolerance, tolerance
from quantizer.runs.outputs.right_engine import OnlySizes, right_engine
from quantizer.runs.placement.place_groups import GroupPlacer
from quantizer.runs.placement.price_groups import EngineFiles, TimeCache, Timing
from quantizer.runs.placement.rough_plan import rough_engine
from quantizer.runs.run_context import RunContext, engine_inputs
from quantizer.runs.saved.kept_engines import KeptEngines
from quantizer.runs.search import measure_sensitivity, search_fallback
from quantizer.runs.task_metric import TaskMetric
from quantizer.sensitivity.prices import Prices
from quantizer.targets import profile
from quantizer.tasks import Batch, Row

_AMP_BATCHES = 4
_FEW_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Made:
    """One engine that was built.

    Attributes:
        variant: its backend, and how it was built.
        onnx: the file that it was built from.
        built: the engine's file.
        quantized: the frozen proxy; None: it is the float model's.
        quantizer: what made the proxy.
        budget: the checks of engines against ``max_drop``.
        engine: the engine; None: it does not run here.
        checks: its outputs against PyTorch's.
        prices: the times of its groups; None: they were not measured.
        only_sizes: the sizes that the engine takes; empty: all.
        sizes: these in a sentence, with the reason; None: it takes all.
    """

    variant: Variant
    onnx: Path
    built: BuildResult
    quantized: nn.Module | None = None
    quantizer: Quantizer | None = None
    budget: tuple[EngineCheck, ...] = ()
    engine: Engine | None = None
    checks: tuple[OutputCheck, ...] = ()
    prices: Prices | None = None
    only_sizes: OnlySizes = ()
    sizes: str | None = None


class EngineMaker:
    """Maker of the engines that were asked for.

    Args:
        asked: the request.
        facts: the inputs that all backends share.
        context: the model and its task.
        batches: the calibration batches.
        checked_on: the batches of the output check, of several shapes.
        timed_on: those that engines are timed on.
        tuning: the labelled rows for ``max_drop``.
        scratch: a folder for files that are not kept.

    Attributes:
        kept: builds the engines of a choice, and keeps them for a conversion that goes on after this one is stopped.
        references: PyTorch's outputs for ``checked_on``.
    """

    def __init__(
        self,
        asked: ConversionRequest,
        facts: ConversionInputs,
        context: RunContext,
        batches: list[Batch],
        checked_on: list[Batch],
        timed_on: list[Batch],
        tuning: list[Row],
        scratch: Path,
    ) -> None:
        self.asked = asked
        self.facts = facts
        self.context = context
        self.batches = batches
        self.timed_on = timed_on
        self.tuning = tuning
        self.scratch = scratch
        self.stage = context.timer
        self.kept = KeptEngines(None, None)
        self._plain: dict[Variant, Made] = {}
        self.references = References(checked_on)

    def variant(self, name: str) -> Variant:
        """Return how the engine of a backend is built that was asked for by its name."""
        dtype = (self.asked.dtype or "int8") if self.asked.quantization else None
        precision = self.asked.inference_precision if profile(name).inference_precisions else None
        return Variant(backend=name, dtype=dtype, precision=precision)

    def quantized(self, variant: Variant, quantizer: Quantizer, folder: Path, beside: Engine | None = None) -> Made:
        """Quantize, export, build and check, with ``max_drop`` again until the engine meets it, too."""
        allowed, amp, model = self.asked.max_drop, None, self.context.model
        budget = self.budget(variant.backend)
        sizes = (self.facts.batch[1], self.facts.sequence, self.facts.seconds)
        read = (self.facts.source, self.facts.task, sizes, self.facts.labels, self.asked.template)
        metric = TaskMetric(read, self.context.task, budget.searched, [])
        made = self._quantized(variant, quantizer, folder)
        if beside is not None and made.engine is not None and self.ratio(made.engine, beside) >= HOPELESS:
            return self._judged(made)
        prices = None if made.engine is None else self._prices(made, quantizer)
        if prices is not None and prices.slower():
            quantizer.fallback(None, prices=prices)
        while True:
            if allowed is not None:
                if amp is None:
                    amp = quantizer.amp(model)
                    measure_sensitivity(self.context, quantizer, amp, self.batches[:_AMP_BATCHES])
                search_fallback(self.context, quantizer, amp, metric, allowed, prices=prices)
            chosen = quantizer.chosen_fallback
            if chosen is not None and chosen.reasons():
                made = self._quantized(variant, quantizer, folder)
            allowed = budget.next_drop(made.engine, 0 if chosen is None else len(chosen.groups))
            if allowed is None:
                break
        return self._checked(replace(made, budget=tuple(budget.checks), prices=prices))

    def as_calibrated(self, variant: Variant, quantizer: Quantizer, folder: Path) -> Made:
        """Quantize, export, build and check, with nothing put back; with ``max_drop`` the engine's drop is told."""
        return self._judged(self._quantized(variant, quantizer, folder))

    def rebuilt(self, variant: Variant, made: Made, engine: Path) -> Made:
        """Build and check another variant of a quantized engine from the same file."""
        engine.parent.mkdir()
        built = self._built(variant, made.onnx, engine)
        return self._judged(replace(made, variant=variant, built=built, engine=self._loaded(built, variant)))

    def rough_engine(self, variant: Variant, calibrated: Quantizer) -> Engine:
        """Build a quantized engine from a plan that is made in a moment, to see how fast it is."""

        def build(onnx: Path, path: Path) -> Engine:
            engine = self._loaded(self._built(variant, onnx, path), variant)
            assert engine is not None
            return engine

        stem, context = self.scratch / f"{variant.backend}-rough", self.context
        with self.stage("try a rough plan"):
            return rough_engine(calibrated, variant.backend, context.model, context.task.example(), stem, build)

    def ratio(self, engine: Engine, beside: Engine) -> float:
        """Return how many times as long as another one an engine takes, at the usual shape."""
        batch = self.timed_on[self.facts.usual]
        pair = {"this": engine, "other": beside}
        calls = {name: partial(one, engine_inputs(one, batch)) for name, one in pair.items()}
        taken = medians(interleaved_latency(calls, rounds=_FEW_ROUNDS, warmup=1))
        return taken["this"] / taken["other"]

    def _judged(self, made: Made) -> Made:
        budget = self.budget(made.variant.backend)
        chosen = None if made.quantizer is None else made.quantizer.chosen_fallback
        budget.next_drop(made.engine, 0 if chosen is None else len(chosen.groups))
        return self._checked(replace(made, budget=tuple(budget.checks)))

    def budget(self, name: str) -> EngineBudget:
        """Return the budget of a backend's engine, before anything was checked against it."""
        return EngineBudget(self.context, self.asked.max_drop, self.tuning, checked=runs_here(name))

    def _quantized(self, variant: Variant, quantizer: Quantizer, folder: Path) -> Made:
        """Quantize, export and build."""
        with self.stage("quantize"):
            if variant.dynamic or self.asked.chooses:
                require_sites(quantizer)
            quantized = quantizer.quantize(self.context.model)
        with self.stage("export"):
            quantizer.export(quantized, folder / ONNX, self.context.task.example())
        built = self._built(variant, folder / ONNX, folder / ENGINE)
        return Made(
            variant=variant,
            onnx=folder / ONNX,
            built=built,
            quantized=quantized,
            quantizer=quantizer,
            engine=self._loaded(built, variant),
        )

    def _prices(self, made: Made, quantizer: Quantizer) -> Prices | None:
        """Return what the groups of a plan are worth in time, in the middle one of the shapes, if that can be told."""
        assert made.quantized is not None
        plain = self.plain_engine(made.variant)
        batch, sequence = self.facts.shapes[self.facts.usual]
        placer = GroupPlacer(
            model=self.context.model,
            example=self.context.task.example(),
            timing=Timing(
                backend=made.variant.backend,
                sizes=InputSizes(batch, sequence or batch),
                threads=self.asked.threads,
                options=repr(made.variant),
            ),
            cache=TimeCache(self.context.resume.times),
            build=partial(self._built, made.variant),
            folder=self.scratch,
            say=self.stage.tell,
        )
        low, high = (EngineFiles(onnx=one.onnx, engine=one.built.path) for one in (made, plain))
        with self.stage("time the groups"):
            return placer.prices(quantizer, made.quantized, low, high)

    def plain_engine(self, variant: Variant) -> Made:
        """Return the engine of the float model beside a variant, in a file that is not kept; it is built once."""
        plain = _in_float(variant)
        if plain not in self._plain:
            engine = self.scratch / f"{plain.file_name}.engine"
            self._plain[plain] = self.float_engine(plain, self.float_file(plain.backend), engine, checked=False)
        return self._plain[plain]

    def known_plain_engine(self, variant: Variant) -> Made | None:
        """Return the engine of the float model beside a variant if it was built; None: it was not, or failed."""
        return self._plain.get(_in_float(variant))

    def checked_plain_engine(self, variant: Variant) -> Made:
        """Return it with its outputs checked."""
        return self._checked(self.plain_engine(variant))

    def float_engine(self, variant: Variant, onnx: Path, engine: Path, *, checked: bool = True) -> Made:
        """Export the float model, if ``onnx`` does not exist, and build and check its engine."""
        if not onnx.exists():
            with self.stage("export" if checked else "export the float model"):
                self.export_float(variant.backend, onnx)
        built = self._built(variant, onnx, engine)
        made = Made(variant=variant, onnx=onnx, built=built, engine=self._loaded(built, variant))
        return self._checked(made) if checked else made

    def float_file(self, name: str) -> Path:
        """Return where the float model is exported to if its file is not kept; backends of one kind share it."""
        return self.scratch / f"{profile(name).float_dtype}-{profile(name).opset}.onnx"

    def export_float(self, name: str, path: Path) -> None:
        """Export the float model for a backend."""
        target = profile(name)
        export_onnx(self.context.model, path, self.context.task.example(), opset=target.opset, dtype=target.torch_dtype)

    def options(self, variant: Variant) -> BuildOptions:
        """Return the options of a build."""
        return BuildOptions(
            dynamic=self.facts.dimensions,
            compute_capability=self.capability(variant.backend),
            inference_precision=variant.precision,
            compiled=variant.compiled,
        )

    def capability(self, name: str) -> str | None:
        """Return the GPU that a backend builds for ahead of time, if it does."""
        return self.asked.compute_capability if profile(name).capabilities else None

    def tolerance(self, variant: Variant) -> Tolerance:
        """Return the tolerance of an engine, by the precision in which it computes floats."""
        told = variant.precision
        dtype = profile(variant.backend).torch_dtype if told is None else getattr(torch, told)
        return tolerance(self.asked.tolerance, variant.dtype is not None, dtype)

    def _built(self, variant: Variant, onnx: Path, engine: Path) -> BuildResult:
        name, options = variant.backend, self.options(variant)
        with self.stage("build the engine"):
            if not self.asked.chooses:
                return self.stage.build(name, onnx, engine, options)
            # Where others can take its place, a candidate may crash or hang.
            sizes = InputSizes(self.facts.batch[0], 16 if self.facts.sequence is None else self.facts.sequence[0])
            return self.kept.build(name, onnx, engine, options, threads=self.asked.threads, sizes=sizes)

    def _loaded(self, built: BuildResult, variant: Variant) -> Engine | None:
        name = variant.backend
        return load_engine(name, built.path, threads=self.asked.threads) if runs_here(name) else None

    def _checked(self, made: Made) -> Made:
        """Return what was made with the checks of its outputs; none if it does not run here."""
        if made.engine is None:
            return made
        with self.stage("check the outputs against PyTorch"):
            right = right_engine(
                made.engine,
                made.built,
                self.references,
                (self.context.model if made.quantized is None else made.quantized, self.context.model),
                self.tolerance(made.variant),
                # Of several candidates those are better that take all sizes.
                None if self.asked.chooses else partial(self._built_for, made),
                "Nothing was written; --tolerance sets another bound",
            )
        sizes = None if right.note is None else f"the engine takes {right.note}"
        if sizes is not None:
            self.stage.say(f"warning: {sizes}")
        return replace(
            made,
            engine=right.engine,
            built=right.built,
            checks=right.checks,
            only_sizes=right.only_sizes,
            sizes=sizes,
        )

    def _built_for(self, made: Made, only_sizes: OnlySizes) -> tuple[BuildResult, Engine]:
        name, options = made.variant.backend, replace(self.options(made.variant), only_sizes=only_sizes)
        with self.stage("build the engine"):
            built = self.stage.build(name, made.onnx, made.built.path, options)
        return built, load_engine(name, built.path, threads=self.asked.threads)


def _in_float(variant: Variant) -> Variant:
    return replace(variant, dtype=None, dynamic=False)
