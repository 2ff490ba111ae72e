"""``quantizer convert`` of classifiers of images: what a folder holds, that it serves, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from quantizer.cli.main import main
from quantizer.errors import QuantizerError
from quantizer.tasks import build_task, load_image_processor, load_model, load_rows

for _package in ("transformers", "PIL", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

from tiny_vision import CLASSES, SIZE, tiny_images, tiny_resnet, tiny_vit

import quantizer.pipeline.context as stages
from quantizer import Quantizer
from quantizer.pipeline import benchmark
from quantizer.pipeline import time_groups as place_groups
from quantizer.pipeline.load_converted import load_converted

MADE = {"vit": "openvino", "resnet": "onnxruntime"}
"""Which of the two is converted for which backend."""

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@dataclass(frozen=True)
class Place:
    """Tiny classifiers with their data, and what conversions made of them."""

    folder: Path

    def __getattr__(self, name: str) -> str:
        return str(self.folder / name)

    def made(self, name: str) -> Path:
        return self.folder / f"{name}-made" / MADE[name]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("images")
    torch.set_num_threads(1)
    tiny_vit(folder / "vit")
    tiny_resnet(folder / "resnet")
    tiny_images(folder / "photos", 16, seed=1)
    tiny_images(folder / "dev", 12, seed=2)
    tiny_images(folder / "test", 12, seed=3)
    here = Place(folder)
    words = ["--quantization", "--calibration", here.photos, "--rows", "12", "--batch-size", "1", "2", "4"]
    scored = ["--max-drop", "0.5", "--tuning", f"image-folder:{here.dev}", "--evaluation", f"image-folder:{here.test}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
        # Of models as small as these it depends on the CPU which groups are slower in integers.
        patch.setattr(place_groups, "is_faster", lambda *_: False)
        for name, more in (("vit", scored), ("resnet", scored[-2:])):
            out = ["--backend", MADE[name], "-o", f"{folder / name}-made"]
            assert main(["convert", "-m", str(folder / name), *words, *more, *out]) == 0
    return here


@pytest.fixture
def convert(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a conversion in an empty folder; its exit code and what it said of errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, model: str = place.vit) -> tuple[int, str]:
        code = main(["convert", "-m", model, *words])
        return code, capsys.readouterr().err

    return run


def _read(path: str | Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return document


@pytest.mark.promise("To calibrate and to compare outputs, rows need no labels.")
def test_the_folder_holds_what_a_server_needs(place: Place) -> None:
    for name in MADE:
        folder = place.made(name)
        names = {
            "model.onnx",
            "model.engine",
            "processor",
            "config.json",
            "README.md",
            "report.json",
            "report.html",
            "triton",
            *("float.onnx", "float.engine", "config.yaml", "quantizer", "resamples.json"),
        }
        assert {path.name for path in folder.iterdir()} == names
        assert _read(folder / "processor" / "preprocessor_config.json")["size"] == {"height": SIZE, "width": SIZE}
        config = _read(folder / "config.json")
        assert config["task"] == "image-classification"
        assert config["files"]["processor"] == "processor"
        assert config["dimensions"] == {"batch": [1, 2, 4]}
        assert config["max_length"] is None
        assert config["labels"] == list(CLASSES)
        described = [(v["name"], v["dtype"], v["shape"]) for v in config["inputs"] + config["outputs"]]
        assert described == [
            ("pixel_values", "float32", ["batch", 3, SIZE, SIZE]),
            ("logits", "float32", ["batch", len(CLASSES)]),
        ]
        assert config["quantization"]["rows"] == 12
        assert {(check["batch"], check["sequence"]) for check in config["checks"]} >= {(1, None), (2, None), (4, None)}


def test_the_record_has_latency_and_scores_of_each_backend(place: Place) -> None:
    for name in MADE:
        entry = _read(place.made(name) / "report.json")
        shapes = [(one["batch"], one["sequence"]) for one in (entry["latency"], *entry["other_latencies"])]
        assert shapes == [(2, None), (1, None), (4, None)]
        assert [score["which"] for score in entry["scores"]] == ["float", "proxy", "engine"]
        assert all((score["metric"], score["rows"]) == ("accuracy", 12) for score in entry["scores"])


def test_transformer_and_convolutions_are_quantized(place: Place) -> None:
    sites = {name: _read(place.made(name) / "config.json")["quantization"]["sites"] for name in MADE}
    assert sites["vit"]["linear"] == [7, 7]
    assert sites["vit"]["matmul"] == [2, 2]
    assert sites["resnet"]["conv"] == [6, 6]


@pytest.mark.parametrize("name", MADE)
def test_engine_and_processor_serve_alone(place: Place, tmp_path: Path, name: str) -> None:
    """Moved elsewhere and without the ONNX file: the labels are those of the frozen model in PyTorch."""
    folder = tmp_path / "served"
    shutil.copytree(place.made(name), folder)
    (folder / "model.onnx").unlink()
    served = load_converted(folder)
    rows = load_rows("image-folder", path=place.test)
    labels = [label for at in range(0, 12, 4) for label in served.labels([str(row.path) for row in rows[at : at + 4]])]
    source = str(place.folder / name)
    model = load_model(source, "image-classification")
    task = build_task("image-classification", model, load_image_processor(source), batch_size=4)
    frozen = Quantizer.load(place.made(name) / "quantizer").quantize(model)
    assert labels == [CLASSES[label] for label in task.predict(lambda batch: frozen(**batch), rows).decisions]
    assert len(set(labels)) > 1


def test_more_images_than_it_was_built_for(place: Place, tmp_path: Path) -> None:
    served = load_converted(place.made("vit"))
    paths = [row.path for row in load_rows("image-folder", path=place.test)]
    with pytest.raises(QuantizerError, match="5 images at once, and this engine was built for 1 to 4"):
        served(paths[:5])
    (tmp_path / "bad.jpg").write_text("no image")
    with pytest.raises(QuantizerError, match=r"bad\.jpg cannot be read as an image"):
        served([tmp_path / "bad.jpg"])


BAD = {
    "no data": (("--quantization",), "give 100 or more texts or images like those that the model will see"),
    "empty folder": (("--quantization", "--calibration", "empty"), "empty holds no images: expected files that end in"),
    "no folder": (("--quantization", "--calibration", "missing"), "a folder of images that exists"),
    "texts": (("--quantization", "--calibration", "t.txt"), "--calibration t.txt is of texts, and task image-class"),
    "tokens": (("--seq-len", "2", "4", "8"), "--seq-len 2 4 8: task image-classification is for images, which have no"),
    "another task": (("--task", "sequence-classification"), "ViTForImageClassification reads image, and task"),
    "budget without labels": (
        ("--quantization", "--calibration", "{photos}", "--max-drop", "0.1", "--tuning", "{dev}"),
        "images alone cannot be scored; expected NAME:PATH with labelled rows, such as image-csv:labels.csv",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_before_the_model_is_loaded(
    place: Place, convert: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.txt").write_text("a good film\n")
    monkeypatch.setattr(stages, "load_model", lambda *_: pytest.fail("the model was loaded"))
    words, expected = BAD[case]
    code, said = convert(*(word.format(photos=place.photos, dev=place.dev) for word in words))
    assert code == 1
    assert expected in said
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "t.txt"}


def test_images_are_no_data_for_a_model_of_texts(convert: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    import transformers

    transformers.BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path / "bert")
    tiny_images(tmp_path / "photos", 2, seed=0)
    code, said = convert("--quantization", "--calibration", "photos", "-o", "out", model="bert")
    assert code == 1
    assert "--calibration photos is of images, and task sentence-similarity is for texts: give a file of texts" in said


def test_a_label_that_the_model_does_not_have(
    place: Place, convert: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quantizer, "calibrate", lambda *_: pytest.fail("it was calibrated"))
    shutil.copytree(Path(place.test) / "red", tmp_path / "labelled" / "purple")
    code, said = convert(
        "--quantization", "--calibration", place.photos, "--evaluation", "image-folder:labelled", "-o", "out"
    )
    assert code == 1
    assert "the label 'purple' is no class of the model; expected one of its 3 names ('red', 'green', 'blue')" in said
    assert not (tmp_path / "out").exists()


def test_an_image_that_cannot_be_read(convert: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    tiny_images(tmp_path / "photos", 2, seed=0)
    (tmp_path / "photos" / "broken.png").write_bytes(b"\x89PNG\r\n")
    code, said = convert("--quantization", "--calibration", "photos", "-o", "out")
    assert code == 1
    assert "broken.png cannot be read as an image" in said
    assert {path.name for path in tmp_path.iterdir()} == {"photos"}
