"""``quantizer convert`` and ``quantizer run`` of models of recordings, and what is refused before they load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from quantizer.cli.main import main

for _package in ("transformers", "scipy", "torchmetrics", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

from tiny_audio import CLASSES, tiny_ast, tiny_ctc, tiny_recordings

from quantizer.pipeline import benchmark
from quantizer.pipeline.load_converted import load_converted
from quantizer.tasks import build_task, load_model, load_processor, load_rows

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


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_a_classifier_is_converted_and_serves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    words = ["--quantization", "--calibration", str(place / "tones"), "--evaluation", f"audio-folder:{place / 'test'}"]
    words += ["--batch-size", "1", "2", "4", "--backend", "onnxruntime", "-o", str(place / "made")]
    assert main(["convert", "-m", str(place / "ast"), *words]) == 0
    folder = place / "made" / "onnxruntime"
    config = _read(folder / "config.json")
    assert (config["task"], config["labels"]) == ("audio-classification", list(CLASSES))
    assert config["dimensions"] == {"batch": [1, 2, 4]}
    assert [(one["name"], one["shape"]) for one in config["inputs"]] == [("input_values", ["batch", 64, 32])]
    assert config["quantization"]["sites"]["linear"] == [7, 7]
    scores = _read(folder / "report.json")["scores"]
    assert [(one["which"], one["metric"], one["rows"]) for one in scores] == [
        (which, "accuracy", 6) for which in ("float", "proxy", "engine")
    ]
    rows = load_rows("audio-folder", path=place / "test")[:4]
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
            "calibration": {"name": "transcripts", "path": str(place / "test.csv"), "rows": 4},
            "evaluation": {"name": "transcripts", "path": str(place / "test.csv")},
            "batch_size": 3,
        },
        "quantizer": {"backend": "openvino"},
        "export": {"dynamic": {"batch": [1, 2, 4]}},
        "report": {"latency_batch": 2, "bootstrap": 50},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["run", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "out")]) == 0
    report = _read(tmp_path / "out" / "report.json")
    scores = {one["which"]: one for one in report["scores"]}
    assert {one["metric"] for one in scores.values()} == {"wer"}
    assert all(not one["higher_is_better"] for one in scores.values())
    assert set(scores["engine"]["paired"]) == {"label_flips", "kl_divergence", "sqnr_db"}
    assert scores["engine"]["paired"]["sqnr_db"] > 20


BAD = {
    "pictures": (("--quantization", "--calibration", "pictures"), "--calibration pictures is of images, and task"),
    "tokens": (("--seq-len", "2", "4", "8"), "audio-classification is for recordings, which have no tokens; leave"),
    "no length": (
        ("--seconds", "0"),
        "--seconds 0.0: model.seconds: got the number 0.0; expected a number of seconds, more than 0",
    ),
    "no labels": (
        ("--evaluation", "{tones}"),
        "audios alone cannot be scored; expected NAME:PATH with labelled rows, such as audio-csv:labels.csv",
    ),
    "another row": (("--evaluation", "transcripts:{test}"), "needs rows of kind Audio, got Speech"),
    "a broken file": (("--quantization", "--calibration", "broken"), "a.wav cannot be read as a recording"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_before_calibration(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quantizer.Quantizer.calibrate", lambda *_: pytest.fail("it was calibrated"))
    for folder, name in (("pictures", "a.png"), ("broken", "a.wav")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"nothing")
    words, expected = BAD[case]
    given = [word.format(tones=place / "tones", test=place / "test.csv") for word in words]
    assert main(["convert", "-m", str(place / "ast"), *given, "-o", "out"]) == 1
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_seconds_are_for_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    transformers.BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path)
    assert main(["convert", "-m", str(tmp_path), "--seconds", "3", "-o", str(tmp_path / "out")]) == 1
    assert "--seconds 3 is for recordings, and task sentence-similarity for texts" in capsys.readouterr().err


def test_a_recording_that_is_too_long_for_its_words(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.Quantizer.calibrate", lambda *_: pytest.fail("it was calibrated"))
    words = ["--quantization", "--calibration", str(place / "tones"), "--evaluation", f"transcripts:{place}/test.csv"]
    assert main(["convert", "-m", str(place / "ctc"), *words, "--seconds", "0.2", "-o", str(tmp_path / "out")]) == 1
    assert "and recordings are read up to 0.2 s, so its last words would be missed" in capsys.readouterr().err
