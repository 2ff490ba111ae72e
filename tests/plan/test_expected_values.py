"""Expected values of a softmax stay in floating point, as the distances of boxes in YOLO's head do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quantizer import Quantizer

REASON = "it computes an expected value from the output of a softmax, such as a distance of a box"


class Convolved(nn.Module):
    """Distances as YOLO computes them: a convolution over the probabilities of 16 bins."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.conv = nn.Conv2d(3, 64, 3), nn.Conv2d(16, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).flatten(2)
        return self.conv(y.view(len(y), 4, 16, -1).transpose(2, 1).softmax(1))


class Multiplied(nn.Module):
    """Distances as D-FINE computes them: a linear function with fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3)
        self.register_buffer("project", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.first(x).flatten(2).reshape(-1, 16).softmax(1), self.project[None])


def _reasons(net: nn.Module, backend: str) -> list[tuple[bool, str]]:
    q = Quantizer(backend=backend, preset="plain")
    q.calibrate(net.eval(), [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(at)) for at in range(4)])
    ran = [entry for path, entry in q.plan.items() if not path.startswith("first") and not path.endswith("output")]
    return [(entry.quantized, entry.reason) for entry in ran if "branch" not in entry.reason]


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime", "torch"])
def test_they_stay_in_float(backend: str) -> None:
    assert _reasons(Convolved(1), backend) == [(False, REASON)]
    assert _reasons(Multiplied(), backend) == [(False, REASON)]


def test_other_readers_of_a_softmax_are_quantized() -> None:
    ((quantized, _),) = _reasons(Convolved(8), "openvino")
    assert quantized
