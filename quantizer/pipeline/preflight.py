"""An estimate of a run's time and memory, from an earlier run and the weights of its checkpoint; nothing is loaded.

The time is what the same work took before. Where nothing did it, none is told: most of a run is neither counted nor
known before it, such as the builds of engines and their timing.

The preflight of a run: packages, data, labels, the checkpoint, the folder, and what the engine needs of the machine.

The model itself is not loaded. What only the loaded model can tell is checked right after that, by ``check_examples``.

Warnings of a budget, from a configuration alone: before a model is loaded.

The stages of an earlier run of the same work, whose times tell how long this one takes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from quantizer.config import DatasetConfig, ModelConfig, RunConfig
from quantizer.config.quantizer_section import Section
from quantizer.config.schema import check_run
from quantizer.engines import backend, runs_here
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import ConfigError, QuantizerError, TaskError
from quantizer.pipeline.benchmark import build_options
from quantizer.pipeline.choose_engine import chooses
from quantizer.pipeline.context import RunExamples
from quantizer.pipeline.faults import Faults, Looks, check_export_packages, check_packages, require_package
from quantizer.pipeline.function_source import check_functions
from quantizer.pipeline.open_axes import require_possible_run
from quantizer.pipeline.progress import earlier_stages, rounded_time
from quantizer.pipeline.resume import require_names
from quantizer.pipeline.search_max_drop import budget_warnings, samples_searched
from quantizer.plan.targets import AUTO, profile
from quantizer.report import Stage
from quantizer.tasks import Example, Pair, Sample, Text, read_checkpoint, require_labels, resolve_source, tasks
from quantizer.tasks.classification import require_classes
from quantizer.tasks.datasets.examples import all_examples, part_of_examples
from quantizer.utils.cpu import saturates
from quantizer.utils.files import (
    begun_in,
    checked_folder,
    is_begun,
    require_sole_writer,
    require_writable,
    restore_folder,
)

_TOKENS_PER_WORD = 1.4
FORMS = 3
"""Forms of the model that are scored: float, quantized in PyTorch, and the engine."""
_BACKWARD = 3
"""A step of training costs about three passes."""
_AGAIN = {"plain": 0, "fast": 4, "balanced": 12, "accurate": 15}
"""How often calibration samples go through the model again when ranges and codes are chosen, as counted on a BERT."""
_CHOSEN_ON = 128
"""At most so many of them."""
_COPIES = 5
"""Copies of the parameters in float32 at the peak: the model, its export in both forms, and the two engines."""
_LIBRARIES_GIB = 1.8
"""Libraries, batches and what is observed: what a run of MiniLM takes at its peak beside the copies."""


def run_estimate(
    config: RunConfig, examples: Mapping[str, Sequence[Example]], earlier: Sequence[Stage] = ()
) -> str | None:
    """Return the estimate of a run; see ``estimate``."""
    every = [example for part in examples.values() for example in part]
    return estimate(config.model.source, every, sample_passes(config, examples), config.model.max_length, earlier)


def estimate(
    source: str, examples: Sequence[Example | Sample], passes: float, max_length: int, earlier: Sequence[Stage] = ()
) -> str | None:
    """Return about how long it takes and how much memory, and on what basis; None: the weights cannot be counted."""
    parameters = _parameters(source)
    if parameters is None:
        return None
    gib = _LIBRARIES_GIB + _COPIES * 4 * parameters / 2**30
    memory = (
        f"memory: about {gib:.1f} GiB, for {_COPIES} copies of {parameters / 1e6:.1f} M parameters in float32, and "
        f"{_LIBRARIES_GIB:.1f} GiB of libraries and batches"
    )
    if words := rounded_time(sum(stage.seconds for stage in earlier)):
        return f"time: about {words}, as the same took before; {memory}"
    texts = [example for example in examples if isinstance(example, Text | Pair | str)]
    length = f" of about {min(statistics.mean(map(_tokens, texts)), max_length):.0f} tokens" if texts else ""
    return (
        f"time: not known before a first run; {passes:,.0f} samples{length} go through the model at least, and export, "
        f"engines, their scores and their timing come on top; {memory}"
    )


def calibration_passes(preset: str, samples: int) -> int:
    """Return how many samples go through the model in a calibration on ``samples`` of them."""
    return samples + _AGAIN[preset] * min(samples, _CHOSEN_ON)


def sample_passes(config: RunConfig, examples: Mapping[str, Sequence[Example]]) -> float:
    """Return how many samples go through the model in a run, at least, each pass of a sample counted."""
    count = {name: len(part) for name, part in examples.items()}
    passes: float = calibration_passes(config.quantizer.preset, count.get("calibration", 0))
    passes += FORMS * count.get("evaluation", 0) + count.get("head", 0)
    if config.fallback is not None and config.fallback.max_drop is not None:
        passes += count.get("tuning", 0) * config.fallback.evaluations
    if config.qat is not None:
        passes += _BACKWARD * config.qat.epochs * count.get("training", 0)
        passes += count.get("tuning", 0) * config.qat.evaluations
    return passes


def _parameters(source: str) -> int | None:
    """Return the number of a local checkpoint's parameters; None: they cannot be counted."""
    try:
        folder = resolve_source(source)
    except QuantizerError:
        return None
    files = sorted(folder.glob("*.safetensors")) if isinstance(folder, Path) else []
    sizes: dict[str, int] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    shape = tensors.get_slice(name).get_shape()
                    sizes[name] = torch.Size(shape).numel()
        except (SafetensorError, OSError):
            # That it is damaged is told when it is loaded.
            return None
    return sum(sizes.values()) or None


