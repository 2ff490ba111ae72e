"""The shared parts of long commands: what their stages work on, and one way to call models and engines."""

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
from quantizer.utils.batches import own_tensors
from quantizer.utils.files import NO_STORE, Store
from quantizer.utils.progress import loop

Runs: TypeAlias = nn.Module | Engine
"""A model, or what runs in its place: an engine, or a model whose layers are engines."""


@contextmanager
def bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a loop over batches; yield a function to call with (batches done, batches in all)."""
    with loop(name, unit="batch") as opened:
        yield opened.reach


def as_predictor(model: Runs) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a function that calls a model or an engine on a batch of tensors."""
    if isinstance(model, nn.Module):
        # Copies, as a forward may write into its inputs.
        return lambda batch: model(**own_tensors(batch))
    return lambda batch: model(engine_inputs(model, batch))


def engine_inputs(engine: Engine, batch: Batch) -> dict[str, Array]:
    """Return a batch as the arrays that an engine takes, in its types: images may be in half precision."""
    return {spec.name: as_array(batch[spec.name], spec.dtype) for spec in engine.inputs}


def engine_run(engine: Engine, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the outputs of a part's engine, of the inputs that it takes, in its types."""
    return {name: torch.from_numpy(value) for name, value in engine(engine_inputs(engine, batch)).items()}


def as_array(value: torch.Tensor, dtype: Any) -> Array:
    """Return a tensor as an array of a type; of those of torch, numpy lacks bfloat16."""
    plain = value.float() if value.dtype == torch.bfloat16 else value
    made: Array = plain.numpy().astype(dtype, copy=False)
    return made


def score_record(
    which: str, task: Task, base: Predictions, other: Predictions, examples: Sequence[Example], resamples: int
) -> Score:
    """Return the score of one model, and its figures against the float model's predictions, ``base``."""
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
    """Return the samples of a data set that a configuration names; none for None."""
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
    """Return the size of each engine file, and its ratio to the first."""
    return size_entries({name: os.path.getsize(result.path) for name, result in built.items()})


@dataclass(frozen=True)
class RunExamples:
    """The samples of a run, by purpose; empty if there are none for it."""

    calibration: list[Any]
    evaluation: list[Any]
    head: list[Example] = field(default_factory=list)
    tuning: list[Example] = field(default_factory=list)
    training: list[Example] = field(default_factory=list)
    check: list[Example] = field(default_factory=list)

    @classmethod
    def of(cls, config: DataConfig) -> RunExamples:
        """Return the samples of all data sets in a configuration."""
        return cls(**{one.name: configured_examples(getattr(config, one.name)) for one in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The objects that the stages of one command work on.

    Attributes:
        timer: prints and times stages.
        resume: the files from which a search and a training resume.
        model: the float model.
        processor: its tokenizer or image processor; None: it has none.
        feed: makes batches of samples.
        floats: the ONNX files and engines of the model in float, for other runs on it.
        exported: the ONNX file of the float model, by its graph, the version of its operators and its type.
    """

    timer: StageTimer
    resume: ResumeFiles
    model: nn.Module
    processor: Any
    feed: Feed
    floats: Store = NO_STORE
    exported: dict[str, Path] = field(default_factory=dict)

    def info(self, source: str, task: str) -> ModelInfo:
        """Return the model in words: where it came from, its task, and the number of its parameters."""
        return ModelInfo(source=source, task=task, parameters=sum(one.numel() for one in self.model.parameters()))

    @property
    def task(self) -> Task:
        """The feed as the task that also scores predictions."""
        if not isinstance(self.feed, Task):
            raise TaskError("a module that is given in Python has no task, and no scores but those of score=")
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
    """Load a model, its processor and its task, and check that there is disk space for the output.

    Args:
        folder: the folder in which output will be written.
        source: the source of the model.
        task: the name of the task.
        copies: the least size of the output, as a multiple of the size of the float parameters.
        needed_for: what will be written, in words, for the message.
        sizes: lengths, seconds and batch size of the task, as ``build_task`` takes them.
        attention: the implementation of attention, "eager" or "sdpa".
        texts: the text of each label, for a task that takes its labels from the request.
    """
    model = load_model(source, task, attention, texts)
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    require_room_to_write(folder, int(parameters * copies), needed_for)
    processor = load_processor(source, task)
    built = build_task(task, model, processor, **sizes)
    built.split = True
    return RunContext(timer=timer, resume=resume, model=model, processor=processor, feed=built)


def predict(context: RunContext, which: str, model: Runs, examples: list[Example]) -> Predictions:
    """Return the predictions of a model or an engine on samples, as a stage of its own."""
    with context.timer(f"score the {which}"), bar(which) as progress:
        return context.task.predict(as_predictor(model), examples, progress)
