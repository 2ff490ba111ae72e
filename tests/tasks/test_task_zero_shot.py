"""Images among labels that the request names: the image tower computes what CLIP and SigLIP compute with texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from tiny_vision import CLASSES, SIZE, tiny_images

from quantizer.cli.main import main
from quantizer.config.data_section import label_texts
from quantizer.errors import TaskError
from quantizer.tasks import Pair, build_task, load_examples, load_model, load_processor, read_checkpoint

NAME = "zero-shot-image-classification"
TEXTS = {"red": "a cat is fast .", "green": "the film was good", "blue": "the plane"}
_TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def _clip(folder: Path, tokenizer: Any) -> str:
    torch.manual_seed(0)
    text = {**_TOWER, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.sep_token_id, "initializer_range": 0.2}
    vision = {**_TOWER, "image_size": SIZE, "patch_size": 8, "initializer_range": 0.2}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    return _saved(transformers.CLIPModel(config), folder, tokenizer)


def _siglip(folder: Path, tokenizer: Any) -> str:
    torch.manual_seed(0)
    text = {**_TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 64, "projection_size": 32}
    vision = {**_TOWER, "image_size": SIZE, "patch_size": 8}
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
    with torch.no_grad():
        model.logit_bias.fill_(-3.0)
        model.logit_scale.fill_(1.5)
    return _saved(model, folder, tokenizer)


def _saved(model: Any, folder: Path, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    return _clip(tmp_path_factory.mktemp("clip"), tokenizer)


SIMILARITY = "sentence-similarity"


def test_the_text_tower_gives_the_embeddings_of_texts(clip: str, tokenizer: Any) -> None:
    model = load_model(clip, SIMILARITY)
    task = build_task(SIMILARITY, model, load_processor(clip, SIMILARITY), max_length=16)
    examples = [Pair("a cat is fast .", "the film was good", 1.0), Pair("the plane", "a good film .", 3.0)]
    found = task.predict(lambda batch: model(**batch), examples)
    whole: Any = transformers.CLIPModel.from_pretrained(clip).eval()
    encoded = tokenizer(
        [text for example in examples for text in (example.first, example.second)], padding=True, return_tensors="pt"
    )
    accepted = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    images = torch.randn(1, 3, SIZE, SIZE)
    with torch.no_grad():
        expected = whole(pixel_values=images, **accepted).text_embeds.numpy()
    np.testing.assert_allclose(found.outputs, expected, atol=1e-6)
    np.testing.assert_allclose(found.decisions, (expected[0::2] * expected[1::2]).sum(-1), atol=1e-6)
    told = read_checkpoint(clip, SIMILARITY)
    assert (told.positions, told.vocabulary, told.task) == (77, len(tokenizer), NAME)


def test_text_towers_that_count_padding_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(
        TaskError, match="SiglipModel has image inputs, and task 'sentence-similarity' needs text inputs"
    ):
        load_model(_siglip(tmp_path, tokenizer), SIMILARITY)


@pytest.mark.parametrize("make", [_clip, _siglip])
def test_logits_are_those_of_the_whole_model(tmp_path: Path, tokenizer: Any, make: Any) -> None:
    source = make(tmp_path, tokenizer)
    assert read_checkpoint(source).task == NAME
    model = load_model(source, NAME, texts=TEXTS)
    images = torch.randn(3, 3, SIZE, SIZE)
    whole: Any = transformers.AutoModel.from_pretrained(source).eval()
    padding: dict[str, Any] = {"padding": "max_length", "max_length": 64} if make is _siglip else {"padding": True}
    encoded = tokenizer(list(TEXTS.values()), return_tensors="pt", **padding)
    accepted = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = whole(pixel_values=images, **accepted).logits_per_image
        found = model(images)["logits"]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert found.argmax(dim=-1).tolist() == expected.argmax(dim=-1).tolist()
    assert sum(one.numel() for one in model.parameters()) < sum(one.numel() for one in whole.parameters())
    # The pipeline of transformers takes a sigmoid of each logit of SigLIP, and a softmax of those of CLIP.
    assert model.config.problem_type == ("multi_label_classification" if make is _siglip else None)


def test_labels_are_scored_by_their_names(clip: str, tmp_path: Path) -> None:
    task = build_task(NAME, load_model(clip, NAME, texts=TEXTS), load_processor(clip, NAME), batch_size=6)
    examples = load_examples("image-folder", path=tiny_images(tmp_path, 6, seed=0))
    targets = torch.tensor(task.targets(examples))
    right = task.predict(lambda batch: {"logits": torch.nn.functional.one_hot(targets, 3).float()}, examples)
    assert task.score(right, examples) == 1.0
    assert task.classes == CLASSES  # type: ignore[attr-defined]


def test_the_text_of_a_label() -> None:
    assert label_texts(["cat", "{x}"], "a {}!") == {"cat": "a cat!", "{x}": "a {x}!"}


def test_labels_that_do_not_fit(clip: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"needs labels: .* model\.labels or --labels"):
        load_model(clip, NAME)
    with pytest.raises(TaskError, match="task 'fill-mask' uses the labels of its model: remove the labels cat, dog"):
        load_model(clip, "fill-mask", texts={"cat": "a cat", "dog": "a dog"})


BAD = {
    "none": ((), "needs labels: set two or more"),
    "one": (("--labels", "cat"), "--labels cat: model.labels: got only one label; expected at least two"),
    "twice": (("--labels", "cat", "cat"), "--labels cat cat: model.labels: got 'cat' twice"),
    "template": (("--labels", "cat", "dog", "--template", "a photo"), "got the template 'a photo'; expected"),
    "other names": (("--labels", "cat", "dog", "--evaluation", "image-folder:photos"), "is no class of the model"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests(
    clip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_images(tmp_path / "photos", 3, seed=0)
    words, expected = BAD[case]
    assert main(["convert", "-m", clip, *words, "--quantization", "--calibration", "photos", "-o", "out"]) == 1
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_with_labels_of_another_kind(clip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"source": clip, "task": NAME, "labels": ["cat"]}
    data = {"calibration": {"name": "image-folder"}, "evaluation": {"name": "image-folder"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    assert main(["validate", str(tmp_path / "run.yaml")]) == 1
    assert "model.labels: got only one label" in capsys.readouterr().err


@pytest.mark.nightly
def test_clip_is_converted_end_to_end(clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="a conversion needs enginequant[hf,onnx,onnxruntime]")
    from quantizer.pipeline import benchmark
    from quantizer.pipeline.load import load_converted

    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    folder = tiny_images(tmp_path / "photos", 6, seed=0)
    words = ["--labels", *CLASSES, "--template", "a {}", "--quantization", "--calibration", str(folder)]
    words += ["--evaluation", f"image-folder:{folder}", "--backend", "onnxruntime", "--batch-size", "1", "2", "6"]
    assert main(["convert", "-m", clip, *words, "-o", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "onnxruntime" / "report.json").read_text())
    assert [(one["form"], one["metric"], one["samples"]) for one in record["scores"]] == [
        (which, "accuracy", 6) for which in ("float", "engine")
    ]
    served = load_converted(tmp_path / "out" / "onnxruntime")
    assert served.config["labels"] == list(CLASSES)
    paths = [example.path for example in load_examples("image-folder", path=folder)]
    model = load_model(clip, NAME, texts=label_texts(CLASSES, "a {}"))
    task = build_task(NAME, model, load_processor(clip, NAME))
    with torch.no_grad():
        expected = model(**task.inputs.batch(paths))["logits"].numpy()  # type: ignore[attr-defined]
    found = served(paths)["logits"]
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert set(served.labels(paths)) <= set(CLASSES)
