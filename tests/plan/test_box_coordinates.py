"""Additions of box coordinates and distances of boxes stay in floating point."""

from __future__ import annotations

from collections.abc import Callable

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


class Distances(nn.Module):
    """A head whose last convolution gives ``width`` values per position, which ``read`` uses."""

    def __init__(self, width: int, read: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.after = nn.Conv2d(3, 8, 3), nn.Conv2d(8, width, 1), nn.Conv2d(width, 8, 1)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.last(torch.relu(self.first(x))), self.after)


def _box(distances: Tensor, _: nn.Module) -> Tensor:
    flat = torch.cat([distances.flatten(2), distances.flatten(2)], dim=-1)
    return torch.cat([1 - flat[:, :2], 1 + flat[:, 2:]], dim=1)


def _by_a_layer(features: Tensor, after: nn.Module) -> Tensor:
    return after(torch.relu(features))


@pytest.mark.parametrize(
    ("width", "read", "backend", "stays"),
    [
        (4, _box, "onnxruntime", True),
        (4, _box, "openvino", False),
        (5, _box, "onnxruntime", False),
        (4, _by_a_layer, "onnxruntime", False),
    ],
)
def test_the_last_convolution_of_a_box_keeps_a_float_output(
    width: int, read: Callable[[Tensor, nn.Module], Tensor], backend: str, stays: bool
) -> None:
    """Only where a convolution in INT8 has an output in INT8, too."""
    q = Quantizer(backend=backend, preset="plain")
    q.calibrate(Distances(width, read).eval(), [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))])
    entry = next(entry for path, entry in q.plan.items() if path.startswith("last.") and entry.multiply_adds)
    assert entry.quantized is not stays
    assert ("such as the distances of a box" in entry.reason) is stays
    outputs = [entry.quantized for path, entry in q.plan.items() if path.startswith("last.") and entry.kind == "output"]
    assert outputs == ([] if backend == "openvino" else [not stays])
