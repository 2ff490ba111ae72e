"""``quantizer convert`` and ``quantizer run`` of models of recordings, and what is refused before they load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from quantizer.cli.main import main

for _package in ("transformers", "scipy", "torchmetrics", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

from helpers import read_json
from scipy.io import wavfile
from tiny_audio import CLASSES, RATE, tiny_ast, tiny_ctc, tiny_hubert, tiny_recordings, tiny_sew, tiny_wav2vec2

import quantizer
from quantizer.config import RunConfig
from quantizer.errors import ConfigError
from quantizer.pipeline import benchmark
from quantizer.pipeline.load import load_converted
from quantizer.pipeline.open_axes import with_lengths
from quantizer.tasks import build_task, load_examples, load_model, load_processor, read_recordings
from quantizer.tasks.audio import read_recording

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    tiny_ast(folder / "ast")
    tiny_ctc(folder / "ctc")
    tiny_wav2vec2(folder / "wav2vec2")
    tiny_hubert(folder / "hubert")
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
        (which, "accuracy", 6) for which in ("float", "engine")
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
    files = sorted(map(str, (place / "tones").rglob("*.wav")))
    best = [results[0]["label"] for results in quantizer.load_pipeline(folder)(files)]
    assert len(files) == 8
    assert best == served.labels(files)


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("hubert", ("onnxruntime",)),
        pytest.param("wav2vec2", ("openvino", "onnxruntime"), marks=pytest.mark.nightly),
        pytest.param("hubert", ("openvino", "onnxruntime"), marks=pytest.mark.nightly),
    ],
)
def test_engines_take_recordings_of_any_length(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backends: tuple[str, ...]
) -> None:
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    words = ["--seconds", "2", "--batch-size", "1", "2", "4", "--backend", *backends, "-o", str(tmp_path / "made")]
    assert main(["convert", "-m", str(place / name), *words]) == 0
    model, pick = load_model(str(place / name), "audio-classification"), torch.Generator().manual_seed(0)
    for backend in backends:
        folder = tmp_path / "made" / backend
        config = read_json(folder / "config.json")
        assert config["dimensions"] == {"batch": [1, 2, 4], "sequence": [320, 2 * RATE, 2 * RATE]}
        assert {tuple(entry["shape"]) for entry in config["inputs"]} == {("batch", "sequence")}
        engine = quantizer.load(folder)
        for rows in (1, 3):
            for length in (320, 321, RATE // 4, RATE, 2 * RATE):
                batch = {"input_values": torch.randn(rows, length, generator=pick)}
                if name == "hubert":
                    batch["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
                    batch["attention_mask"][1:, length // 2 :] = 0
                with torch.no_grad():
                    expected = model(**batch).logits
                torch.testing.assert_close(engine(**batch)["logits"], expected, rtol=1e-3, atol=1e-3)
        served = load_converted(folder)
        for length, padded in ((100, 320), (RATE // 4, RATE // 4), (3 * RATE, 2 * RATE)):
            wavfile.write(place / "one.wav", RATE, np.random.default_rng(0).normal(0, 0.1, length).astype(np.float32))
            assert served.inputs([place / "one.wav"])["input_values"].shape == (1, padded)
            found = served([place / "one.wav"])["logits"]
            assert found.shape == (1, len(CLASSES))
            scores = {one["label"]: one["score"] for one in quantizer.load_pipeline(folder)(str(place / "one.wav"))}
            expected = torch.from_numpy(found[0]).softmax(-1).tolist()
            assert [scores[label] for label in CLASSES] == pytest.approx(expected, abs=1e-3)


@pytest.mark.nightly
def test_lengths_of_benchmarks_are_those_of_the_data(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    words = ["--quantization", "--calibration", str(place / "tones"), "--seconds", "1", "--backend", "onnxruntime"]
    words += ["--batch-size", "1", "2", "4", "-o", str(place / "lengths")]
    assert main(["convert", "-m", str(place / "wav2vec2"), *words]) == 0
    lengths = sorted(len(read_recording(path)[1]) for path in read_recordings(place / "tones"))
    folder = place / "lengths" / "onnxruntime"
    _, usual, _ = read_json(folder / "config.json")["dimensions"]["sequence"]
    assert abs(usual - (lengths[3] + lengths[4]) / 2) <= 1
    report = read_json(folder / "report.json")
    timed = [report["latency"], *report["other_latencies"]]
    assert [(one["batch"], one["sequence"]) for one in timed] == [(2, usual), (1, lengths[0]), (4, RATE)]
    assert f"{usual} values" in (folder / "report.html").read_text()


def test_a_model_that_fixes_the_length_keeps_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    tiny_sew(place / "sew")
    words = ["--seconds", "1", "--batch-size", "1", "2", "4", "--backend", "onnxruntime", "-o", str(place / "fixed")]
    with pytest.warns(UserWarning, match="recordings are zero-padded to it, or cut. Set model.seconds"):
        assert main(["convert", "-m", str(place / "sew"), *words]) == 0
    folder = place / "fixed" / "onnxruntime"
    assert read_json(folder / "config.json")["dimensions"] == {"batch": [1, 2, 4]}
    (note,) = read_json(folder / "report.json")["fixed_sizes"]
    assert note.startswith(f"the engine accepts only inputs with a size of {RATE} along axis 1 of 'input_values': the")
    wavfile.write(place / "one.wav", RATE, np.ones(RATE // 4, dtype=np.float32))
    assert load_converted(folder).inputs([place / "one.wav"])["input_values"].shape == (1, RATE)


@pytest.mark.parametrize("sequence", [[16, 8000, RATE], [400, 800, RATE - 1]])
def test_lengths_that_the_model_or_the_data_does_not_have(place: Path, sequence: list[int]) -> None:
    name = "audio-classification"
    model, processor = load_model(str(place / "wav2vec2"), name), load_processor(str(place / "wav2vec2"), name)
    inputs = build_task(name, model, processor, min_length=sequence[0], seconds=1).inputs
    config = RunConfig.model_validate(
        {
            "model": {"source": str(place / "wav2vec2"), "task": name, "seconds": 1},
            "data": {"calibration": {"name": "audio-folder", "path": str(place / "tones")}},
            "export": {"dynamic": {"sequence": sequence}},
            "report": {"latency_sequence": sequence[1]},
            "output": str(place / "none"),
        }
    )
    problem = rf"export\.dynamic\.sequence: got the range from {sequence[0]} to {sequence[2]} values; expected at least"
    with pytest.raises(ConfigError, match=problem):
        with_lengths(config, inputs, [])


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
