"""Experiment trackers: a record as flat names and values, sent to MLflow, TensorBoard or Weights & Biases.

Each tracker is imported on demand, and writes to files beside the run's folder unless its own environment variables are
set, so that nothing leaves the machine by default. A failing tracker only prints a warning.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from quantizer.report.record import RunRecord, worst_output
from quantizer.report.verdict import covered_share
from quantizer.utils.lazy import import_library

_MIB = 2**20


def parameters_of(record: RunRecord) -> dict[str, str]:
    """Return the configuration, model and CPU by names such as ``quantizer.activations.percentile``.

    Lists are values in JSON.
    """
    return {
        "model": record.model.source,
        "model.parameters": str(record.model.parameters),
        "machine.cpu": str(record.machine.get("cpu")),
        **_flat(record.config, ""),
    }


def metrics_of(record: RunRecord) -> dict[str, float]:
    """Return the figures of a run by names such as ``score.engine.accuracy`` and ``latency_ms.float``.

    Names include the unit: ``_ms``, ``_mib``, ``_db``. Figures that were not measured are missing.
    """
    metrics: dict[str, float | None] = {"multiply_adds_quantized": covered_share(record)}
    for score in record.scores:
        metrics[f"score.{score.form}.{score.metric}"] = score.value
        metrics[f"score_difference.{score.form}.{score.metric}"] = score.difference
    for entry in record.latency.engines if record.latency else ():
        metrics[f"latency_ms.{entry.name}"] = entry.median_ms
        metrics[f"speedup.{entry.name}"] = entry.ratio_to_float
    for size in record.size:
        metrics[f"size_mib.{size.name}"] = size.bytes / _MIB
    for memory in record.memory:
        metrics[f"memory_mib.{memory.name}"] = memory.peak_mib
    for name in dict.fromkeys(output.output for output in record.outputs):
        output = worst_output([distance for distance in record.outputs if distance.output == name])
        assert output is not None
        metrics[f"sqnr_db.{name}"] = output.sqnr_db
        metrics[f"cosine.{name}"] = output.cosine
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _flat(values: Mapping[str, Any], path: str) -> dict[str, str]:
    values_by_path: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            values_by_path |= _flat(value, f"{path}{name}.")
        else:
            values_by_path[f"{path}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return values_by_path


_PROJECT = "quantizer"
_ARTIFACTS = ("report.html", "config.yaml")
_LONGEST_VALUE = 500
"""The most characters of a value that all versions of MLflow accept."""

_LONGEST_ERROR = 160
"""The most characters of an error in the warning."""

_DEFAULTS = {
    # The default retries for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # A run prints its own figures.
    "WANDB_SILENT": "true",
}
"""Defaults for environment variables of the trackers."""


def print_tracked(tracker: str | None, record: RunRecord, folder: Path, console: Console) -> None:
    """Send the results of a run to a tracker, if configured, and print the outcome."""
    if tracker is not None:
        console.print(track(tracker, record, folder), markup=False, highlight=False, soft_wrap=True)


def track(tracker: str, record: RunRecord, folder: Path) -> str:
    """Send the configuration, figures and files of a run to a tracker, and return a line on the outcome."""
    try:
        with _defaults(_DEFAULTS):
            return f"tracked with {tracker}: {TRACKERS[tracker](record, folder)}"
    except Exception as error:  # noqa: BLE001 - third-party libraries and servers may raise any error
        message = (str(error).splitlines() or [""])[0]
        message = message if len(message) <= _LONGEST_ERROR else f"{message[:_LONGEST_ERROR]}..."
        return (
            f"warning: {tracker} rejected the results ({type(error).__name__}: {message}); the run is complete in "
            f"{folder}"
        )


def _mlflow(record: RunRecord, folder: Path) -> str:
    mlflow = import_library("mlflow", "mlflow")
    entities = import_library("mlflow", "mlflow.entities")
    local = f"sqlite:///{folder.parent / 'mlflow.db'}"
    place = os.environ.get("MLFLOW_TRACKING_URI") or local
    client = mlflow.MlflowClient(tracking_uri=place)
    known_experiment = client.get_experiment_by_name(_PROJECT)
    files = (folder.parent / "mlflow-artifacts").as_uri() if place == local else None
    experiment = (
        client.create_experiment(_PROJECT, artifact_location=files)
        if known_experiment is None
        else known_experiment.experiment_id
    )
    run = client.create_run(experiment, run_name=record.name).info.run_id
    now = int(time.time() * 1000)
    client.log_batch(
        run,
        metrics=[entities.Metric(_word(name), value, now, 0) for name, value in metrics_of(record).items()],
        params=[entities.Param(_word(name), value[:_LONGEST_VALUE]) for name, value in parameters_of(record).items()],
    )
    for file in _artifacts(folder):
        client.log_artifact(run, str(file))
    client.set_terminated(run)
    return place


def _tensorboard(record: RunRecord, folder: Path) -> str:
    import_library("tensorboard", "tensorboard")
    writer = import_library("tensorboard", "torch.utils.tensorboard").SummaryWriter
    place = folder.parent / "tensorboard" / record.name
    with writer(str(place)) as board:
        for name, value in metrics_of(record).items():
            # TensorBoard groups curves by the part before the slash.
            board.add_scalar(name.replace(".", "/", 1), value)
        rows = "\n".join(f"| {name} | `{value}` |" for name, value in parameters_of(record).items())
        board.add_text("configuration", f"| key | value |\n|---|---|\n{rows}")
        board.add_text("files", "\n".join(f"- {file}" for file in _artifacts(folder)))
    return str(place)


def _wandb(record: RunRecord, folder: Path) -> str:
    wandb = import_library("wandb", "wandb")
    mode = os.environ.get("WANDB_MODE") or "offline"
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or _PROJECT,
        name=record.name,
        config=parameters_of(record),
        mode=mode,
        dir=str(folder.parent),
    )
    run.log(metrics_of(record))
    # An artifact is a copy: the run's folder may be replaced before an offline run is synchronized.
    artifact = wandb.Artifact(re.sub(r"[^\w\-.]", "_", record.name), type="run")
    for file in _artifacts(folder):
        artifact.add_file(str(file))
    run.log_artifact(artifact)
    run.finish()
    return f"{run.dir} ({mode})"


TRACKERS = {"mlflow": _mlflow, "tensorboard": _tensorboard, "wandb": _wandb}
"""Trackers by their name in ``report.track``, which is also the name of the module and of the extra."""


def _artifacts(folder: Path) -> list[Path]:
    return [folder / name for name in _ARTIFACTS if (folder / name).is_file()]


def _word(name: str) -> str:
    """Return a name without characters that MLflow rejects."""
    return re.sub(r"[^\w\-./ ]", "_", name)


@contextmanager
def _defaults(values: dict[str, str]) -> Iterator[None]:
    """Set missing environment variables within the context."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
