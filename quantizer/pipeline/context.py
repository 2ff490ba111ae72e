"""The objects that all stages of a command share, and one way to call models and engines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from quantizer.config import DataConfig, DatasetConfig
from quantizer.engines import Array, BuildResult, Engine
from quantizer.errors import TaskError
from quantizer.pipeline.processes import require_room_to_write
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.proxy.build import exportable
from quantizer.report import ModelInfo, Score, SizeEntry, size_entries
from quantizer.tasks import (
    Batch,
    Example,
    Feed,
    Predictions,
    Task,
    build_task,
    load_examples,
    load_model,
    load_processor,
)
from quantizer.tasks.image_inputs import ImageInputs
from quantizer.utils.batches import own_tensors
from quantizer.utils.files import NO_STORE, Store
from quantizer.utils.lazy import once_property
from quantizer.utils.progress import loop

Runnable: TypeAlias = nn.Module | Engine
"""A model, an engine, or a model with engines as layers."""


@contextmanager
def bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a loop over batches; yield a function to call with (batches done, total batches)."""
    with loop(name, unit="batch") as opened:
        yield opened.reach


def as_predictor(model: Runnable) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a function that calls a model or an engine with a batch of tensors."""
    if isinstance(model, nn.Module):
        # Copies, because a forward may write into its inputs.
        return lambda batch: model(**own_tensors(batch))
    return lambda batch: model(engine_inputs(model, batch))


def engine_inputs(engine: Engine, batch: Batch) -> dict[str, Array]:
    """Return a batch as arrays in the input types of an engine, such as float16."""
    return {spec.name: as_array(batch[spec.name], spec.dtype) for spec in engine.inputs}


def engine_run(engine: Engine, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the outputs of an engine for a batch, as tensors."""
    return {name: torch.from_numpy(value) for name, value in engine(engine_inputs(engine, batch)).items()}


def as_array(value: torch.Tensor, dtype: Any) -> Array:
    """Return a tensor as a numpy array of a type; bfloat16 goes through float32, because numpy lacks it."""
    plain = value.float() if value.dtype == torch.bfloat16 else value
    array: Array = plain.numpy().astype(dtype, copy=False)
    return array


def score_record(
    which: str, task: Task, base: Predictions, other: Predictions, examples: Sequence[Example], resamples: int
) -> Score:
    """Return the score of a model, with its difference from the float model's predictions ``base``."""
    value = task.score(other, examples)
    if which == "float":
        return Score(
            form=which,
            value=value,
            metric=task.metric_name,
            samples=len(examples),
            higher_is_better=task.higher_is_better,
        )
    low, high = task.difference_interval(base, other, examples, resamples)
    paired = {name: figure if math.isfinite(figure) else None for name, figure in task.paired(base, other).items()}
    return Score(
        form=which,
        value=value,
        metric=task.metric_name,
        paired=paired,
        difference=value - task.score(base, examples),
        interval=(low, high),
        samples=len(examples),
        higher_is_better=task.higher_is_better,
    )


def configured_examples(dataset: DatasetConfig | None) -> list[Example]:
    """Return the samples of a data set; none for None."""
    if dataset is None:
        return []
    return load_examples(
        dataset.name,
        path=dataset.path,
        split=dataset.split,
        subset=dataset.subset,
        samples=dataset.samples,
        offset=dataset.offset,
    )


def sizes_of(built: Mapping[str, BuildResult]) -> tuple[SizeEntry, ...]:
    """Return the size of each engine file, and its ratio to the first file."""
    return size_entries({name: os.path.getsize(result.path) for name, result in built.items()})


@dataclass(frozen=True)
class RunExamples:
    """The samples of a run by purpose; empty lists for unused purposes."""

    calibration: list[Any]
    evaluation: list[Any]
    head: list[Example] = field(default_factory=list)
    tuning: list[Example] = field(default_factory=list)
    training: list[Example] = field(default_factory=list)
    check: list[Example] = field(default_factory=list)

    @classmethod
    def of(cls, config: DataConfig) -> RunExamples:
        """Return the samples of all configured data sets."""
        return cls(**{purpose.name: configured_examples(getattr(config, purpose.name)) for purpose in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The objects that the stages of one command share.

    Attributes:
        timer: prints and times stages.
        resume: the files from which a search and a training resume.
        model: the float model.
        processor: its tokenizer or image processor; None without one.
        feed: makes batches from samples.
        floats: ONNX files and engines of the float model, shared with other runs.
        exported: ONNX files of the float model by graph, opset and type.
    """

    timer: StageTimer
    resume: ResumeFiles
    model: nn.Module
    processor: Any
    feed: Feed
    floats: Store = NO_STORE
    exported: dict[str, Path] = field(default_factory=dict)

    @once_property
    def exportable(self) -> nn.Module:
        """The float model in the form that the exporter takes; see ``proxy.build.exportable``."""
        return exportable(self.model)

    def info(self, source: str, task: str) -> ModelInfo:
        """Return the source of the model, its task and the number of its parameters."""
        return ModelInfo(
            source=source, task=task, parameters=sum(parameter.numel() for parameter in self.model.parameters())
        )

    @property
    def task(self) -> Task:
        """The feed as a task, which also scores predictions."""
        if not isinstance(self.feed, Task):
            raise TaskError("a Python module has no task; its only score is the function given as score=")
        return self.feed


def load_context(
    timer: StageTimer,
    resume: ResumeFiles,
    folder: Path,
    source: str,
    task: str,
    *,
    copies: float,
    needed_for: str,
    sizes: Mapping[str, Any],
    attention: str = "eager",
    texts: Mapping[str, str] | None = None,
) -> RunContext:
    """Load a model, its processor and its task, and check the free disk space.

    Args:
        folder: the output folder.
        source: the source of the model.
        task: the name of the task.
        copies: the minimum size of the output, as a multiple of the size of the float parameters.
        needed_for: what is written, for the message.
        sizes: lengths, seconds and batch size, as ``build_task`` takes them.
        attention: the attention implementation, "eager" or "sdpa".
        texts: the text of each label, for tasks with labels from the request.
    """
    model = load_model(source, task, attention, texts)
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    require_room_to_write(folder, int(parameters * copies), needed_for)
    processor = load_processor(source, task)
    built_task = build_task(task, model, processor, **sizes)
    if isinstance(built_task.inputs, ImageInputs):
        processor = built_task.inputs.processor
    built_task.split = True
    return RunContext(timer=timer, resume=resume, model=model, processor=processor, feed=built_task)


def predict(context: RunContext, which: str, model: Runnable, examples: list[Example]) -> Predictions:
    """Return the predictions of a model or an engine on samples, as a stage of its own."""
    with context.timer(f"score the {which}"), bar(which) as progress:
        return context.task.predict(as_predictor(model), examples, progress)
