"""The scripts among the examples: they run as their reader would run them, and print figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from example_runs import NEEDED, printed_here, skip_without
from example_runs import printed as printed_by
from tiny_run import tiny_run, write_rows


def test_bert_ptq_of_a_model_of_ones_own_shows_every_step_and_scores_in_pairs(tmp_path: Path) -> None:
    skip_without(*NEEDED[1:])
    from transformers import BertConfig, BertForSequenceClassification

    tiny_run(tmp_path)
    # The script's rows are as long as a task's are where nothing is said.
    config = BertConfig.from_pretrained(tmp_path / "model", max_position_embeddings=128)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "calibration.csv", 128, seed=1)
    words = [f"--{name}={tmp_path / name}.csv" for name in ("calibration", "evaluation")]
    flips, decibels = _figures(printed_here("bert_ptq.py", "--fallback=1", f"--model={tmp_path / 'model'}", *words))
    assert flips["float"] == 0
    assert min(decibels.values()) > 5


# A minute of MiniLM, whose engine the notebook of test_examples.py shows too.
@pytest.mark.nightly
def test_bert_ptq_of_minilm_is_close_to_float() -> None:
    skip_without(*NEEDED)
    printed = printed_by("bert_ptq.py", "--fallback", "1")
    assert "linear 38 of 38, matmul 12 of 12" in printed
    flips, decibels = _figures(printed)
    assert flips["float"] == 0
    assert max(flips.values()) < 0.1
    assert min(decibels.values()) > 15


def _figures(printed: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the share of changed labels and the decibels of each model that was scored."""
    costs = printed.split("## What each group costs")[1].split("## The engine")[0]
    assert sum(line.rstrip().endswith(" yes") for line in costs.splitlines()) == 1
    rows = {line.split(":")[0]: line for line in printed.splitlines() if "label_flips" in line}
    assert list(rows) == ["float", "frozen", "engine"]
    flips = {name: float(line.split("label_flips ")[1].split(",")[0]) for name, line in rows.items()}
    decibels = {name: float(line.split("sqnr_db ")[1]) for name, line in rows.items()}
    return flips, decibels


@pytest.mark.nightly
def test_gpt2_scales_agree_with_model_optimizer() -> None:
    skip_without("transformers", "modelopt")
    rows = [line.split() for line in printed_by("gpt2_tripy_scales.py").splitlines() if line.startswith("transformer.")]
    assert [row[0] for row in rows] == [
        f"transformer.h.{block}.{name}"
        for block in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert {row[5] for row in rows} == {"0"}
    assert max(float(row[6]) for row in rows) < 1e-6


# Four conversions.
@pytest.mark.nightly
def test_a_collection_has_a_card_and_a_repository_for_each_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("transformers", "onnx", "onnxruntime", "openvino", "PIL")
    from huggingface_hub import ModelCard
    from tiny_vision import tiny_images, tiny_vit

    from quantizer.pipeline import benchmark

    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.05)
    tiny_run(tmp_path)
    with (tmp_path / "calibration.csv").open(newline="") as rows:
        (tmp_path / "texts.txt").write_text("".join(f"{row['text']}\n" for row in csv.DictReader(rows)))
    vit, images = tiny_vit(tmp_path / "vit"), tiny_images(tmp_path / "images", 12, seed=1)
    (tmp_path / "list.txt").write_text(f"# two models\n{tmp_path / 'model'}\n{vit} image-classification\n")
    data = [f"--texts={tmp_path / 'texts.txt'}", f"--images={images}", f"--output={tmp_path / 'out'}"]
    printed_here("hub_collection.py", str(tmp_path / "list.txt"), *data, "--owner=me", "--batch-size", "1", "2", "4")
    entries = json.loads((tmp_path / "out" / "collection.json").read_text())
    of_text = {"openvino", "onnx", "sentence-transformers", "optimum", "transformers-js", "compressed-tensors"}
    for model, layouts in (("model", of_text), ("vit", of_text - {"sentence-transformers"})):
        named = [entry for entry in entries if entry["model"].endswith(model)]
        assert {entry["layout"] for entry in named} == layouts
    assert len({entry["repository"] for entry in entries}) == len(entries) == 14
    for entry in entries:
        card = ModelCard.load(tmp_path / "out" / entry["folder"] / "README.md", ignore_metadata_errors=False)
        assert entry["layout"] in card.data.tags


def test_a_model_of_the_collection_without_a_task_or_data(tmp_path: Path) -> None:
    skip_without("transformers", "onnx", "onnxruntime", "openvino")
    tiny_run(tmp_path)
    (tmp_path / "list.txt").write_text(f"{tmp_path / 'model'}\n")
    with pytest.raises(SystemExit, match="task sequence-classification needs --texts"):
        printed_here("hub_collection.py", str(tmp_path / "list.txt"), "--owner=me", f"--output={tmp_path / 'out'}")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": ["Unknown"]}))
    with pytest.raises(SystemExit, match="its task is not in its config; write it behind the name"):
        printed_here("hub_collection.py", str(tmp_path / "list.txt"), "--owner=me", f"--output={tmp_path / 'out'}")
