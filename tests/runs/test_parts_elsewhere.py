"""Models in parts with engines for a GPU that is elsewhere."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from quantizer.cli.main import main

for _package in ("transformers", "torchmetrics", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,onnxruntime]")

from tiny_seq2seq import TEXTS, tiny_t5

from quantizer.report import read_record
from quantizer.runs.convert import measure
from quantizer.runs.convert.parts import part_maker
from quantizer.tasks.seq2seq.parts import DECODER, PARTS

AHEAD = find_spec("tensorrt_rtx_bindings") is not None and not torch.cuda.is_available()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tiny_t5(folder / "t5")
    (folder / "texts.txt").write_text("\n".join(TEXTS * 4))
    (folder / "plain.yaml").write_text("preset: plain\n")
    return folder


def _converted(place: Path, name: str, *more: str) -> Path:
    words = ["convert", "-m", str(place / "t5"), "--batch-size", "1", "2", "4", "--seq-len", "4", "8", "16"]
    words += ["--new-tokens", "6", *more, "-o", str(place / name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_SECONDS", 0.1)
        assert main(words) == 0
    return place / name


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


@pytest.mark.nightly
def test_engines_that_do_not_run_here_are_told_as_such(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_maker, "runs_here", lambda _: False)
    words = ["--quantization", "--calibration", str(place / "texts.txt"), "--config", str(place / "plain.yaml")]
    folder = _converted(place, "elsewhere", "--backend", "onnxruntime", *words) / "onnxruntime"
    config = _read(folder / "config.json")
    assert config["verified"] == "not verified: built ahead of time, and there is no GPU here"
    assert all((folder / part["engine"]).is_file() for part in config["parts"].values())
    assert list(config["generated"]["agreement"]) == ["proxy"]
    record = read_record(folder / "report.json")
    assert record.latency is None
    assert [(one.output, one.engine) for one in record.outputs] == [
        (f"{name}: {output}", False)
        for name, output in zip(PARTS, ("last_hidden_state", "logits", "logits"), strict=True)
    ]
    assert record.engine.verified.startswith("not verified")


@pytest.mark.promise("Engines of TensorRT-RTX are built without a GPU, and `on_gpu` has a folder for each part")
@pytest.mark.nightly
@pytest.mark.skipif(not AHEAD, reason="needs enginequant[tensorrt-rtx] on a machine without a GPU")
def test_parts_are_built_for_a_gpu_elsewhere(place: Path) -> None:
    words = ["--quantization", "--calibration", str(place / "texts.txt"), "--config", str(place / "plain.yaml")]
    made = _converted(place, "rtx", "--backend", "tensorrt-rtx", "--compute-capability", "sm89", *words)
    folder = made / "tensorrt-rtx"
    config = _read(folder / "config.json")
    assert config["compute_capability"] == "sm89"
    assert list(config["generated"]["agreement"]) == ["proxy", "simulation"]
    for name, part in config["parts"].items():
        script = folder / part["gpu_check"]
        assert script == folder / "on_gpu" / name / "run_on_gpu.sh"
        settings = (script.parent / "gpu" / "settings.sh").read_text()
        assert "CAPABILITY=sm89" in settings
        cases = re.search(r"CASES='?([^'\n]*)", settings)
        assert cases is not None
        least, usual = (_read(script.parent / "gpu" / case / "case.json") for case in cases[1].split())
        # Caches are compared at the least shape: dozens of them would fill the folder.
        assert len(least["outputs"]) == len(part["outputs"])
        assert len(usual["outputs"]) == 1
    hidden = next(one for one in config["parts"][DECODER]["inputs"] if one["name"] == "encoder_hidden_states")
    assert hidden["dtype"] == "float16"
