"""``quantizer convert`` and ``quantizer run`` of models of recordings, and what is refused before they load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from quantizer.cli.main import main

for _package in ("transformers", "scipy", "torchmetrics", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

from helpers import read_json
from tiny_audio import CLASSES, tiny_ast, tiny_ctc, tiny_recordings

from quantizer.pipeline import benchmark
from quantizer.pipeline.load import load_converted
from quantizer.tasks import build_task, load_examples, load_model, load_processor

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    tiny_ast(folder / "ast")
    tiny_ctc(folder / "ctc")
    tiny_recordings(folder / "tones", 8, seed=1)
    tiny_recordings(folder / "test", 6, seed=2)
    files = sorted((folder / "test").rglob("*.wav"))
    lines = "".join(f"{file.relative_to(folder)},a bad cab\n" for file in files)
    (folder / "test.csv").write_text(f"path,text\n{lines}")
    return folder


def test_a_classifier_is_converted_and_serves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    words = ["--quantization", "--calibration", str(place / "tones"), "--evaluation", f"audio-folder:{place / 'test'}"]
    words += ["--batch-size", "1", "2", "4", "--backend", "onnxruntime", "-o", str(place / "made")]
    assert main(["convert", "-m", str(place / "ast"), *words]) == 0
    folder = place / "made" / "onnxruntime"
    config = read_json(folder / "config.json")
    assert (config["task"], config["labels"]) == ("audio-classification", list(CLASSES))
    assert config["dimensions"] == {"batch": [1, 2, 4]}
    assert [(one["name"], one["shape"]) for one in config["inputs"]] == [("input_values", ["batch", 64, 32])]
    assert config["quantization"]["sites"]["linear"] == [7, 7]
    scores = read_json(folder / "report.json")["scores"]
    assert [(one["form"], one["metric"], one["samples"]) for one in scores] == [
        (which, "accuracy", 6) for which in ("float", "proxy", "engine")
    ]
    rows = load_examples("audio-folder", path=place / "test")[:4]
    model = load_model(str(place / "ast"), config["task"])
    task = build_task(config["task"], model, load_processor(str(place / "ast"), config["task"]))
    served = load_converted(folder)
    expected = task.predict(lambda batch: model(**batch), rows)
    found = served([row.path for row in rows])["logits"]
    assert np.abs(found - expected.outputs).max() < 0.1 * np.abs(expected.outputs).max()
    assert len(served.labels([str(row.path) for row in rows])) == 4
    assert "a-recording.wav" in (folder / "README.md").read_text()


@pytest.mark.nightly
def test_speech_runs_from_yaml(place: Path, tmp_path: Path) -> None:
    config = {
        "model": {"source": str(place / "ctc"), "task": "automatic-speech-recognition", "seconds": 1},
        "data": {
            "calibration": {"name": "transcripts", "path": str(place / "test.csv"), "samples": 4},
            "evaluation": {"name": "transcripts", "path": str(place / "test.csv")},
            "batch_size": 3,
        },
        "quantizer": {"backend": "openvino"},
        "export": {"dynamic": {"batch": [1, 2, 4]}},
        "report": {"latency_batch": 2, "bootstrap": 50},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["run", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "out")]) == 0
    report = read_json(tmp_path / "out" / "report.json")
    scores = {one["form"]: one for one in report["scores"]}
    assert {one["metric"] for one in scores.values()} == {"wer"}
    assert all(not one["higher_is_better"] for one in scores.values())
    assert set(scores["engine"]["paired"]) == {"label_flips", "kl_divergence", "sqnr_db"}
    assert scores["engine"]["paired"]["sqnr_db"] > 20
