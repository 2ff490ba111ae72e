"""The checks before a run: packages, data, labels, checkpoint, output folder and machine, with an estimate of the cost.

The model is not loaded; ``check_examples`` later checks what needs it. The time estimate is the time of the last run
of the same work. Without such a run there is none, because builds and benchmarks take most of the time and cannot be
predicted. The memory estimate comes from the weights of the checkpoint.
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
from quantizer.config.layouts import left_out
from quantizer.config.quantizer_section import Section
from quantizer.config.schema import check_run
from quantizer.engines import backend, runs_here
from quantizer.engines.candidates import usable_backends
from quantizer.errors import ConfigError, QuantizerError, TaskError
from quantizer.pipeline.benchmark import build_options
from quantizer.pipeline.choose_engine import chooses
from quantizer.pipeline.context import RunExamples
from quantizer.pipeline.function_source import check_functions
from quantizer.pipeline.open_axes import require_possible_run
from quantizer.pipeline.preflight_checks import (
    Faults,
    ReadCache,
    check_export_packages,
    check_packages,
    require_package,
)
from quantizer.pipeline.progress import earlier_stages, rounded_time
from quantizer.pipeline.resume import require_names
from quantizer.pipeline.scores import scores_forms
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
_BACKWARD = 3
"""Cost of a training step in forward passes."""
_EXTRA_PASSES = {"plain": 0, "fast": 4, "balanced": 12, "accurate": 15}
"""Additional forward passes per calibration sample for the choice of ranges and weights, by preset; counted on a
BERT.
"""
_MAX_EXTRA_SAMPLES = 128
"""Maximum number of samples in these passes."""
_COPIES = 5
"""Peak number of float32 copies of the parameters: the model, two exports and two engines."""
_LIBRARIES_GIB = 1.8
"""Memory of libraries, batches and observations in GiB, measured on MiniLM."""


def run_estimate(
    config: RunConfig, examples: Mapping[str, Sequence[Example]], earlier: Sequence[Stage] = ()
) -> str | None:
    """Return the time and memory estimate of a run; see ``estimate``."""
    samples = [row for part in examples.values() for row in part]
    return estimate(config.model.source, samples, sample_passes(config, examples), config.model.max_length, earlier)


def estimate(
    source: str, examples: Sequence[Example | Sample], passes: float, max_length: int, earlier: Sequence[Stage] = ()
) -> str | None:
    """Return a sentence on the expected time and memory; None if the weights cannot be counted."""
    parameters = _parameters(source)
    if parameters is None:
        return None
    gib = _LIBRARIES_GIB + _COPIES * 4 * parameters / 2**30
    memory = (
        f"memory: about {gib:.1f} GiB, for {_COPIES} copies of {parameters / 1e6:.1f} M parameters in float32, and "
        f"{_LIBRARIES_GIB:.1f} GiB of libraries and batches"
    )
    if words := rounded_time(sum(stage.seconds for stage in earlier)):
        return f"time: about {words}, as in an earlier run; {memory}"
    texts = [row for row in examples if isinstance(row, Text | Pair | str)]
    length = f" of about {min(statistics.mean(map(_tokens, texts)), max_length):.0f} tokens" if texts else ""
    return (
        f"time: unknown before a first run; at least {passes:,.0f} samples{length} pass through the model, plus "
        f"export, engine builds, scores and benchmarks; {memory}"
    )


def calibration_passes(preset: str, examples: int) -> int:
    """Return the number of forward passes, counted per sample, in a calibration on ``examples`` samples."""
    return examples + _EXTRA_PASSES[preset] * min(examples, _MAX_EXTRA_SAMPLES)


def sample_passes(config: RunConfig, examples: Mapping[str, Sequence[Example]]) -> float:
    """Return the minimum number of forward passes in a run, counted per sample."""
    count = {name: len(part) for name, part in examples.items()}
    passes: float = calibration_passes(config.quantizer.preset, count.get("calibration", 0))
    frozen = 1 if config.qat is None else 2
    # The float model and the engine are always scored.
    forms = 2 + (frozen if scores_forms(config, here=True) else 0)
    passes += forms * count.get("evaluation", 0) + count.get("head", 0)
    if config.fallback is not None and config.fallback.max_drop is not None:
        passes += count.get("tuning", 0) * config.fallback.evaluations
    if config.qat is not None:
        passes += _BACKWARD * config.qat.epochs * count.get("training", 0)
        passes += count.get("tuning", 0) * config.qat.evaluations
    return passes


def _parameters(source: str) -> int | None:
    """Return the number of parameters of a local checkpoint; None if they cannot be counted."""
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
            # Loading reports damaged files.
            return None
    return sum(sizes.values()) or None


def _tokens(row: Text | Pair | str) -> float:
    text = row if isinstance(row, str) else row.text if isinstance(row, Text) else f"{row.first} {row.second}"
    return _TOKENS_PER_WORD * len(text.split()) + 2


_PURPOSES = tuple(field.name for field in fields(RunExamples))


@dataclass(frozen=True)
class Ready:
    """The result of the checks before a run.

    Attributes:
        rows: the samples of the run.
        notes: notes for the user.
        estimate: a sentence on the expected time and memory; None if unknown.
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
    cache: ReadCache | None = None,
    estimated: bool = True,
) -> Ready:
    """Check everything that a run needs except the loaded model, and estimate its time and memory.

    Raises:
        QuantizerError: a list of all problems.
    """
    faults, cache = Faults(), cache or ReadCache()
    _check_packages(faults, config)
    sections = {name: part for name in _PURPOSES if (part := getattr(config.data, name)) is not None}
    examples = _checked_data(faults, sections, cache)
    _check_model(faults, config, examples, cache)
    # A sweep may have thousands of runs in one folder.
    begun = "\0" not in str(folder) and _is_begun(Path(os.path.realpath(folder)), cache)
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
        notes.append(f"{folder} already exists: use --force to replace it")
    estimate = (
        None
        if config.model.task is None or not estimated
        else run_estimate(config, examples, earlier_run(config, folder, chooses=chooses(config)))
    )
    return Ready(RunExamples(**{"calibration": [], "evaluation": []} | examples), tuple(notes), estimate)


