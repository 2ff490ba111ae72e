"""Additions of box coordinates stay in floating point, as in the decoders of deformable detectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer

REASON = "it adds at most four values per row, such as the coordinates of a box"


class Refined(nn.Module):
    """A decoder that corrects boxes twice, as RT-DETRv2 does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start, self.first, self.second = (nn.Linear(32, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        box = self.first(x) + self.start(x)
        return self.second(torch.relu(x)) + box


def _adds(width: int, backend: str) -> list[tuple[bool, str]]:
    q = Quantizer(backend=backend, preset="plain", sites={"residual_add": True})
    q.calibrate(
        Refined(width).eval(), [torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(at)) for at in range(4)]
    )
    return [(entry.quantized, entry.reason) for path, entry in q.plan.items() if "add" in path]


@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
def test_they_stay_in_float(backend: str) -> None:
    assert _adds(4, backend) == [(False, REASON), (False, REASON)]


def test_wider_sums_are_quantized() -> None:
    assert [quantized for quantized, _ in _adds(32, "openvino")] == [True, True]
