"""A model as a tuple of graphs, each exported to an ONNX file and built into an engine of its own.

Most models are one graph. An encoder-decoder model that writes text is three, which write together: they are
calibrated, quantized and scored as one model, and exported, built, compared and timed one by one.
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
from quantizer.pipeline.context import RunContext, Runs, engine_run
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
"""The names of the two files of each engine, without their endings."""

ONNX_FOLDER = "onnx"
"""The folder of the ONNX files of a model of several graphs, with the model's own config."""

GENERATED = "generated"
"""The name of the whole beside its graphs, where texts are read token by token."""

_TOKENS = 128
"""The most tokens that are written, unless the configuration says otherwise."""

_TIMED_TOKENS = 32
"""How many tokens are written to be timed, if engines write so many."""

_STEPS, _EXAMPLE_STEPS = 16, 4
"""Tokens that are written for a check and for an export."""

_COMPARED = 32
"""Samples whose texts are compared with those of the float model."""


class Graphs:
    """The graphs of a model that is one.

    Attributes:
        names: the name of each.
        tokens: the most tokens that are written for a row; None: the model writes no text.
    """

    names: tuple[str, ...] = (QUANTIZED_STEM,)
    tokens: int | None = None

    def __init__(self, context: RunContext) -> None:
        self.context = context

    @property
    def several(self) -> bool:
        """True if there are several engines."""
        return len(self.names) > 1

    def files(self, folder: Path, stem: str, name: str) -> EngineFiles:
        """Return the places of a graph's files: ``model.onnx`` and ``model.engine``, or ``float`` of both."""
        return EngineFiles(onnx=folder / f"{stem}.onnx", engine=folder / f"{stem}.engine")

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return what each graph computes, of the float model or of a frozen proxy."""
        return {QUANTIZED_STEM: model}

    def example(self, name: str) -> Batch:
        """Return the inputs with which a graph is exported."""
        return self.context.feed.example()

    def axes(self, name: str) -> Any:
        """Return the open axes of a graph's inputs; None: those that the inputs of a task have."""
        return self.context.feed.sizes

    def dimensions(self, config: RunConfig, name: str) -> Mapping[str, Sequence[int]]:
        """Return the least, usual and largest size of each open dimension of a graph."""
        sizes = self.context.feed.sizes
        return {**({} if sizes is None else sizes.ranges), **open_sizes(config)}

    def calibration(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches that calibrate the whole model."""
        return batches

    def checked_on(self, config: RunConfig, samples: Sequence[Any]) -> dict[str, list[Batch]]:
        """Return the batches on which the engine of each graph is compared, of several sizes."""
        return {QUANTIZED_STEM: check_batches(self.context.feed, samples, checked_shapes(config))}

    def assembled(self, engines: Mapping[str, Engine]) -> Runs:
        """Return the engines of all graphs as one that is called like the model."""
        return engines[QUANTIZED_STEM]

    def checked_as(self, engines: Mapping[str, Engine]) -> dict[str, Engine]:
        """Return what is compared of engines, by the names of ``checked_on``."""
        return dict(engines)

    def checked_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules with which that is compared."""
        return self.modules(model)

    def runnable(self, model: nn.Module) -> nn.Module:
        """Return the module that is scored for a model."""
        return model

    def scored(self, context: RunContext) -> RunContext:
        """Return a context whose model is the one that is scored."""
        return replace(context, model=self.runnable(context.model))

    def timed(self, model: Runs) -> Runs:
        """Return what is timed for a model or for assembled engines."""
        return model

    def agreement(self, samples: Sequence[Any], forms: Mapping[str, Runs]) -> tuple[Agreement, ...]:
        """Return how far the texts of models are those of the float model; empty: they write none."""
        return ()


class WritingGraphs(Graphs):
    """The three graphs of a model that writes text: the encoder, the decoder, and the decoder with a cache."""

    names = PARTS

    def __init__(self, context: RunContext, config: RunConfig) -> None:
        super().__init__(context)
        self.tokens: int = most_tokens(config.model.new_tokens, context.model.config)
        self._modules: dict[nn.Module, dict[str, nn.Module]] = {}
        self._writers: dict[nn.Module, nn.Module] = {}
        self._checks: list[PartBatches] = []

    def files(self, folder: Path, stem: str, name: str) -> EngineFiles:
        """Return the places of a graph's files, of the float model in a folder of their own."""
        place = folder if stem == QUANTIZED_STEM else folder / stem
        (place / ONNX_FOLDER).mkdir(parents=True, exist_ok=True)
        return EngineFiles(onnx=place / ONNX_FOLDER / f"{name}.onnx", engine=place / f"{name}.engine")

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return what each graph computes."""
        if model not in self._modules:
            self._modules[model] = parts_of(model)
        return self._modules[model]

    @cached_property
    def _example(self) -> PartBatches:
        model = self.context.model
        return part_batches(model, self.modules(model), self.context.feed.example(), _EXAMPLE_STEPS)

    def example(self, name: str) -> Batch:
        """Return the inputs with which a graph is exported."""
        batch = self._example.parts[name]
        # A dynamic axis needs two tokens in the example.
        return {**batch, "input_ids": self._example.written[:, :-1]} if name == DECODER else batch

    def axes(self, name: str) -> Any:
        """Return the open axes of a graph's inputs."""
        return dynamic_axes(name, self.example(name), fixed_steps=self.context.task.reads != "text")

    def dimensions(self, config: RunConfig, name: str) -> Mapping[str, Sequence[int]]:
        """Return the least, usual and largest size of each open dimension of a graph."""
        model: Any = self.context.model
        beams, dynamic = model.generation_config.num_beams or 1, config.export.dynamic
        least, usual, most = dynamic.batch
        texts, first = self.context.task.reads == "text", self._example.first
        if name == ENCODER:
            return {"batch": dynamic.batch, **({"sequence": dynamic.sequence} if texts else {})}
        sizes = {"batch": (least, usual * beams, most * beams)} | ({ENCODER_STEPS: dynamic.sequence} if texts else {})
        if name == DECODER:
            return {**sizes, "sequence": (1, first, max(first, self.tokens))}
        return {**sizes, PAST: (1, max(1, self.tokens // 2), self.tokens + first)}

    def calibration(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches that calibrate the whole model: what it reads, and what it writes itself for that."""
        with self.context.timer("write what calibrates"):
            return calibration_batches(self.context.model, batches, self.tokens)

    def checked_on(self, config: RunConfig, samples: Sequence[Any]) -> dict[str, list[Batch]]:
        """Return the inputs of each graph at the usual, the least and the largest size, and the texts that are read."""
        if not self._checks:
            dynamic, report, model = config.export.dynamic, config.report, self.context.model
            shapes = [
                (report.latency_batch, report.latency_sequence),
                *zip(dynamic.batch, dynamic.sequence, strict=True),
            ]
            # Where two sequences have one length, the last step is left out.
            steps = max(3, min(_STEPS, self.tokens))
            inputs = self.context.feed.inputs
            reads = [inputs.filled(list(samples)[:_COMPARED], *shape) for shape in dict.fromkeys(shapes)]
            self._checks = [part_batches(model, self.modules(model), read, steps) for read in reads]
        found = {name: [one.parts[name] for one in self._checks] for name in self.names}
        return {**found, GENERATED: [one.steps for one in self._checks]}

    def assembled(self, engines: Mapping[str, Engine]) -> Runs:
        """Return a model that writes with the engines in the place of its layers."""
        runs = {name: partial(engine_run, engines[name]) for name in self.names}
        return Writer(in_parts(self.context.model, runs), self.tokens)

    def checked_as(self, engines: Mapping[str, Engine]) -> dict[str, Engine]:
        """Return the engine of each graph, and all of them together as they read texts token by token."""
        whole = cast(Any, self.assembled(engines)).model
        name = engines[ENCODER].name
        return {**engines, GENERATED: cast(Engine, Steps(whole, self._checks[0].first, name))}

    def checked_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return what each graph computes, and the model as it reads texts token by token."""
        found = self.modules(model)
        if GENERATED not in found:
            found[GENERATED] = Steps(model, self._checks[0].first, "PyTorch")
        return found

    def runnable(self, model: nn.Module) -> nn.Module:
        """Return the module that writes with a model, always the same."""
        if isinstance(model, Writer):
            return model
        if model not in self._writers:
            self._writers[model] = Writer(model, self.tokens)
        return self._writers[model]

    def timed(self, model: Runs) -> Runs:
        """Return a module that writes so many tokens, whatever they are."""
        whole = model.model if isinstance(model, Writer) else model
        return Writer(whole, min(_TIMED_TOKENS, self.tokens), exactly=True)

    def agreement(self, samples: Sequence[Any], forms: Mapping[str, Runs]) -> tuple[Agreement, ...]:
        """Return how far the texts of models are those of the float model."""
        task = self.context.task
        batches = task.sample_batches(list(samples)[:_COMPARED]) or [self._checks[0].read]
        right = self._written(self.context.model, batches)
        found = {name: self._written(cast(nn.Module, form), batches) for name, form in forms.items()}
        return tuple(
            Agreement(form=name, samples=len(right), tokens=equal_tokens(right, one), texts=equal_texts(right, one))
            for name, one in found.items()
        )

    def _written(self, model: nn.Module, batches: Sequence[Batch]) -> Any:
        task, writer = self.context.task, self.runnable(model)
        with torch.no_grad():
            rows = [row.numpy() for batch in batches for row in task.collect(writer(**batch), batch)]
        longest = max(map(len, rows))
        filled = [np.pad(row, (0, longest - len(row)), constant_values=np.nan) for row in rows]
        return task.decide(np.stack(filled))


def open_sizes(config: RunConfig) -> dict[str, tuple[int, int, int]]:
    """Return the least, usual and largest number of samples, and of tokens in a sample."""
    dynamic = config.export.dynamic
    return {BATCH: dynamic.batch, SEQUENCE: dynamic.sequence}


def graphs_of(context: RunContext, config: RunConfig) -> Graphs:
    """Return the graphs of a run's model."""
    task = context.feed
    return WritingGraphs(context, config) if getattr(task, "in_parts", False) else Graphs(context)


def most_tokens(asked: int | None, config: Any) -> int:
    """Return how many tokens are written for a row at most."""
    positions = [getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings")]
    most = next((one for one in positions if isinstance(one, int)), None)
    # Some are for the tokens that the decoder begins with.
    room = None if most is None else most - min(8, most // 2)
    if room is None or asked is None:
        return asked or min(_TOKENS, room or _TOKENS)
    if asked > room:
        raise TaskError(
            f"model.new_tokens: got {asked}, and the decoder has {most} positions, the first of them for what it "
            f"begins with; give {room} or less"
        )
    return asked
