"""A record as flat names and values, the form that experiment trackers take.

The trackers that a run's results are sent to, each imported when it is asked for.

All keep to files beside the run's folder unless their own environment variables say otherwise, so that nothing leaves
the machine unasked. A tracker that fails costs one line: the run is complete by then.
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
    """Return what was set: ``quantizer.activations.percentile: "99.9"`` for each key, and model and CPU.

    A list is one value, in JSON.
    """
    return {
        "model": record.model.source,
        "model.parameters": str(record.model.parameters),
        "machine.cpu": str(record.machine.get("cpu")),
        **_flat(record.config, ""),
    }


def metrics_of(record: RunRecord) -> dict[str, float]:
    """Return what was measured, by names such as ``score.engine.accuracy`` and ``latency_ms.float``.

    Names carry their unit: ``_ms``, ``_mib``, ``_db``. Only what was measured is there.
    """
    found: dict[str, float | None] = {"multiply_adds_quantized": covered_share(record)}
    for score in record.scores:
        found[f"score.{score.which}.{score.metric}"] = score.value
        found[f"score_difference.{score.which}.{score.metric}"] = score.difference
    for entry in record.latency.engines if record.latency else ():
        found[f"latency_ms.{entry.name}"] = entry.median_ms
        found[f"speedup.{entry.name}"] = entry.ratio_to_float
    for size in record.size:
        found[f"size_mib.{size.name}"] = size.bytes / _MIB
    for memory in record.memory:
        found[f"memory_mib.{memory.name}"] = memory.peak_mib
    for name in dict.fromkeys(output.output for output in record.outputs):
        output = worst_output([one for one in record.outputs if one.output == name])
        assert output is not None
        found[f"sqnr_db.{name}"] = output.sqnr_db
        found[f"cosine.{name}"] = output.cosine
    return {name: float(value) for name, value in found.items() if value is not None}


def _flat(values: Mapping[str, Any], path: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


_PROJECT = "quantizer"
_ARTIFACTS = ("report.html", "config.yaml")
_LONGEST_VALUE = 500
"""Characters of a value that every version of MLflow takes."""

_LONGEST_ERROR = 160
"""Characters of an error that are shown."""

_DEFAULTS = {
    # Instead of minutes of trying again.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # A run ends with its own figures.
    "WANDB_SILENT": "true",
}
"""Environment variables that the trackers read, where they are not set."""


def print_tracked(tracker: str | None, record: RunRecord, folder: Path, console: Console) -> None:
    """Send the results of a run to a tracker, if there is one, and print what came of it."""
    if tracker is not None:
        console.print(track(tracker, record, folder), markup=False, highlight=False, soft_wrap=True)


def track(tracker: str, record: RunRecord, folder: Path) -> str:
    """Send the configuration, the figures and the files of a run to a tracker."""
    try:
        with _defaults(_DEFAULTS):
            return f"tracked with {tracker}: {TRACKERS[tracker](record, folder)}"
    except Exception as error:  # noqa: BLE001 - a library of others, and perhaps a server: any error may come
        said = (str(error).splitlines() or [""])[0]
        said = said if len(said) <= _LONGEST_ERROR else f"{said[:_LONGEST_ERROR]}..."
        return (
            f"warning: {tracker} did not take the results ({type(error).__name__}: {said}); the run is complete in "
            f"{folder}"
        )


def _mlflow(record: RunRecord, folder: Path) -> str:
    mlflow = import_library("mlflow", "mlflow")
    entities = import_library("mlflow", "mlflow.entities")
    local = f"sqlite:///{folder.parent / 'mlflow.db'}"
    place = os.environ.get("MLFLOW_TRACKING_URI") or local
    client = mlflow.MlflowClient(tracking_uri=place)
    found = client.get_experiment_by_name(_PROJECT)
    files = (folder.parent / "mlflow-artifacts").as_uri() if place == local else None
    experiment = client.create_experiment(_PROJECT, artifact_location=files) if found is None else found.experiment_id
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
            # Curves are grouped by what is before the slash.
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
    # An artifact is a copy: the folder of the run may be replaced before an offline run is sent.
    artifact = wandb.Artifact(re.sub(r"[^\w\-.]", "_", record.name), type="run")
    for file in _artifacts(folder):
        artifact.add_file(str(file))
    run.log_artifact(artifact)
    run.finish()
    return f"{run.dir} ({mode})"


TRACKERS = {"mlflow": _mlflow, "tensorboard": _tensorboard, "wandb": _wandb}
"""By the name in ``report.track``, which is that of the module and of the extra too."""


def _artifacts(folder: Path) -> list[Path]:
    return [folder / name for name in _ARTIFACTS if (folder / name).is_file()]


def _word(name: str) -> str:
    """Return a name without the characters that MLflow refuses."""
    return re.sub(r"[^\w\-./ ]", "_", name)


@contextmanager
def _defaults(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for the time of the context."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
