"""Classifiers that timm saved: loaded through the wrapper of transformers where timm is installed, else refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import CLASSES, tiny_images

from quantizer.cli.main import main
from quantizer.errors import MissingDependencyError
from quantizer.tasks import build_task, load_examples, load_model, load_processor, read_checkpoint
from quantizer.tasks import checkpoints as timm_models

TASK = "image-classification"


def test_without_timm_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": {}}))
    monkeypatch.setattr(timm_models, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"'timm' is not installed: run .*enginequant\[timm\]"):
        read_checkpoint(str(tmp_path))


def test_arguments_that_the_wrapper_gives_itself_are_left_to_it() -> None:
    class Config:
        model_type = "timm_wrapper"
        model_args: Any = {"num_classes": 3, "in_chans": 3}  # noqa: RUF012

    assert timm_models.loadable(Config()).model_args == {"in_chans": 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    for package in ("timm", "torchvision"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("timm is not installed")
    import timm
    from timm.models import save_for_hf

    folder = tmp_path_factory.mktemp("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_convnext", num_classes=len(CLASSES), pretrained=False)
    save_for_hf(model, folder, model_config={"label_names": list(CLASSES)}, safe_serialization=True)
    return str(folder)


def test_a_folder_of_timm_loads_with_its_own_data_config(source: str, tmp_path: Path) -> None:
    import timm

    found = read_checkpoint(source)
    assert (found.task, found.labels) == (TASK, CLASSES)
    model = load_model(source, TASK)
    task = build_task(TASK, model, load_processor(source, TASK))
    path = load_examples("image-folder", path=tiny_images(tmp_path, 3, seed=0))[0].path  # type: ignore[union-attr]
    batch = task.inputs.batch([path])  # type: ignore[attr-defined]
    alone = timm.create_model(f"local-dir:{source}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(alone)
    from quantizer.tasks import read_image

    expected = timm.data.create_transform(**config, is_training=False)(read_image(path))
    torch.testing.assert_close(batch["pixel_values"][0], expected)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, alone(expected[None]))


def test_it_is_converted_and_serves(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="a conversion needs enginequant[hf,onnx,onnxruntime]")
    from quantizer.pipeline import benchmark
    from quantizer.pipeline.load import load_converted

    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    photos = tiny_images(tmp_path / "photos", 6, seed=0)
    words = ["--quantization", "--calibration", str(photos), "--evaluation", f"image-folder:{photos}"]
    words += ["--backend", "onnxruntime", "--batch-size", "1", "2", "6", "-o", str(tmp_path / "out")]
    assert main(["convert", "-m", source, *words]) == 0
    served = load_converted(tmp_path / "out" / "onnxruntime")
    paths = [example.path for example in load_examples("image-folder", path=photos)]  # type: ignore[union-attr]
    assert set(served.labels(paths)) <= set(CLASSES)