def faults_of(sections: Mapping[str, Section]) -> list[str]:
    """Return the problems of the valid sections of an invalid file: data, checkpoint and target."""
    faults = Faults()
    data = sections.get("data")
    parts = {name: sections.get(f"data.{name}", getattr(data, name, None)) for name in _PURPOSES}
    cache = ReadCache()
    examples = _checked_data(
        faults, {name: part for name, part in parts.items() if isinstance(part, DatasetConfig)}, cache
    )
    known = {name: section for name, section in sections.items() if name in RunConfig.model_fields}
    config = RunConfig.model_construct().model_copy(update=known)
    if "model" in known:
        _check_model(faults, config, examples, cache)
    if "quantizer" in known:
        faults.of(lambda: check_run(config))
    return faults.texts


def _is_begun(place: Path, cache: ReadCache) -> bool:
    """Return whether another run is being written to a folder; the parent folder is listed once for all runs."""
    return is_begun(place, cache.once(("begun", place.parent), partial(begun_in, place.parent)))


def _check_packages(faults: Faults, config: RunConfig) -> None:
    """Check the packages of model, score, export, report and engine, and the machine."""
    if config.model.task is None:
        check_export_packages(faults)
    else:
        check_packages(faults, config.model.task)
    if "html" in config.report.formats:
        faults.of(partial(require_package, "jinja2", "report"))
    if (tracker := config.report.track) is not None:
        faults.of(partial(require_package, tracker, tracker))
    # Unsupported options are reported as problems of the file, not of a library.
    fits = faults.passes(lambda: check_run(config))
    if chooses(config):
        faults.of(lambda: usable_backends(config.quantizer.candidates, config.engine.device))
    elif fits and config.quantizer.backend != AUTO:
        faults.of(lambda: backend(config.quantizer.backend).check(build_options(config)))
        faults.of(lambda: _check_speed_goal(config))


def _check_speed_goal(config: RunConfig) -> None:
    name, fallback = config.quantizer.backend, config.fallback
    if fallback is not None and fallback.min_speedup is not None and not runs_here(name):
        raise ConfigError(
            [
                f"fallback.min_speedup needs measured latencies, but {name} needs a GPU and this machine has none; "
                "expected num, ratio, names or max_drop instead, or a machine with a GPU"
            ]
        )


