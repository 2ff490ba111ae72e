"""The engines of a model in parts: exported, built, loaded and checked, for one way to build them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quantizer.common.decoder_cache import PAST
from quantizer.engines import BuildOptions, BuildResult, Engine, InputSizes, load_engine, runs_here
from quantizer.engines.candidates import Variant
from quantizer.engines.measure import tried_build
from quantizer.errors import EngineError
from quantizer.export import export_onnx
from quantizer.quantizer import Quantizer
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.parts.loaded import engine_run
from quantizer.runs.convert.parts.part_batches import PartBatches, part_batches
from quantizer.runs.convert.parts.request import PartsRequest
from quantizer.runs.outputs.compare_outputs import (
    OutputCheck,
    Reference,
    Tolerance,
    check_engine,
    reference_outputs,
    tolerance,
)
from quantizer.runs.run_context import RunContext
from quantizer.targets import profile
from quantizer.tasks import Batch
from quantizer.tasks.seq2seq.parts import DECODER, ENCODER, ENCODER_STEPS, WITH_PAST, dynamic_axes, parts_of
from quantizer.tasks.seq2seq.writer import Steps, in_parts

_STEPS = 16
_EXAMPLE_STEPS = 4
"""Tokens that are written for a check and for an export."""

GENERATED = "generated"
"""The name for the whole in the place of a part."""


@dataclass(frozen=True)
class PartMade:
    """The engine of one part: its files, itself if it runs here, and its outputs against PyTorch's."""

    onnx: Path
    built: BuildResult
    engine: Engine | None = None
    checks: tuple[OutputCheck, ...] = ()


@dataclass(frozen=True)
class PartsMade:
    """The engines of all parts.

    Attributes:
        variant: how they are built.
        parts: each part, by its name.
        quantized: the frozen proxy of the whole model; None: they are the float model's.
        model: a model of transformers that generates with them; None: they do not run here.
        steps: the logits at each token of a text that is read one by one, against PyTorch's.
    """

    variant: Variant
    parts: dict[str, PartMade]
    quantized: nn.Module | None
    model: Any = None
    steps: tuple[OutputCheck, ...] = ()

    @property
    def checks(self) -> list[OutputCheck]:
        """All checks of outputs."""
        return [*(check for part in self.parts.values() for check in part.checks), *self.steps]


