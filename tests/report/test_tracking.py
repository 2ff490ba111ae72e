"""Results of a run in experiment trackers, all of them stand-ins: the real ones are no part of the tests' packages."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from report_samples import bare_record, sample_record

from quantizer.config.schema import ReportConfig
from quantizer.errors import ConfigError
from quantizer.report.trackers import TRACKERS, metrics_of, parameters_of, track


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "a run"
    found.mkdir()
    (found / "report.html").write_text("<p>a report</p>", encoding="utf-8")
    (found / "config.yaml").write_text("output: runs/a\n", encoding="utf-8")
    return found


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


class _MlflowClient:
    """Stands in for MLflow's: says what was sent to it."""

    def __init__(self, tracking_uri: str) -> None:
        self.sent: list[tuple[str, Any]] = [("uri", tracking_uri)]
        self.retries = os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]
        self.experiments: dict[str, SimpleNamespace] = {}
        clients.append(self)

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return self.experiments.get(name)

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.sent.append(("experiment", (name, artifact_location)))
        return "7"

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        self.sent.append(("run", (experiment, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_batch(self, run: str, metrics: list[Any], params: list[Any]) -> None:
        self.sent.append(("metrics", {name: value for name, value, *_ in metrics}))
        self.sent.append(("params", dict(params)))

    def log_artifact(self, run: str, path: str) -> None:
        self.sent.append(("file", Path(path).name))

    def set_terminated(self, run: str) -> None:
        self.sent.append(("end", run))


clients: list[_MlflowClient] = []


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[_MlflowClient]:
    clients.clear()
    _module(monkeypatch, "mlflow", MlflowClient=_MlflowClient)
    _module(monkeypatch, "mlflow.entities", Metric=lambda *parts: parts, Param=lambda *parts: parts)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return clients


class _Board(AbstractContextManager["_Board"]):
    """Stands in for TensorBoard's ``SummaryWriter``."""

    def __init__(self, place: str) -> None:
        self.place = Path(place)
        self.scalars: dict[str, float] = {}
        self.texts: dict[str, str] = {}
        self.closed = False
        boards.append(self)

    def add_scalar(self, name: str, value: float) -> None:
        self.scalars[name] = value

    def add_text(self, name: str, text: str) -> None:
        self.texts[name] = text

    def __exit__(self, *_: object) -> None:
        self.closed = True


boards: list[_Board] = []


class _WandbRun:
    """Stands in for a run of wandb."""

    def __init__(self, **asked: Any) -> None:
        self.asked = asked
        self.silent = os.environ["WANDB_SILENT"]
        self.dir = f"{asked['dir']}/wandb/offline-run-1"
        self.logged: dict[str, float] = {}
        self.artifact: _Artifact | None = None
        self.finished = False
        runs.append(self)

    def log(self, values: dict[str, float]) -> None:
        self.logged = values

    def log_artifact(self, artifact: _Artifact) -> None:
        self.artifact = artifact

    def finish(self) -> None:
        self.finished = True


class _Artifact:
    """Stands in for an artifact of wandb."""

    def __init__(self, name: str, type: str) -> None:  # noqa: A002 - wandb's own name
        self.name, self.type, self.files = name, type, list[str]()

    def add_file(self, path: str) -> None:
        self.files.append(Path(path).name)


runs: list[_WandbRun] = []


def test_what_was_set_and_measured_is_flat() -> None:
    record = sample_record()
    found = metrics_of(record)
    latency = {entry.name: entry for entry in record.latency.engines} if record.latency else {}
    assert found["latency_ms.engine"] == latency["engine"].median_ms
    assert found["speedup.engine"] == latency["engine"].ratio_to_float
    scores = {score.form: score for score in record.scores}
    assert found[f"score.float.{scores['float'].metric}"] == scores["float"].value
    assert f"score_difference.float.{scores['float'].metric}" not in found
    assert found[f"score_difference.engine.{scores['engine'].metric}"] == scores["engine"].difference
    assert found["size_mib.engine"] == pytest.approx(record.size[-1].bytes / 2**20)
    assert all(isinstance(value, float) for value in found.values())
    set_ = parameters_of(bare_record(config={"a": {"b": {"c": 1.5}, "empty": {}}, "names": ["x", "y"], "text": "t"}))
    assert {
        "a.b.c": "1.5",
        "a.empty": "{}",
        "names": '["x", "y"]',
        "text": "t",
        "model": "model",
    }.items() <= set_.items()


def test_nothing_that_was_not_measured_is_sent() -> None:
    assert metrics_of(bare_record()) == {}


def test_mlflow_takes_all_into_files_beside_the_run(mlflow: list[_MlflowClient], folder: Path) -> None:
    record = sample_record()
    said = track("mlflow", record, folder)
    assert said == f"tracked with mlflow: sqlite:///{folder.parent / 'mlflow.db'}"
    sent = dict(mlflow[0].sent)
    assert sent["uri"] == f"sqlite:///{folder.parent / 'mlflow.db'}"
    assert sent["experiment"] == ("quantizer", (folder.parent / "mlflow-artifacts").as_uri())
    assert sent["run"] == ("7", record.name)
    assert sent["metrics"] == metrics_of(record)
    assert sent["params"]["model"] == record.model.source
    assert [name for kind, name in mlflow[0].sent if kind == "file"] == ["report.html", "config.yaml"]
    assert mlflow[0].sent[-1] == ("end", "r1")


def test_mlflow_takes_names_and_values_of_any_length(mlflow: list[_MlflowClient], folder: Path) -> None:
    track("mlflow", bare_record(config={"sites*[0]": "v" * 9000}), folder)
    assert dict(mlflow[0].sent)["params"]["sites__0_"] == "v" * 500


def test_a_server_of_the_environment_is_used_without_minutes_of_retries(
    mlflow: list[_MlflowClient], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    said = track("mlflow", sample_record(), folder)
    sent = dict(mlflow[0].sent)
    assert said == "tracked with mlflow: http://127.0.0.1:1"
    assert (sent["uri"], sent["experiment"]) == ("http://127.0.0.1:1", ("quantizer", None))
    assert mlflow[0].retries == "1"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "9")
    track("mlflow", sample_record(), folder)
    assert (mlflow[1].retries, os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]) == ("9", "9")


def test_tensorboard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boards.clear()
    _module(monkeypatch, "tensorboard")
    _module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=_Board)
    record = sample_record()
    said = track("tensorboard", record, folder)
    (board,) = boards
    assert said == f"tracked with tensorboard: {board.place}"
    assert board.place == folder.parent / "tensorboard" / record.name
    assert board.scalars == {name.replace(".", "/", 1): value for name, value in metrics_of(record).items()}
    assert f"| model | `{record.model.source}` |" in board.texts["configuration"]
    assert str(folder / "report.html") in board.texts["files"]
    assert board.closed


def test_wandb_is_offline_unless_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.clear()
    _module(monkeypatch, "wandb", init=_WandbRun, Artifact=_Artifact)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    record = sample_record()
    said = track("wandb", record, folder)
    (run,) = runs
    assert said == f"tracked with wandb: {run.dir} (offline)"
    asked = {key: run.asked[key] for key in ("project", "name", "mode", "dir")}
    assert asked == {"project": "quantizer", "name": record.name, "mode": "offline", "dir": str(folder.parent)}
    assert run.asked["config"] == parameters_of(record)
    assert run.logged == metrics_of(record)
    assert run.artifact.files == ["report.html", "config.yaml"]
    assert " " not in run.artifact.name
    assert (run.finished, run.silent) == (True, "true")
    monkeypatch.setenv("WANDB_MODE", "online")
    track("wandb", record, folder)
    assert runs[1].asked["mode"] == "online"


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no route to host\nsecond line"),
        RuntimeError(""),
        RuntimeError("x" * 999),
        OSError(28, "disk full"),
    ],
)
def test_a_tracker_that_fails_costs_one_line(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    _module(monkeypatch, "wandb", init=fail)
    said = track("wandb", sample_record(), folder)
    assert said.startswith(f"warning: wandb rejected the results ({type(error).__name__}: ")
    assert said.endswith(f"the run is complete in {folder}")
    assert "\n" not in said
    assert len(said) < 300 + len(str(folder))


def test_the_configuration_knows_the_trackers() -> None:
    for tracker in TRACKERS:
        assert ReportConfig(track=tracker).track == tracker  # type: ignore[arg-type]
    with pytest.raises((ConfigError, ValueError), match="track"):
        ReportConfig(track="mlfow")  # type: ignore[arg-type]
