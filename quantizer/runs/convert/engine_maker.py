"""Engines of one conversion: quantized, exported, built, and held to PyTorch's outputs."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from quantizer.engines import BuildOptions
from quantizer.engines import BuildResult
from quantizer.engines import Engine
from quantizer.engines import load_engine
from quantizer.engines import runs_here
from quantizer.engines.measure.trial import tried_build
from quantizer.export import export_onnx
from quantizer.quantizer import Quantizer
from quantizer.report.record import EngineCheck
from quantizer.runs.compare_outputs import OutputCheck
from quantizer.runs.compare_outputs import Tolerance
from quantizer.runs.compare_outputs import check_engine
from quantizer.runs.compare_outputs import reference_outputs
from quantizer.runs.compare_outputs import tolerance
from quantizer.runs.convert.folder import ENGINE
from quantizer.runs.convert.folder import ONNX
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.engine_budget import EngineBudget
from quantizer.runs.placement.place_groups import GroupPlacer
from quantizer.runs.placement.price_groups import EngineFiles
from quantizer.runs.placement.price_groups import TimeCache
from quantizer.runs.placement.price_groups import Timing
from quantizer.runs.run_context import RunContext
from quantizer.runs.search import measure_sensitivity
from quantizer.runs.search import search_fallback
from quantizer.runs.task_metric import TaskMetric
from quantizer.sensitivity.prices.group_prices import Prices
from quantizer.targets import profile
from quantizer.tasks import Batch
from quantizer.tasks import Row

__all__ = ["EngineMaker", "Made"]

_AMP_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Made:
    """One engine that was built.

    Attributes:
        name: its backend.
        onnx: the file that it was built from.
        built: the engine's file.
        quantized: the frozen proxy; None: it is the float model's.
        quantizer: what made the proxy.
        budget: the checks of engines against ``max_drop``.
        engine: the engine; None: it does not run here.
        checks: its outputs against PyTorch's.
    """

    name: str
    onnx: Path
    built: BuildResult
    quantized: nn.Module | None = None
    quantizer: Quantizer | None = None
    budget: tuple[EngineCheck, ...] = ()
    engine: Engine | None = None
    checks: tuple[OutputCheck, ...] = ()


class EngineMaker:
    """Maker of the engines that were asked for.

    Args:
        asked: the request.
        facts: the inputs that all backends share.
        context: the model and its task.
        batches: the calibration batches.
        checked_on: the batches of the output check, one for each shape.
        tuning: the labelled rows for ``max_drop``.
        scratch: a folder for files that are not kept.
    """

    def __init__(
        self,
        asked: ConversionRequest,
        facts: ConversionInputs,
        context: RunContext,
        batches: list[Batch],
        checked_on: list[Batch],
        tuning: list[Row],
        scratch: Path,
    ) -> None:
        self.asked = asked
        self.facts = facts
        self.context = context
        self.batches = batches
        self.checked_on = checked_on
        self.tuning = tuning
        self.scratch = scratch
        self.stage = context.timer
        self._plain: dict[str, Made] = {}

    def quantized(self, name: str, quantizer: Quantizer, folder: Path) -> Made:
        """Quantize, export, build and check, with ``max_drop`` again until the engine meets it, too."""
        allowed, amp, model = self.asked.max_drop, None, self.context.model
        budget = EngineBudget(self.context, allowed, self.tuning, checked=runs_here(name))
        read = (self.facts.source, self.facts.task, self.facts.batch[1], self.facts.sequence)
        metric = TaskMetric(read, self.context.task, budget.searched, [], self.stage.tell)
        made = self._quantized(name, quantizer, folder)
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
                made = self._quantized(name, quantizer, folder)
            allowed = budget.next_drop(made.engine, 0 if chosen is None else len(chosen.groups))
            if allowed is None:
                break
        return replace(made, budget=tuple(budget.checks), checks=self._checks(name, made.engine, made.quantized))

    def _quantized(self, name: str, quantizer: Quantizer, folder: Path) -> Made:
        """Quantize, export and build."""
        with self.stage("quantize"):
            quantized = quantizer.quantize(self.context.model)
        with self.stage("export"):
            quantizer.export(quantized, folder / ONNX, self.context.task.example())
        built = self._built(name, folder / ONNX, folder / ENGINE)
        engine = self._loaded(built, name)
        return Made(name=name, onnx=folder / ONNX, built=built, quantized=quantized, quantizer=quantizer, engine=engine)

    def _prices(self, made: Made, quantizer: Quantizer) -> Prices | None:
        """Return what the groups of a plan are worth in time, in the middle one of the shapes, if that can be told."""
        assert made.quantized is not None
        plain = self.plain_engine(made.name)
        batch, sequence = self.facts.shapes[len(self.facts.shapes) // 2]
        placer = GroupPlacer(
            model=self.context.model,
            example=self.context.task.example(),
            timing=Timing(backend=made.name, batch=batch, sequence=sequence or batch, threads=self.asked.threads),
            cache=TimeCache(self.context.resume.times),
            build=partial(self._built, made.name),
            folder=self.scratch,
            say=self.stage.say,
        )
        low, high = (EngineFiles(onnx=one.onnx, engine=one.built.path) for one in (made, plain))
        with self.stage("time the groups"):
            return placer.prices(quantizer, made.quantized, low, high)

    def plain_engine(self, name: str) -> Made:
        """Return the engine of the float model of a backend, in a file that is not kept; it is built once."""
        if name not in self._plain:
            engine = self.scratch / f"{name}.engine"
            self._plain[name] = self.float_engine(name, self.float_file(name), engine, checked=False)
        return self._plain[name]

    def checked_plain_engine(self, name: str) -> Made:
        """Return it with its outputs checked."""
        made = self.plain_engine(name)
        return replace(made, checks=self._checks(name, made.engine))

    def float_engine(self, name: str, onnx: Path, engine: Path, *, checked: bool = True) -> Made:
        """Export the float model, if ``onnx`` does not exist, and build and check its engine."""
        if not onnx.exists():
            with self.stage("export" if checked else "export the float model"):
                self.export_float(name, onnx)
        built = self._built(name, onnx, engine)
        loaded = self._loaded(built, name)
        return Made(
            name=name, onnx=onnx, built=built, engine=loaded, checks=self._checks(name, loaded) if checked else ()
        )

    def float_file(self, name: str) -> Path:
        """Return where the float model is exported to if its file is not kept; backends of one kind share it."""
        return self.scratch / f"{profile(name).float_dtype}-{profile(name).opset}.onnx"

    def export_float(self, name: str, path: Path) -> None:
        """Export the float model for a backend."""
        target = profile(name)
        export_onnx(self.context.model, path, self.context.task.example(), opset=target.opset, dtype=target.torch_dtype)

    def options(self, name: str) -> BuildOptions:
        """Return the options of a backend's build."""
        return BuildOptions(
            dynamic=self.facts.dimensions,
            compute_capability=self.capability(name),
            inference_precision=self.precision(name),
        )

    def capability(self, name: str) -> str | None:
        """Return the GPU that a backend builds for ahead of time, if it does."""
        return self.asked.compute_capability if profile(name).capabilities else None

    def precision(self, name: str) -> str | None:
        """Return in what a backend computes what is not quantized, if that can be set."""
        return self.asked.inference_precision if profile(name).inference_precisions else None

    def tolerance(self, name: str, quantized: bool) -> Tolerance:
        """Return the tolerance of an engine, by the precision in which it computes floats."""
        told = self.precision(name)
        dtype = profile(name).torch_dtype if told is None else getattr(torch, told)
        return tolerance(self.asked.tolerance, quantized, dtype)

    def _built(self, name: str, onnx: Path, engine: Path) -> BuildResult:
        with self.stage("build the engine"):
            if not self.asked.chooses:
                return self.stage.build(name, onnx, engine, self.options(name))
            # Where others can take its place, a candidate may crash or hang.
            sequence = 16 if self.facts.sequence is None else self.facts.sequence[0]
            batch, threads = self.facts.batch[0], self.asked.threads
            return tried_build(name, onnx, engine, self.options(name), threads=threads, batch=batch, sequence=sequence)

    def _loaded(self, built: BuildResult, name: str) -> Engine | None:
        return load_engine(name, built.path, threads=self.asked.threads) if runs_here(name) else None

    def _checks(self, name: str, engine: Engine | None, quantized: nn.Module | None = None) -> tuple[OutputCheck, ...]:
        if engine is None:
            return ()
        with self.stage("check the outputs against PyTorch"):
            plain = reference_outputs(self.context.model, self.checked_on, engine.output_names)
            expected = plain
            if quantized is not None:
                expected = reference_outputs(quantized, self.checked_on, engine.output_names)
            return tuple(check_engine(engine, expected, plain, self.tolerance(name, quantized is not None)))
