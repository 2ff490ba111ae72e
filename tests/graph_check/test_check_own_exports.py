"""What we export ourselves has no finding; files of other models are in ``test_export_file.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ConvNet, Mlp

from quantizer import Quantizer
from quantizer.check import check_file

pytest.importorskip("onnx_ir", reason="exporting needs enginequant[onnx]")
pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime-avx2"])
def test_linears_and_residuals(target: str, tmp_path: Path) -> None:
    _check(Mlp().eval(), torch.randn(4, 32), tmp_path, backend=target, sites={"residual_add": True})


def test_fp8(tmp_path: Path) -> None:
    _check(Mlp().eval(), torch.randn(4, 32), tmp_path, backend="tensorrt", dtype="fp8")


def test_convolutions(tmp_path: Path) -> None:
    _check(ConvNet().eval(), torch.randn(4, 3, 16, 16), tmp_path, backend="onnxruntime")


def _check(model: torch.nn.Module, x: torch.Tensor, folder: Path, **config: Any) -> None:
    quantizer = Quantizer(preset="plain", **config)
    quantizer.calibrate(model, [x])
    path = quantizer.export(quantizer.quantize(model), folder / "m.onnx", x)
    assert check_file(path, config["backend"]) == []