class PartMaker:
    """Maker of the engines of all parts.

    Args:
        asked: the request.
        facts: the sizes that they are built for.
        context: the float model and its task.
        samples: what is read at each of the shapes, for the checks.
        tokens: the most tokens that are written.
        scratch: a folder for all files.
    """

    def __init__(
        self,
        asked: PartsRequest,
        facts: ConversionInputs,
        context: RunContext,
        samples: list[Any],
        tokens: int,
        scratch: Path,
    ) -> None:
        self.asked = asked
        self.facts = facts
        self.context = context
        self.tokens = tokens
        self.scratch = scratch
        self.parts = parts_of(context.model)
        self._samples = samples
        self._references: dict[str, list[Reference]] = {}

    @cached_property
    def checked_on(self) -> list[PartBatches]:
        """The inputs of the parts at each shape."""
        # Where two sequences have one length, the last step is left out.
        steps = max(3, min(_STEPS, self.tokens))
        inputs = self.context.task.inputs
        reads = [inputs.filled(self._samples, *shape) for shape in self.facts.shapes]
        return [part_batches(self.context.model, self.parts, read, steps) for read in reads]

    @cached_property
    def example(self) -> PartBatches:
        """The inputs of the parts for an export."""
        return part_batches(self.context.model, self.parts, self.context.task.example(), _EXAMPLE_STEPS)

    def variant(self, name: str) -> Variant:
        """Return how the engines of a backend are built that was asked for by its name."""
        precision = self.asked.inference_precision if profile(name).inference_precisions else None
        return Variant(backend=name, dtype=self.asked.dtype, precision=precision, compiled=self.asked.compiled)

    def made(self, variant: Variant, quantizer: Quantizer | None) -> PartsMade:
        """Export, build and check the engines of all parts."""
        stage, quantized = self.context.timer, None
        if quantizer is not None:
            with stage("quantize"):
                quantized = quantizer.quantize(self.context.model)
        modules = self.parts if quantized is None else parts_of(quantized)
        folder = self.scratch / variant.file_name
        folder.mkdir()
        files = self._exported(variant, quantizer, modules)
        built = {name: self._built(variant, path, folder / f"{name}.engine") for name, path in files.items()}
        if not runs_here(variant.backend):
            return PartsMade(variant, {name: PartMade(files[name], one) for name, one in built.items()}, quantized)
        engines = {
            name: load_engine(variant.backend, one.path, threads=self.asked.threads) for name, one in built.items()
        }
        model = in_parts(self.context.model, {name: partial(engine_run, one) for name, one in engines.items()})
        bound = self.tolerance(variant)
        with stage("check the outputs against PyTorch"):
            parts = {
                name: PartMade(files[name], built[name], one, self._checked(name, one, modules[name], bound))
                for name, one in engines.items()
            }
            steps = Steps(model, self.checked_on[0].first, variant.backend)
            base = Steps(self.context.model if quantized is None else quantized, steps.first, "PyTorch")
            checks = self._checked(GENERATED, cast(Any, steps), base, bound)
            return PartsMade(variant, parts, quantized, model, checks)

    def options(self, variant: Variant, dynamic: Mapping[str, Sequence[int]] | None = None) -> BuildOptions:
        """Return the options of a build."""
        return BuildOptions(
            dynamic=dynamic or {},
            compute_capability=self.capability(variant.backend),
            inference_precision=variant.precision,
            compiled=variant.compiled,
        )

    def capability(self, name: str) -> str | Sequence[str] | None:
        """Return the GPUs that a backend builds for ahead of time, if it does."""
        return self.asked.capability if profile(name).capabilities else None

    def tolerance(self, variant: Variant) -> Tolerance:
        """Return the tolerance of engines, by the precision in which they compute floats."""
        told = variant.precision
        dtype = profile(variant.backend).torch_dtype if told is None else getattr(torch, told)
        return tolerance(self.asked.tolerance, variant.dtype is not None, dtype)

    def _exported(
        self, variant: Variant, quantizer: Quantizer | None, modules: Mapping[str, nn.Module]
    ) -> dict[str, Path]:
        """Return the ONNX file of each part; engines of one kind share them."""
        target = profile(variant.backend)
        kind = f"{variant.backend}-{variant.dtype}" if quantizer is not None else f"float-{target.opset}"
        folder = self.scratch / f"{kind}-onnx"
        files = {name: folder / f"{name}.onnx" for name in modules}
        if folder.exists():
            return files
        # Complete or absent: another variant of the kind would take what failed halfway for files.
        unfinished = folder.with_name(f"{kind}-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        fixed = self.facts.sequence is None
        with self.context.timer("export" if quantizer is not None else "export the float model"):
            for name, module in modules.items():
                batch, file = self._example(name), unfinished / files[name].name
                axes = dynamic_axes(name, batch, fixed_steps=fixed)
                if quantizer is None:
                    opset = self.asked.opset or target.opset
                    export_onnx(module, file, batch, opset=opset, dtype=target.torch_dtype, axes=axes)
                else:
                    quantizer.export(module, file, batch, opset=self.asked.opset, dynamic_axes=axes)
        unfinished.rename(folder)
        return files

    def _example(self, name: str) -> Batch:
        batch = self.example.parts[name]
        # A dynamic axis needs two tokens in the example.
        return {**batch, "input_ids": self.example.written[:, :-1]} if name == DECODER else batch

    def _built(self, variant: Variant, onnx: Path, engine: Path) -> BuildResult:
        options = self.options(variant, self.dimensions[onnx.stem])
        with self.context.timer("build the engine"):
            if not self.asked.variants:
                return self.context.timer.build(variant.backend, onnx, engine, options)
            # Where others can take its place, a candidate may crash or hang.
            sizes = InputSizes(self.facts.batch[0], 16 if self.facts.sequence is None else self.facts.sequence[0])
            return tried_build(variant.backend, onnx, engine, options, threads=self.asked.threads, sizes=sizes)

    @cached_property
    def dimensions(self) -> dict[str, dict[str, tuple[int, int, int]]]:
        """The sizes of the dynamic dimensions of each part."""
        model: Any = self.context.model
        beams = model.generation_config.num_beams or 1
        least, usual, most = self.facts.batch
        batch = {"batch": (least, usual * beams, most * beams)}
        first = self.example.first
        steps = {} if self.facts.sequence is None else {ENCODER_STEPS: self.facts.sequence}
        past = (1, max(1, self.tokens // 2), self.tokens + first)
        return {
            ENCODER: self.facts.dimensions,
            DECODER: {**batch, **steps, "sequence": (1, first, max(first, self.tokens))},
            WITH_PAST: {**batch, **steps, PAST: past},
        }

    def _checked(self, name: str, engine: Engine, module: nn.Module, bound: Tolerance) -> tuple[OutputCheck, ...]:
        """Return the outputs of a part's engine against those of its module in PyTorch, at each shape."""
        plain, expected = self._plain(name, engine.output_names), self._outputs(name, module, engine.output_names)
        try:
            return tuple(check_engine(engine, expected, plain, bound))
        except EngineError as error:
            raise EngineError(f"{name}: {error}") from error

    def references(
        self, name: str, quantized: nn.Module | None, names: Sequence[str]
    ) -> tuple[list[Reference], list[Reference]]:
        """Return PyTorch's outputs of a part, and those of the float model, at each shape."""
        module = (self.parts if quantized is None else parts_of(quantized))[name]
        return self._outputs(name, module, names), self._plain(name, names)

    def _outputs(self, name: str, module: nn.Module, names: Sequence[str]) -> list[Reference]:
        if module.model is self.context.model:
            return self._plain(name, names)
        return reference_outputs(module, self._batches(name), names)

    def _plain(self, name: str, names: Sequence[str]) -> list[Reference]:
        """Return what the float model computes for a part, which is the same for all engines."""
        if name not in self._references:
            module = self.parts.get(name) or Steps(self.context.model, self.checked_on[0].first, "PyTorch")
            self._references[name] = reference_outputs(module, self._batches(name), names)
        return self._references[name]

    def _batches(self, name: str) -> list[Batch]:
        return [one.steps if name == GENERATED else one.parts[name] for one in self.checked_on]
