"""Convolutions that OpenVINO computes wrongly on some CPUs are not quantized there, and are quantized elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantizer import Quantizer


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_a_wide_kernel_over_few_channels(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(32, 64, 8, 8), nn.Conv1d(64, 64, 8, 8), nn.ConvTranspose1d(64, 32, 8, 8)).eval()
    quantizer = Quantizer(preset="plain", backend=backend)
    quantizer.calibrate(model, [torch.randn(4, 32, 256)], progress=False)
    rows = {row.name.split(".")[0]: row for row in quantizer.coverage if row.multiply_adds}
    assert rows["1"].quantized
    # Neither has an integer kernel for transposed ones.
    assert not rows["2"].quantized
    assert rows["2"].reason == f"{backend} has no integer kernel for conv_transpose1d"
    assert rows["0"].quantized is (backend == "onnxruntime")
    if backend == "openvino":
        assert rows["0"].rule == "target openvino"
        assert rows["0"].reason.startswith("openvino gives wrong results for an INT8 convolution with kernel width 8")
