"""Whole runs of encoders without a head: a search over texts, and images that find those with their label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from quantizer.cli.main import main

for _package in ("transformers", "sklearn", "PIL", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,onnx,openvino,onnxruntime]")

import transformers
from helpers import read_json
from tiny_run import BAD, COMMON, GOOD, tiny_run
from tiny_vision import SIZE, tiny_dinov2, tiny_images

from quantizer.pipeline import benchmark
from quantizer.pipeline import time_groups as place_groups
from quantizer.pipeline.load import load_converted

# Half a minute of engines; tests/tasks has the scores of both tasks.
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("exact_byte_products", "quick")]

RECALL = {f"recall_at_100{end}" for end in ("", "_difference", "_difference_low", "_difference_high")}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    # Of models as small as these it depends on the CPU which groups are slower in integers.
    monkeypatch.setattr(place_groups, "is_faster", lambda *_: False)


def _search(folder: Path) -> dict[str, Any]:
    """Write a tiny encoder and a collection in the layout of TREC; the mapping is a run of them."""
    run = tiny_run(folder)
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder / "model")
    words = [*GOOD, *BAD]
    documents = [f"the {COMMON[place % 8]} was {word} ." for place, word in enumerate(words * 12)]
    (folder / "documents.tsv").write_text("".join(f"d{at}\t{text}\n" for at, text in enumerate(documents)))
    (folder / "queries.tsv").write_text("".join(f"q{at}\t{word}\n" for at, word in enumerate(words)))
    lines = [f"q{at % len(words)} 0 d{at} {1 + at % 2}\n" for at in range(len(documents))]
    (folder / "qrels.txt").write_text("".join(lines))
    data = {"name": "trec", "path": str(folder)}
    run["model"]["task"] = "retrieval"
    run["data"] |= {"calibration": {**data, "samples": 4}, "evaluation": {**data, "offset": 4}}
    run["quantizer"].pop("exclude")
    return run


def test_a_run_scores_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "search.yaml").write_text(yaml.safe_dump({**_search(tmp_path), "output": str(tmp_path / "done")}))
    assert main(["run", str(tmp_path / "search.yaml")]) == 0
    record = read_json(tmp_path / "done" / "report.json")
    scores = {score["form"]: score for score in record["scores"]}
    assert {(score["metric"], score["samples"]) for score in scores.values()} == {("ndcg_at_10", 6)}
    engine = scores["engine"]
    low, high = engine["interval"]
    assert low <= engine["difference"] <= high
    assert engine["difference"] == pytest.approx(engine["value"] - scores["float"]["value"])
    assert engine["paired"].keys() == {*RECALL, "mean_cosine", "sqnr_db"}
    assert engine["paired"]["mean_cosine"] > 0.98
    assert "ndcg_at_10" in capsys.readouterr().out
    assert "Recall at 100" in (tmp_path / "done" / "report.html").read_text()


def test_a_conversion_for_a_search(tmp_path: Path) -> None:
    _search(tmp_path)
    words = [
        "convert",
        "-m",
        f"{tmp_path}/model",
        "--task",
        "retrieval",
        "--quantization",
        "--seq-len",
        "8",
        "16",
        "32",
    ]
    words += ["--calibration", f"trec:{tmp_path}", "--evaluation", f"trec:{tmp_path}", "--batch-size", "1", "2", "8"]
    assert main([*words, "--backend", "openvino", "-o", f"{tmp_path}/made"]) == 0
    record = read_json(tmp_path / "made" / "openvino" / "report.json")
    assert {(score["metric"], score["samples"]) for score in record["scores"]} == {("ndcg_at_10", 10)}
    assert load_converted(tmp_path / "made" / "openvino")(["a good film"])["last_hidden_state"].shape[0] == 1


def test_a_conversion_of_a_bare_image_encoder(tmp_path: Path) -> None:
    """Without a task and without labels; with labels its images are scored."""
    tiny_dinov2(tmp_path / "dinov2")
    tiny_images(tmp_path / "photos", 12, seed=1)
    words = ["convert", "-m", f"{tmp_path}/dinov2", "--quantization", "--calibration", f"{tmp_path}/photos"]
    words += ["--evaluation", f"image-folder:{tmp_path}/photos", "--batch-size", "1", "2", "4"]
    assert main([*words, "--backend", "openvino", "-o", f"{tmp_path}/made"]) == 0
    folder = tmp_path / "made" / "openvino"
    config, record = read_json(folder / "config.json"), read_json(folder / "report.json")
    assert config["task"] == "image-feature-extraction"
    assert config["inputs"][0]["shape"] == ["batch", 3, SIZE, SIZE]
    scores = {score["form"]: score for score in record["scores"]}
    assert {(score["metric"], score["samples"]) for score in scores.values()} == {("ndcg_at_10", 12)}
    assert scores["engine"]["paired"].keys() >= RECALL
    paths = sorted((tmp_path / "photos").rglob("*.png"))[:2]
    assert load_converted(folder)(paths)["last_hidden_state"].shape == (2, 17, 32)


def test_a_bare_image_encoder_needs_no_labels(tmp_path: Path) -> None:
    tiny_dinov2(tmp_path / "dinov2")
    tiny_images(tmp_path / "photos", 8, seed=1)
    words = ["convert", "-m", f"{tmp_path}/dinov2", "--quantization", "--calibration", f"{tmp_path}/photos"]
    assert main([*words, "--backend", "onnxruntime", "-o", f"{tmp_path}/made"]) == 0
    assert read_json(tmp_path / "made" / "onnxruntime" / "report.json")["scores"] == []
