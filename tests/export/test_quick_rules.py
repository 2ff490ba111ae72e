"""Rules of onnxscript that are tried only at nodes of their last operator find what they find at all nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import ConvNet, batch, tiny
from torch import Tensor, nn

from quantizer.export import exporter

pytest.importorskip("onnxscript", reason="install enginequant[onnx]")


class Matching(nn.Module):
    """What several rules match: casts, transposes and reshapes after each other, and clamps of clamps."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1).transpose(0, 1).double().float().reshape(2, 12).reshape(3, 8)
        return y.clamp(-3, 3).clamp(-1, 2) + x.new_zeros(8).unsqueeze(0).expand(3, 8)


NETS = {
    "bert": (lambda: tiny("bert"), lambda: batch("bert")),
    "convolutions": (ConvNet, lambda: torch.randn(2, 3, 16, 16)),
    "matching": (Matching, lambda: torch.randn(4, 6)),
}


@pytest.mark.parametrize("name", NETS)
def test_files_are_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, example = NETS[name]
    model, inputs = build().eval(), example()
    quick = exporter.export_onnx(model, tmp_path / "quick.onnx", inputs, opset=20, dtype=torch.float32)
    monkeypatch.setattr(exporter, "_quick_rule", lambda rule: rule)
    slow = exporter.export_onnx(model, tmp_path / "slow.onnx", inputs, opset=20, dtype=torch.float32)
    assert quick.read_bytes() == slow.read_bytes()
