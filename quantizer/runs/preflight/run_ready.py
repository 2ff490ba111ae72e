"""The preflight of a run: packages, data, labels, the checkpoint, the folder, and what the engine needs of the machine.

The model itself is not loaded. What only the loaded model can tell is checked right after that, by ``check_rows``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from quantizer.common.cpu import saturates
from quantizer.config import DatasetConfig, ModelConfig, RunConfig
from quantizer.config.quantizer_section import Section
from quantizer.config.schema import check_run
from quantizer.engines import backend, runs_here
from quantizer.engines.candidates import cpu_candidates
from quantizer.errors import ConfigError, TaskError
from quantizer.files import begun_in, checked_folder, is_begun, require_sole_writer, require_writable, restore_folder
from quantizer.runs.measure import build_options
from quantizer.runs.pick_backend import chooses
from quantizer.runs.preflight.estimate import run_estimate
from quantizer.runs.preflight.faults import Faults, Looks, require_package
from quantizer.runs.preflight.packages import check_export_packages, check_packages
from quantizer.runs.progress.earlier_run import earlier_run
from quantizer.runs.run_context import RunRows, require_names
from quantizer.runs.workload.function_source import check_functions
from quantizer.runs.written_sizes import require_possible_run
from quantizer.targets import AUTO, profile
from quantizer.tasks import Row, Text, read_checkpoint, require_labels, tasks
from quantizer.tasks.classification import require_classes
from quantizer.tasks.datasets.load import part_of_rows, whole_data

_ROWS = tuple(field.name for field in fields(RunRows))


@dataclass(frozen=True)
class Ready:
    """A run that can start.

    Attributes:
        rows: its rows, which were read for it.
        notes: what is worth knowing before it does.
        estimate: its time and memory in words; None: there is nothing to estimate them by.
    """

    rows: RunRows
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
    sections = {name: part for name in _ROWS if (part := getattr(config.data, name)) is not None}
    rows = _checked_data(faults, sections, looks)
    _check_model(faults, config, rows, looks)
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
        else run_estimate(config, rows, earlier_run(config, folder, chooses=chooses(config)))
    )
    return Ready(RunRows(**{"calibration": [], "evaluation": []} | rows), tuple(notes), estimate)


def faults_of(sections: Mapping[str, Section]) -> list[str]:
    """Return what is wrong with the data, the checkpoint and the target of a file that has other problems."""
    faults = Faults()
    data = sections.get("data")
    parts = {name: sections.get(f"data.{name}", getattr(data, name, None)) for name in _ROWS}
    looks = Looks()
    rows = _checked_data(faults, {name: part for name, part in parts.items() if isinstance(part, DatasetConfig)}, looks)
    known = {name: section for name, section in sections.items() if name in RunConfig.model_fields}
    config = RunConfig.model_construct().model_copy(update=known)
    if "model" in known:
        _check_model(faults, config, rows, looks)
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


def _check_model(faults: Faults, config: RunConfig, rows: Mapping[str, Sequence[Row]], looks: Looks) -> None:
    """Check what a model is made of, and what a run asks of one."""
    if config.model.task is None:
        check_functions(faults, config.model)
    else:
        faults.of(lambda: require_possible_run(config))
        _check_checkpoint(faults, config.model, config.model.task, rows, looks)


def _check_checkpoint(
    faults: Faults, model: ModelConfig, task: str, rows: Mapping[str, Sequence[Row]], looks: Looks
) -> None:
    """Check a checkpoint for a task, and the labels of the rows where it has classes."""
    checkpoint = faults.of(
        lambda: looks.once(("model", model.source, task), lambda: read_checkpoint(model.source, task))
    )
    faults.of(lambda: require_labels(task, model.labels))
    if checkpoint is not None and tasks[task].labels == "row" and checkpoint.labels:
        for name in ("evaluation", "tuning", "training"):
            faults.of(partial(_check_labels, name, rows.get(name) or (), len(checkpoint.labels)))


def _checked_data(faults: Faults, sections: Mapping[str, DatasetConfig], looks: Looks) -> dict[str, list[Row]]:
    """Return the rows of each section that has data which can be read."""
    found = {}
    for name, section in sections.items():
        rows = faults.of(partial(_rows, name, section, looks))
        if rows is not None:
            found[name] = rows
    return found


def _rows(name: str, section: DatasetConfig, looks: Looks) -> list[Row]:
    place = section.name, section.path, section.split, section.subset
    try:
        found = looks.once(("data", *place), partial(whole_data, *place))
        return part_of_rows(found, section.name, section.path, section.rows, section.offset)
    except ConfigError as error:
        raise TaskError(f"data.{name}: {'; '.join(error.problems)}") from error
    except TaskError as error:
        raise TaskError(f"data.{name}: {error}") from error


def _check_labels(name: str, rows: Sequence[Row], classes: int) -> None:
    labels = np.array([row.label for row in rows if isinstance(row, Text)], dtype=np.int64)
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
