"""A convolution is planned where the engine has an integer kernel for it, and nowhere else: by operation and shape."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from quantizer import Quantizer
from quantizer.engines import BuildOptions, InputSizes, build_engine, inspect_engine, load_engine
from tests.outsiders.case import sqnr

_LAYERS = {
    ("Conv", 1): nn.Conv1d,
    ("Conv", 2): nn.Conv2d,
    ("Conv", 3): nn.Conv3d,
    ("ConvTranspose", 1): nn.ConvTranspose1d,
    ("ConvTranspose", 2): nn.ConvTranspose2d,
    ("ConvTranspose", 3): nn.ConvTranspose3d,
}
_EAGER = BuildOptions(compiled=False)
_SIZES = {1: (20,), 2: (9, 9), 3: (5, 6, 6)}
_INSTALLED = [name for name in ("onnxruntime", "openvino", "torch") if importlib.util.find_spec(name)]
_ALWAYS = {("onnxruntime", "Conv", 3, 1, 1), ("openvino", "ConvTranspose", 2, 1, 1)}
_ALWAYS |= {("onnxruntime", "ConvTranspose", 2, 1, 1), ("onnxruntime", "Conv", 1, 4, 2)}


def _cases() -> list[object]:
    shapes = itertools.product(_INSTALLED, ("Conv", "ConvTranspose"), (1, 2, 3), (1, 4, 32), (1, 2))
    return [pytest.param(*case, marks=() if case in _ALWAYS else pytest.mark.nightly) for case in shapes]


@pytest.mark.parametrize(("backend", "operation", "axes", "groups", "dilation"), _cases())
def test_what_is_planned_is_what_runs_in_integers(
    backend: str, operation: str, axes: int, groups: int, dilation: int, tmp_path: Path
) -> None:
    layer = _LAYERS[operation, axes](32, 32, 3, padding=1, groups=groups, dilation=dilation)
    model, data = nn.Sequential(layer, nn.ReLU()).eval(), [torch.randn(2, 32, *_SIZES[axes]) for _ in range(2)]
    q = Quantizer(backend=backend, preset="plain")
    q.calibrate(model, data, progress=False)
    planned = any(site.quantized for site in q.coverage if site.kind == "conv")
    file = q.export(q.quantize(model), tmp_path / "model.onnx", data[0])
    build_engine(backend, file, tmp_path / "model.engine", BuildOptions())
    layers = inspect_engine(backend, tmp_path / "model.engine", sizes=InputSizes(2)).layers
    assert {layer.precision for layer in layers if layer.role == "product"} == {"int8" if planned else "fp32"}


@pytest.mark.usefixtures("exact_byte_products")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("backend", _INSTALLED)
def test_an_uneven_padding_keeps_no_convolution_from_integers(backend: str, tmp_path: Path) -> None:
    convolutions = [nn.Conv2d(3, 16, 2, padding="same"), nn.Conv2d(16, 16, 4, padding="same", dilation=(1, 2))]
    model = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1]).eval()
    # Zero is not in the middle of the range, so codes are padded with a zero point other than 0.
    data = [torch.rand(2, 3, 9, 9) * 3 - 1 for _ in range(4)]
    q = Quantizer(backend=backend, preset="plain")
    q.calibrate(model, data, progress=False)
    frozen = q.quantize(model)
    build_engine(backend, q.export(frozen, tmp_path / "model.onnx", data[0]), tmp_path / "e", _EAGER)
    layers = inspect_engine(backend, tmp_path / "e", sizes=InputSizes(2)).layers
    assert {layer.precision for layer in layers if layer.role == "product"} == {"int8"}
    (found,) = load_engine(backend, tmp_path / "e")(data[1].numpy()).values()
    with torch.no_grad():
        assert sqnr(frozen(data[1]), torch.from_numpy(found)) > 40
