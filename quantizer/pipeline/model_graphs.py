"""A model as one or several graphs, each with its own ONNX file and engine.

Most models have one graph. An encoder-decoder model has three. They are calibrated, quantized and scored as one model,
and exported, built, compared and benchmarked one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from quantizer.config import RunConfig
from quantizer.engines import Engine
from quantizer.errors import TaskError
from quantizer.pipeline.compare_outputs import check_batches, checked_shapes
from quantizer.pipeline.context import RunContext, Runnable, engine_run
from quantizer.pipeline.time_groups import EngineFiles
from quantizer.report.record import Agreement
from quantizer.tasks import Batch
from quantizer.tasks.seq2seq.parts import DECODER, ENCODER, ENCODER_STEPS, PARTS, dynamic_axes, parts_of
from quantizer.tasks.seq2seq.writer import (
    PartBatches,
    Steps,
    Writer,
    calibration_batches,
    equal_texts,
    equal_tokens,
    in_parts,
    part_batches,
)
from quantizer.utils.dimension_names import PAST
from quantizer.utils.sizes import BATCH, SEQUENCE

FLOAT_STEM, QUANTIZED_STEM = "float", "model"
"""File names of the two engines, without suffix."""

ONNX_FOLDER = "onnx"
"""The folder with the ONNX files of several graphs and the model's own config."""

GENERATED = "generated"
"""The name of all graphs together, which read texts token by token."""

_TOKENS = 128
"""Default maximum number of generated tokens."""

_TIMED_TOKENS = 32
"""Maximum number of tokens in latency benchmarks."""

_STEPS, _EXAMPLE_STEPS = 16, 4
"""Number of generated tokens for an output check, and for an export."""

_COMPARED = 32
"""Number of samples whose generated texts are compared with the float model."""