def _tokens(example: Text | Pair | str) -> float:
    text = (
        example
        if isinstance(example, str)
        else example.text
        if isinstance(example, Text)
        else f"{example.first} {example.second}"
    )
    return _TOKENS_PER_WORD * len(text.split()) + 2


_PURPOSES = tuple(field.name for field in fields(RunExamples))


@dataclass(frozen=True)
class Ready:
    """A run that can start.

    Attributes:
        examples: its samples, which were read for it.
        notes: what is worth knowing before it does.
        estimate: its time and memory in words; None: there is nothing to estimate them by.
    """

    examples: RunExamples
    notes: tuple[str, ...]
    estimate: str | None


def ready_to_run(
    config: RunConfig,
    folder: Path,
    kind: str,
    *,
    force: bool | None,
    looks: Looks | None = None,
    estimated: bool = True,
) -> Ready:
    """Check all that a run needs besides the loaded model, and estimate its time and memory."""
    faults, looks = Faults(), looks or Looks()
    _check_packages(faults, config)
    sections = {name: part for name in _PURPOSES if (part := getattr(config.data, name)) is not None}
    examples = _checked_data(faults, sections, looks)
    _check_model(faults, config, examples, looks)
    # A sweep has thousands of runs in one folder.
    begun = "\0" not in str(folder) and _is_begun(Path(os.path.realpath(folder)), looks)
    if begun:
        restore_folder(folder)
    if faults.passes(lambda: checked_folder(folder, kind, replace=force is not False)):
        faults.of(lambda: require_names(folder))
        faults.of(lambda: require_writable(folder))
    if begun:
        faults.of(lambda: require_sole_writer(folder))
    faults.raise_all("the run cannot start")
    notes = list(_notes(config))
    if force is None and folder.exists():
        notes.append(f"{folder} exists already: run replaces it only with --force")
    estimate = (
        None
        if config.model.task is None or not estimated
        else run_estimate(config, examples, earlier_run(config, folder, chooses=chooses(config)))
    )
    return Ready(RunExamples(**{"calibration": [], "evaluation": []} | examples), tuple(notes), estimate)


def faults_of(sections: Mapping[str, Section]) -> list[str]:
    """Return what is wrong with the data, the checkpoint and the target of a file that has other problems."""
    faults = Faults()
    data = sections.get("data")
    parts = {name: sections.get(f"data.{name}", getattr(data, name, None)) for name in _PURPOSES}
    looks = Looks()
    examples = _checked_data(
        faults, {name: part for name, part in parts.items() if isinstance(part, DatasetConfig)}, looks
    )
    known = {name: section for name, section in sections.items() if name in RunConfig.model_fields}
    config = RunConfig.model_construct().model_copy(update=known)
    if "model" in known:
        _check_model(faults, config, examples, looks)
    if "quantizer" in known:
        faults.of(lambda: check_run(config))
    return faults.texts


def _is_begun(place: Path, looks: Looks) -> bool:
    """Return whether another run is being written to a place, with one look into its folder for all runs there."""
    return is_begun(place, looks.once(("begun", place.parent), partial(begun_in, place.parent)))


def _check_packages(faults: Faults, config: RunConfig) -> None:
    """Check the packages of model, score, export, report and engine, and what the engine needs of the machine."""
    if config.model.task is None:
        check_export_packages(faults)
    else:
        check_packages(faults, config.model.task)
    if "html" in config.report.formats:
        faults.of(partial(require_package, "jinja2", "report"))
    if (tracker := config.report.track) is not None:
        faults.of(partial(require_package, tracker, tracker))
    # What a target cannot do is told as that of a file, not as that of a library.
    fits = faults.passes(lambda: check_run(config))
    if chooses(config):
        faults.of(lambda: cpu_candidates(config.quantizer.candidates))
    elif fits and config.quantizer.backend != AUTO:
        faults.of(lambda: backend(config.quantizer.backend).check(build_options(config)))
        faults.of(lambda: _check_speed_goal(config))


