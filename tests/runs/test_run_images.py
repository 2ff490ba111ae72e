"""``quantizer run`` on a classifier of images: the same stages, without tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from quantizer.cli.main import main

for _package in ("transformers", "PIL", "scipy", "onnx", "onnxscript", "openvino"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,onnx,openvino]")

from tiny_vision import tiny_images, tiny_resnet


def _written(folder: Path) -> Path:
    tiny_resnet(folder / "resnet")
    tiny_images(folder / "photos", 12, seed=1)
    tiny_images(folder / "test", 12, seed=3)
    run = {
        "model": {"source": str(folder / "resnet"), "task": "image-classification"},
        "data": {
            "calibration": {"name": "image-folder", "path": str(folder / "photos")},
            "evaluation": {"name": "image-folder", "path": str(folder / "test")},
            "batch_size": 8,
        },
        "quantizer": {"backend": "openvino"},
        "export": {"dynamic": {"batch": [1, 2, 8]}},
        "report": {"latency_batch": 2, "bootstrap": 50},
        "output": str(folder / "out"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def test_a_run_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written(tmp_path)
    assert main(["run", str(path)]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [(score["which"], score["metric"], score["rows"]) for score in report["scores"]] == [
        (which, "accuracy", 12) for which in ("float", "proxy", "engine")
    ]
    assert report["scores"][0]["value"] > 0.5
    assert (report["latency"]["batch"], report["latency"]["sequence"]) == (2, None)
    convolutions = [site for site in report["coverage"] if site["kind"] == "conv" and site["quantized"]]
    assert len(convolutions) == 6
    assert "batch 2, 1 thread" in (tmp_path / "out" / "report.html").read_text()


def test_a_label_that_the_model_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written(tmp_path)
    (tmp_path / "test" / "red").rename(tmp_path / "test" / "purple")
    assert main(["run", str(path)]) == 1
    assert "the label 'purple' is no class of the model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
