"""``quantizer convert`` of classifiers of images: what a folder holds, that it serves, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from quantizer.cli.main import main
from quantizer.errors import QuantizerError
from quantizer.tasks import build_task, load_examples, load_image_processor, load_model

for _package in ("transformers", "PIL", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

from helpers import read_json
from tiny_vision import CLASSES, SIZE, tiny_detector, tiny_images, tiny_resnet, tiny_vit

import quantizer
from quantizer import Quantizer
from quantizer.pipeline import benchmark
from quantizer.pipeline.load import load_converted
from quantizer.tasks.metrics import sqnr_db

MADE = {"vit": "openvino", "resnet": "onnxruntime"}
"""Which of the two is converted for which backend."""

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny classifiers with their data, and what conversions made of them."""
    folder = tmp_path_factory.mktemp("images")
    torch.set_num_threads(1)
    tiny_vit(folder / "vit")
    tiny_resnet(folder / "resnet")
    tiny_images(folder / "photos", 16, seed=1)
    tiny_images(folder / "test", 12, seed=3)
    words = ["--quantization", "--calibration", f"{folder}/photos", "--samples", "12", "--batch-size", "1", "2", "4"]
    words += ["--evaluation", f"image-folder:{folder}/test"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
        for name, backend in MADE.items():
            out = ["--backend", backend, "-o", f"{folder / name}-made"]
            assert main(["convert", "-m", str(folder / name), *words, *out]) == 0
    return folder


def _made(place: Path, name: str) -> Path:
    return place / f"{name}-made" / MADE[name]


@pytest.mark.parametrize(
    ("name", "sites"), [("vit", {"linear": [7, 7], "matmul": [2, 2]}), ("resnet", {"conv": [6, 6]})]
)
def test_what_differs_from_a_conversion_of_texts(place: Path, name: str, sites: dict[str, list[int]]) -> None:
    """What is the same: tests/goldens."""
    folder = _made(place, name)
    assert not (folder / "tokenizer").exists()
    assert read_json(folder / "processor" / "preprocessor_config.json")["size"] == {"height": SIZE, "width": SIZE}
    config, record = read_json(folder / "config.json"), read_json(folder / "report.json")
    assert (config["task"], config["max_length"]) == ("image-classification", None)
    assert (config["files"]["processor"], config["dimensions"]) == ("processor", {"batch": [1, 2, 4]})
    assert config["labels"] == list(CLASSES)
    assert [(v["name"], v["dtype"], v["shape"]) for v in config["inputs"] + config["outputs"]] == [
        ("pixel_values", "float32", ["batch", 3, SIZE, SIZE]),
        ("logits", "float32", ["batch", len(CLASSES)]),
    ]
    assert config["quantization"]["samples"] == 12
    assert {kind: config["quantization"]["sites"][kind] for kind in sites} == sites
    assert {(check["batch"], check["sequence"]) for check in config["checks"]} >= {(1, None), (2, None), (4, None)}
    latencies = (record["latency"], *record["other_latencies"])
    assert [(one["batch"], one["sequence"]) for one in latencies] == [(2, None), (1, None), (4, None)]
    assert {(score["metric"], score["samples"]) for score in record["scores"]} == {("accuracy", 12)}
    assert record["scores"][0]["value"] > (0.5 if name == "resnet" else 0)


@pytest.mark.parametrize("name", MADE)
def test_engine_and_processor_serve_alone(place: Path, tmp_path: Path, name: str) -> None:
    """Moved elsewhere and without the ONNX file: the labels are those of the frozen model in PyTorch."""
    folder = tmp_path / "served"
    shutil.copytree(_made(place, name), folder)
    (folder / "model.onnx").unlink()
    served = load_converted(folder)
    rows = load_examples("image-folder", path=place / "test")
    labels = [label for at in range(0, 12, 4) for label in served.labels([str(row.path) for row in rows[at : at + 4]])]
    source = str(place / name)
    model = load_model(source, "image-classification")
    task = build_task("image-classification", model, load_image_processor(source), batch_size=4)
    frozen = Quantizer.load(_made(place, name) / "quantizer").quantize(model)
    assert labels == [CLASSES[label] for label in task.predict(lambda batch: frozen(**batch), rows).decisions]
    assert len(set(labels)) > 1


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["detr", "yolos"])
def test_a_published_detector_as_it_is(place: Path, tmp_path: Path, kind: str) -> None:
    """Its processor keeps proportions; the delivered one makes the size of the engine."""
    source = tiny_detector(tmp_path / kind, kind)
    words = ["--quantization", "--calibration", f"{place}/photos", "--samples", "12", "--backend", "onnxruntime"]
    assert main(["convert", "-m", str(source), *words, "-o", str(tmp_path / "made")]) == 0
    folder = tmp_path / "made" / "onnxruntime"
    paths = [row.path for row in load_examples("image-folder", path=place / "test")][:2]
    served = load_converted(folder)(paths)
    model = load_model(str(source), "object-detection")
    task = build_task("object-detection", model, load_image_processor(str(source)), batch_size=2)
    with torch.no_grad():
        expected = Quantizer.load(folder / "quantizer").quantize(model)(**task.inputs.batch(paths))
    assert sqnr_db(expected.pred_boxes.numpy(), served["pred_boxes"]) > 30


def test_more_images_than_it_was_built_for(place: Path, tmp_path: Path) -> None:
    served = load_converted(_made(place, "vit"))
    paths = [str(row.path) for row in load_examples("image-folder", path=place / "test")]
    labels = [label for path in paths for label in served.labels([path])]
    assert served.labels(paths) == labels
    pipe = quantizer.load_pipeline(_made(place, "vit"))
    assert [best["label"] for best, *_ in pipe(paths)] == labels
    assert len(pipe(paths[0])) == len(CLASSES)
    (tmp_path / "bad.jpg").write_text("no image")
    with pytest.raises(QuantizerError, match=r"bad\.jpg cannot be read as an image"):
        served([tmp_path / "bad.jpg"])
    with pytest.raises(QuantizerError, match=r"bad\.jpg cannot be read as an image"):
        pipe(str(tmp_path / "bad.jpg"))
