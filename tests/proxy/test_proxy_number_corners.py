"""Numbers at the edges: another default type, values beyond float32, operands that are not dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn
from toy_nets import linear, net

from quantizer import Quantizer
from quantizer.errors import CalibrationError
from quantizer.observe.calibrators import make_calibrator
from quantizer.plan.targets.base import TargetProfile

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * 1.0041


class Net(nn.Module):
    """Linears, a convolution, a residual add and a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.conv = nn.Conv1d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu() + x
        z = self.second(y)
        scores = (z @ y.T).softmax(-1)
        return self.conv((scores @ y)[:, None]).mean(1)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: Any) -> Iterator[torch.dtype]:
    """Another default float type, while a test asks for it."""
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": {"calibrator": "max"}},
        {"activations": {"calibrator": "percentile"}},
        {"activations": {"calibrator": "mse"}},
        {"activations": {"calibrator": "entropy"}},
        {"activations": {"calibrator": "auto", "smoothquant_alpha": "auto"}},
        {"formats": [{"activations": "uint8"}]},
        {"formats": [{"activations": "fp8", "weights": "fp8"}], "backend": "tensorrt"},
        {"formats": [{"activations": "float", "weights": "int4", "block_size": 16}], "backend": "tensorrt"},
    ],
    ids=str,
)
def test_scales_do_not_depend_on_the_default_type(settings: dict[str, Any], default_dtype: torch.dtype) -> None:
    model, found = Net().eval(), []
    for dtype in (torch.float32, default_dtype):
        torch.set_default_dtype(dtype)
        q = Quantizer(preset="plain", **{"backend": "openvino", "sites": {"residual_add": True}} | settings)
        q.calibrate(model, [X, X * 2])
        with torch.no_grad():
            frozen, trained = q.quantize(model)(X), q.qat(model, scales="learned").eval()(X)
        zeros = [operand.zero_point for entry in q.plan.values() for operand in entry.operands]
        found.append((q.scales(), zeros, frozen, trained))
    assert found[0][0]
    assert {name: scale.dtype for name, scale in found[1][0].items()} == dict.fromkeys(found[0][0], torch.float32)
    assert found[0][1] == found[1][1]
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][2:], found[1][2:])


@pytest.mark.parametrize("name", ["max", "percentile", "mse", "entropy"])
def test_values_beyond_float32_are_refused(name: str) -> None:
    calibrator = make_calibrator(name, histogram=True)
    calibrator.observe(torch.tensor([1.0, -2.0], dtype=torch.float64))
    for value in (1e300, -1e39, 3.4028235677973366e38):
        with pytest.raises(CalibrationError, match=r"exceeds float32, the type of scales"):
            calibrator.observe(torch.tensor([value, 1.0], dtype=torch.float64))
    calibrator.observe(torch.tensor([3e38], dtype=torch.float64))
    assert calibrator.count == 3
    assert calibrator.maximum == pytest.approx(3e38)


def graph_net() -> nn.Module:
    """Neighbours by a sparse matrix, as graph networks have them."""
    torch.manual_seed(0)
    return net(
        "h = torch.mm(self.neighbours, self.linear(x)); return self.after(self.neighbours @ h)",
        linear=linear(),
        after=nn.Linear(32, 8),
        neighbours=(torch.eye(16) + torch.eye(16).roll(1, 0)).to_sparse(),
    )


def test_a_product_of_a_sparse_matrix_stays_float_with_its_reason() -> None:
    model = graph_net().eval()
    q = Quantizer(preset="plain", backend="openvino")
    with torch.no_grad():
        assert_same(q.proxy(model)(X), model(X))
        q.calibrate(model, [X])
        quantized = q.quantize(model)(X)
        assert (quantized - model(X)).norm() < 0.05 * model(X).norm()
    reasons = {row.name: row.reason for row in q.coverage if not row.quantized}
    assert reasons == dict.fromkeys(["forward.mm_0", "forward.matmul_0"], "an operand is a sparse tensor")


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(
    ("channels", "groups", "axis"), [((8, 8), 8, 0), ((8, 24), 8, 0), ((8, 8), 1, 1), ((1, 6), 1, 1), ((8, 8), 2, None)]
)
def test_channels_of_a_transposed_convolution(
    monkeypatch: pytest.MonkeyPatch, axes: int, channels: tuple[int, int], groups: int, axis: int | None
) -> None:
    # No engine for CPUs has an integer kernel for it, and TensorRT takes more channels: a target that plans it.
    monkeypatch.setattr(TargetProfile, "kernel_reason", lambda *_: None)
    torch.manual_seed(0)
    layer = getattr(nn, f"ConvTranspose{axes}d")(*channels, 3, stride=2, groups=groups)
    if axis is not None:
        with torch.no_grad():
            # Groups, or channels, of very different sizes: one scale for all would lose the least of them.
            sizes = 10 ** torch.linspace(-2, 2, layer.weight.shape[axis])
            layer.weight.mul_(sizes.reshape([-1 if each == axis else 1 for each in range(layer.weight.dim())]))
            layer.bias.zero_()
    model = nn.Sequential(layer).eval()
    x = torch.randn(2, channels[0], *[5] * axes)
    q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})
    with torch.no_grad():
        q.calibrate(model, [x])
        wanted, found = model(x), q.quantize(model)(x)
    (row,) = q.coverage.quantized
    weight = q.plan[row.name].operands[1]
    assert weight.axis == axis
    assert ("weight: one scale for all channels" in row.reason) == (axis is None)
    around = [each for each in range(wanted.dim()) if each != 1]
    noise, signal = (value.square().sum(around) for value in (found - wanted, wanted))
    assert bool((10 * torch.log10(signal / noise) > 30).all())