class Graphs:
    """The graph of a model with one graph.

    Attributes:
        names: the graph names.
        tokens: the maximum number of generated tokens per sample; None for models that do not generate text.
    """

    names: tuple[str, ...] = (QUANTIZED_STEM,)
    tokens: int | None = None

    def __init__(self, context: RunContext) -> None:
        self.context = context

    @property
    def several(self) -> bool:
        """True for several engines."""
        return len(self.names) > 1

    def files(self, folder: Path, stem: str, name: str) -> EngineFiles:
        """Return the paths of a graph's ONNX file and engine, such as ``model.onnx`` and ``model.engine``."""
        return EngineFiles(onnx=folder / f"{stem}.onnx", engine=folder / f"{stem}.engine")

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the module of each graph, for the float model or a frozen proxy."""
        return {QUANTIZED_STEM: model}

    def example(self, name: str) -> Batch:
        """Return the example inputs for the export of a graph."""
        return self.context.feed.example()

    def axes(self, name: str) -> Any:
        """Return the dynamic axes of a graph's inputs; None for the axes of the task."""
        return self.context.feed.sizes

    def dimensions(self, config: RunConfig, name: str) -> Mapping[str, Sequence[int]]:
        """Return the [min, opt, max] sizes of each dynamic dimension of a graph."""
        sizes = self.context.feed.sizes
        return {**({} if sizes is None else sizes.ranges), **open_sizes(config)}

    def calibration(self, batches: list[Batch]) -> list[Batch]:
        """Return the calibration batches of the full model."""
        return batches

    def checked_on(self, config: RunConfig, samples: Sequence[Any]) -> dict[str, list[Batch]]:
        """Return the batches for the output comparison of each graph, at several sizes."""
        return {QUANTIZED_STEM: check_batches(self.context.feed, samples, checked_shapes(config))}

    def assembled(self, engines: Mapping[str, Engine]) -> Runnable:
        """Return the engines of all graphs as one object, called like the model."""
        return engines[QUANTIZED_STEM]

    def checked_as(self, engines: Mapping[str, Engine]) -> dict[str, Engine]:
        """Return the engines to compare, by the names of ``checked_on``."""
        return dict(engines)

    def checked_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules to compare with, by the names of ``checked_on``."""
        return self.modules(model)

    def runnable(self, model: nn.Module) -> nn.Module:
        """Return the module to score for a model."""
        return model

    def scored(self, context: RunContext) -> RunContext:
        """Return the context with the module to score."""
        return replace(context, model=self.runnable(context.model))

    def timed(self, model: Runnable) -> Runnable:
        """Return the module to benchmark for a model or assembled engines."""
        return model

    def agreement(self, samples: Sequence[Any], forms: Mapping[str, Runnable]) -> tuple[Agreement, ...]:
        """Return the agreement of generated texts with the float model; empty for models without text."""
        return ()


class WritingGraphs(Graphs):
    """The three graphs of an encoder-decoder model: encoder, decoder, and decoder with a cache."""

    names = PARTS

    def __init__(self, context: RunContext, config: RunConfig) -> None:
        super().__init__(context)
        self.tokens: int = most_tokens(config.model.new_tokens, context.model.config)
        self._modules: dict[nn.Module, dict[str, nn.Module]] = {}
        self._writers: dict[nn.Module, nn.Module] = {}
        self._checks: list[PartBatches] = []

    def files(self, folder: Path, stem: str, name: str) -> EngineFiles:
        """Return the paths of a graph's files; the files of the float model have their own folder."""
        place = folder if stem == QUANTIZED_STEM else folder / stem
        (place / ONNX_FOLDER).mkdir(parents=True, exist_ok=True)
        return EngineFiles(onnx=place / ONNX_FOLDER / f"{name}.onnx", engine=place / f"{name}.engine")

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the module of each graph."""
        if model not in self._modules:
            self._modules[model] = parts_of(model)
        return self._modules[model]

    @cached_property
    def _example(self) -> PartBatches:
        model = self.context.model
        return part_batches(model, self.modules(model), self.context.feed.example(), _EXAMPLE_STEPS)

    def example(self, name: str) -> Batch:
        """Return the example inputs for the export of a graph."""
        batch = self._example.parts[name]
        # A dynamic axis needs two tokens in the example.
        return {**batch, "input_ids": self._example.written[:, :-1]} if name == DECODER else batch

    def axes(self, name: str) -> Any:
        """Return the dynamic axes of a graph's inputs."""
        return dynamic_axes(name, self.example(name), fixed_steps=self.context.task.reads != "text")

    def dimensions(self, config: RunConfig, name: str) -> Mapping[str, Sequence[int]]:
        """Return the [min, opt, max] sizes of each dynamic dimension of a graph."""
        model: Any = self.context.model
        beams, dynamic = model.generation_config.num_beams or 1, config.export.dynamic
        minimum, usual, maximum = dynamic.batch
        texts, first = self.context.task.reads == "text", self._example.first
        if name == ENCODER:
            return {"batch": dynamic.batch, **({"sequence": dynamic.sequence} if texts else {})}
        sizes = {("batch"): (minimum, usual * beams, maximum * beams)} | (
            {ENCODER_STEPS: dynamic.sequence} if texts else {}
        )
        if name == DECODER:
            return {**sizes, "sequence": (1, first, max(first, self.tokens))}
        return {**sizes, PAST: (1, max(1, self.tokens // 2), self.tokens + first)}

    def calibration(self, batches: list[Batch]) -> list[Batch]:
        """Return the calibration batches of the full model, with texts that it generates itself."""
        with self.context.timer("generate calibration texts"):
            return calibration_batches(self.context.model, batches, self.tokens)

    def checked_on(self, config: RunConfig, samples: Sequence[Any]) -> dict[str, list[Batch]]:
        """Return the inputs of each graph and the texts to read, at the usual, minimum and maximum size."""
        if not self._checks:
            dynamic, report, model = config.export.dynamic, config.report, self.context.model
            shapes = [
                (report.latency_batch, report.latency_sequence),
                *zip(dynamic.batch, dynamic.sequence, strict=True),
            ]
            # The last step is skipped if two sequences have the same length.
            steps = max(3, min(_STEPS, self.tokens))
            inputs = self.context.feed.inputs
            reads = [inputs.filled(list(samples)[:_COMPARED], *shape) for shape in dict.fromkeys(shapes)]
            self._checks = [part_batches(model, self.modules(model), read, steps) for read in reads]
        batches = {name: [part_batch.parts[name] for part_batch in self._checks] for name in self.names}
        return {**batches, GENERATED: [part_batch.steps for part_batch in self._checks]}

    def assembled(self, engines: Mapping[str, Engine]) -> Runnable:
        """Return a model that generates texts with the engines as its layers."""
        runs = {name: partial(engine_run, engines[name]) for name in self.names}
        return Writer(in_parts(self.context.model, runs), self.tokens)

    def checked_as(self, engines: Mapping[str, Engine]) -> dict[str, Engine]:
        """Return the engine of each graph, and all engines together reading texts token by token."""
        assembled = cast(Any, self.assembled(engines)).model
        name = engines[ENCODER].name
        return {**engines, GENERATED: cast(Engine, Steps(assembled, self._checks[0].first, name))}

    def checked_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the module of each graph, and the model reading texts token by token."""
        modules = self.modules(model)
        if GENERATED not in modules:
            modules[GENERATED] = Steps(model, self._checks[0].first, "PyTorch")
        return modules

    def runnable(self, model: nn.Module) -> nn.Module:
        """Return the generating module of a model, cached."""
        if isinstance(model, Writer):
            return model
        if model not in self._writers:
            self._writers[model] = Writer(model, self.tokens)
        return self._writers[model]

    def timed(self, model: Runnable) -> Runnable:
        """Return a module that generates a fixed number of tokens."""
        inner = model.model if isinstance(model, Writer) else model
        return Writer(inner, min(_TIMED_TOKENS, self.tokens), exactly=True)

    def agreement(self, samples: Sequence[Any], forms: Mapping[str, Runnable]) -> tuple[Agreement, ...]:
        """Return the agreement of generated texts with the float model."""
        task = self.context.task
        batches = task.sample_batches(list(samples)[:_COMPARED]) or [self._checks[0].read]
        expected = self._written(self.context.model, batches)
        texts = {name: self._written(cast(nn.Module, form), batches) for name, form in forms.items()}
        return tuple(
            Agreement(
                form=name,
                samples=len(expected),
                tokens=equal_tokens(expected, actual),
                texts=equal_texts(expected, actual),
            )
            for name, actual in texts.items()
        )

    def _written(self, model: nn.Module, batches: Sequence[Batch]) -> Any:
        task, writer = self.context.task, self.runnable(model)
        with torch.no_grad():
            rows = [row.numpy() for batch in batches for row in task.collect(writer(**batch), batch)]
        longest = max(map(len, rows))
        filled = [np.pad(row, (0, longest - len(row)), constant_values=np.nan) for row in rows]
        return task.decide(np.stack(filled))


def open_sizes(config: RunConfig) -> dict[str, tuple[int, int, int]]:
    """Return the [min, opt, max] batch size and text length."""
    dynamic = config.export.dynamic
    return {BATCH: dynamic.batch, SEQUENCE: dynamic.sequence}


def graphs_of(context: RunContext, config: RunConfig) -> Graphs:
    """Return the graphs of a run's model."""
    task = context.feed
    return WritingGraphs(context, config) if getattr(task, "in_parts", False) else Graphs(context)


def most_tokens(requested: int | None, config: Any) -> int:
    """Return the maximum number of generated tokens per sample.

    Raises:
        TaskError: the decoder has fewer positions than requested.
    """
    positions = [getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings")]
    limit = next((count for count in positions if isinstance(count, int)), None)
    # Some positions are for the decoder's start tokens.
    room = None if limit is None else limit - min(8, limit // 2)
    if room is None or requested is None:
        return requested or min(_TOKENS, room or _TOKENS)
    if requested > room:
        raise TaskError(
            f"model.new_tokens: got {requested}, but the decoder has {limit} positions, some of them for start tokens; "
            f"expected at most {room}"
        )
    return requested