def _check_model(
    faults: Faults, config: RunConfig, examples: Mapping[str, Sequence[Example]], cache: ReadCache
) -> None:
    """Check the functions or the checkpoint of a model, and the options of its kind."""
    if config.model.task is None:
        check_functions(faults, config.model)
    else:
        faults.of(lambda: require_possible_run(config))
        _check_checkpoint(faults, config.model, config.model.task, examples, cache)


def _check_checkpoint(
    faults: Faults, model: ModelConfig, task: str, examples: Mapping[str, Sequence[Example]], cache: ReadCache
) -> None:
    """Check a checkpoint for a task, and the labels of the samples against its classes."""
    checkpoint = faults.of(
        lambda: cache.once(("model", model.source, task), lambda: read_checkpoint(model.source, task))
    )
    faults.of(lambda: require_labels(task, model.labels))
    if checkpoint is not None and tasks[task].labels == "example" and checkpoint.labels:
        for name in ("evaluation", "tuning", "training"):
            faults.of(partial(_check_labels, name, examples.get(name) or (), len(checkpoint.labels)))


def _checked_data(faults: Faults, sections: Mapping[str, DatasetConfig], cache: ReadCache) -> dict[str, list[Example]]:
    """Return the samples of each readable data section."""
    samples = {}
    for name, section in sections.items():
        examples = faults.of(partial(_examples, name, section, cache))
        if examples is not None:
            samples[name] = examples
    return samples


def _examples(name: str, section: DatasetConfig, cache: ReadCache) -> list[Example]:
    key = section.name, section.path, section.split, section.subset
    try:
        samples = cache.once(("data", *key), partial(all_examples, *key))
        return part_of_examples(samples, section.name, section.path, section.samples, section.offset)
    except ConfigError as error:
        raise TaskError(f"data.{name}: {'; '.join(error.problems)}") from error
    except TaskError as error:
        raise TaskError(f"data.{name}: {error}") from error


def _check_labels(name: str, examples: Sequence[Example], classes: int) -> None:
    labels = np.array([row.label for row in examples if isinstance(row, Text)], dtype=np.int64)
    try:
        require_classes(labels, classes)
    except TaskError as error:
        raise TaskError(f"data.{name}: {error}") from error


def _notes(config: RunConfig) -> list[str]:
    """Return notes on how the machine and the layouts affect the run."""
    name = config.quantizer.backend
    notes = []
    if name != AUTO and not runs_here(name):
        notes.append(
            f"this machine has no GPU for {name}: the engine is built ahead of time, but not run or benchmarked"
        )
    if name != AUTO and profile(name).exact_variant is not None and saturates():
        notes.append(
            f"this CPU has no VNNI, so that INT8 products saturate on {name}: use the backend "
            f"{profile(name).exact_variant}"
        )
    if config.quantize and (note := left_out(config)) is not None:
        notes.append(note)
    return notes


def configured_warnings(config: RunConfig, examples: int) -> Iterator[str]:
    """Yield warnings for a score budget below the resolution of the tuning samples."""
    fallback, task = config.fallback, config.model.task
    if fallback is None or fallback.max_drop is None or task is None:
        return
    runs_engines = chooses(config) or config.quantizer.backend == AUTO or runs_here(config.quantizer.backend)
    searched = samples_searched(examples, checked=config.qat is None and runs_engines)
    metric = tasks[task].metric_name
    yield from budget_warnings(fallback.max_drop, searched, examples, metric, "fallback.max_drop")


_WORK = ("model", "quantize", "data", "amp", "fallback", "qat")
"""The sections that define the work of a run."""


def earlier_run(config: RunConfig, folder: Path, *, chooses: bool) -> list[Stage]:
    """Return the stages of the last run of the same work, in or next to a folder; empty without one.

    The same work means the same model, data, search, training and diagnosis, and the same backend or the same choice.
    """
    current = config.model_dump(mode="json")

    def same(report: Mapping[str, Any]) -> bool:
        earlier, settings = report["config"], report["config"]["quantizer"]
        backend = chooses or settings["backend"] == config.quantizer.backend
        choice = (report["choice"] is not None) is chooses and backend
        same_preset = settings["preset"] == config.quantizer.preset
        same_report = earlier["report"]["diagnose"] == config.report.diagnose
        return choice and same_preset and same_report and all(earlier[name] == current[name] for name in _WORK)

    return earlier_stages(folder, "report.json", same)
