"""How often the calibration data runs through the model: counted, and bounded for the default settings."""

from __future__ import annotations

import torch
from torch import nn

from quantizer import Quantizer

BATCHES = 8
RUNS: list[int] = []


class Net(nn.Module):
    """A block of attention and linear layers, which notes its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS.append(len(x))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return x + self.feed(x)


def _calibrated(**settings: object) -> tuple[Quantizer, Net]:
    torch.manual_seed(0)
    q = Quantizer(backend="onnxruntime", **settings)
    batches = [torch.randn(2, 8, 16) for _ in range(BATCHES)]
    net = Net().eval()
    RUNS.clear()
    q.calibrate(net, batches)
    q.quantize(net)
    return q, net


def test_passes_are_those_of_the_model() -> None:
    q, _ = _calibrated()
    # One batch runs once more, to compare the attention of the proxy with the model's own.
    assert 0 <= len(RUNS) / BATCHES - q.passes <= 0.5
    assert 3 < q.passes <= 12


def test_ranges_of_one_pass_need_no_other() -> None:
    assert _calibrated(preset="plain")[0].passes == 1


def test_rounding_layer_by_layer_counts_as_one_pass_more() -> None:
    """Each part of a pass continues where the last one ended."""
    plain = {"preset": "plain", "weights": {"rounding": "gptq"}}
    assert 2 < _calibrated(**plain)[0].passes <= 4


def test_another_backend_counts_only_its_own() -> None:
    q, net = _calibrated()
    other = q.for_backend("openvino")
    RUNS.clear()
    other.quantize(net)
    assert len(RUNS) / BATCHES == other.passes - 1


def test_without_a_calibration_there_are_none() -> None:
    assert Quantizer().passes == 0