def _check_speed_goal(config: RunConfig) -> None:
    name, fallback = config.quantizer.backend, config.fallback
    if fallback is not None and fallback.min_speedup is not None and not runs_here(name):
        raise ConfigError(
            [
                f"fallback.min_speedup goes by measured times, and engines of {name} need a GPU that is not here; "
                "expected num, ratio, names or max_drop instead, or a machine with a GPU"
            ]
        )


def _check_model(faults: Faults, config: RunConfig, examples: Mapping[str, Sequence[Example]], looks: Looks) -> None:
    """Check what a model is made of, and what a run asks of one."""
    if config.model.task is None:
        check_functions(faults, config.model)
    else:
        faults.of(lambda: require_possible_run(config))
        _check_checkpoint(faults, config.model, config.model.task, examples, looks)


def _check_checkpoint(
    faults: Faults, model: ModelConfig, task: str, examples: Mapping[str, Sequence[Example]], looks: Looks
) -> None:
    """Check a checkpoint for a task, and the labels of the samples where it has classes."""
    checkpoint = faults.of(
        lambda: looks.once(("model", model.source, task), lambda: read_checkpoint(model.source, task))
    )
    faults.of(lambda: require_labels(task, model.labels))
    if checkpoint is not None and tasks[task].labels == "example" and checkpoint.labels:
        for name in ("evaluation", "tuning", "training"):
            faults.of(partial(_check_labels, name, examples.get(name) or (), len(checkpoint.labels)))


def _checked_data(faults: Faults, sections: Mapping[str, DatasetConfig], looks: Looks) -> dict[str, list[Example]]:
    """Return the samples of each section that has data which can be read."""
    found = {}
    for name, section in sections.items():
        examples = faults.of(partial(_examples, name, section, looks))
        if examples is not None:
            found[name] = examples
    return found


def _examples(name: str, section: DatasetConfig, looks: Looks) -> list[Example]:
    place = section.name, section.path, section.split, section.subset
    try:
        found = looks.once(("data", *place), partial(all_examples, *place))
        return part_of_examples(found, section.name, section.path, section.samples, section.offset)
    except ConfigError as error:
        raise TaskError(f"data.{name}: {'; '.join(error.problems)}") from error
    except TaskError as error:
        raise TaskError(f"data.{name}: {error}") from error


def _check_labels(name: str, examples: Sequence[Example], classes: int) -> None:
    labels = np.array([example.label for example in examples if isinstance(example, Text)], dtype=np.int64)
    try:
        require_classes(labels, classes)
    except TaskError as error:
        raise TaskError(f"data.{name}: {error}") from error


def _notes(config: RunConfig) -> list[str]:
    """Return what the machine does to the run without stopping it."""
    name = config.quantizer.backend
    notes = []
    if name != AUTO and not runs_here(name):
        notes.append(f"there is no GPU for {name} here: the engine is built for one elsewhere, not run and not timed")
    if name != AUTO and profile(name).exact_variant is not None and saturates():
        notes.append(
            f"this CPU has no VNNI, and products of bytes saturate on {name}: {profile(name).exact_variant} is the "
            "backend for it"
        )
    return notes


def configured_warnings(config: RunConfig, samples: int) -> Iterator[str]:
    """Yield why the budget of a configuration is finer than its tuning samples can tell, a sentence each."""
    asked, task = config.fallback, config.model.task
    if asked is None or asked.max_drop is None or task is None:
        return
    here = chooses(config) or config.quantizer.backend == AUTO or runs_here(config.quantizer.backend)
    searched = samples_searched(samples, checked=config.qat is None and here)
    metric = tasks[task].metric_name
    yield from budget_warnings(asked.max_drop, searched, metric, "fallback.max_drop")


_WORK = ("model", "quantize", "data", "amp", "fallback", "qat")
"""The sections that tell what a run does."""


def earlier_run(config: RunConfig, folder: Path, *, chooses: bool) -> list[Stage]:
    """Return the stages of the last run that did the same work, in a folder or beside it; none if there is none.

    It had the same model and samples, searched and trained the same, and also chose its engine or had the same
    backend.
    """
    wanted = config.model_dump(mode="json")

    def same(report: Mapping[str, Any]) -> bool:
        told, settings = report["config"], report["config"]["quantizer"]
        backend = chooses or settings["backend"] == config.quantizer.backend
        choice = (report["choice"] is not None) is chooses and backend
        same_preset = settings["preset"] == config.quantizer.preset
        return choice and same_preset and all(told[section] == wanted[section] for section in _WORK)

    return earlier_stages(folder, "report.json", same)
