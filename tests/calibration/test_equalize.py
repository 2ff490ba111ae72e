"""Cross-layer equalisation: the factors, what they change in the plan and in the file, and what cannot have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.numerics.weight_codes import equalizing_factors
from quantizer.plan.site_plan import SitePlan

pytestmark = pytest.mark.usefixtures("without_gradients")

CHANNELS = 16
HARD = {"weights": {"granularity": "per_tensor"}, "backend": "onnxruntime"}


class Images(nn.Module):
    """A convolution, a depthwise one and a projection; channels of the first two differ by up to 1,000."""

    def __init__(self, *, norm: bool, bias: bool, clip: bool, variant: str = "") -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, bias=bias)
        self.norm = nn.BatchNorm2d(CHANNELS) if norm else nn.Identity()
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, padding=1, bias=bias)
        self.last = nn.Conv2d(CHANNELS, 8, 1, bias=bias)
        self.clip, self.variant = clip, variant
        self._make_hard(torch.logspace(0, 3, CHANNELS))

    @torch.no_grad()
    def _make_hard(self, factors: Tensor) -> None:
        norm = isinstance(self.norm, nn.BatchNorm2d)
        if norm:
            self.norm.running_var.mul_(1.5)
            self.norm.weight.mul_(factors)
            self.norm.bias.add_(0.1).mul_(factors)
        else:
            self.first.weight.mul_(factors.reshape(-1, 1, 1, 1))
            if self.first.bias is not None:
                self.first.bias.mul_(factors)
        if not self.clip:
            self.depthwise.weight.div_(factors.reshape(-1, 1, 1, 1))

    def act(self, x: Tensor) -> Tensor:
        return F.relu6(x) if self.clip else F.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x)))
        if self.variant == "shared":
            return self.last(self.act(self.depthwise(x))) + self.last(x)
        y = self.depthwise(x)
        return self.last(x + y if self.variant == "residual" else self.act(y))


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def images(**options: Any) -> tuple[nn.Module, list[Tensor], Tensor]:
    torch.manual_seed(0)
    settings = {"norm": False, "bias": True, "clip": False, **options}
    return Images(**settings).eval(), [torch.randn(8, 3, 10, 10) for _ in range(4)], torch.randn(8, 3, 10, 10)


def calibrated(model: nn.Module, data: list[Tensor], **config: Any) -> Quantizer:
    quantizer = Quantizer(**{**HARD, **config})
    quantizer.calibrate(model, data, progress=False)
    return quantizer


def decibels(expected: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (found - expected).square().sum()))


def reasons(quantizer: Quantizer) -> dict[str, str]:
    """The reasons of convolutions; not those of their results."""
    return {path.split(".")[0]: entry.reason for path, entry in quantizer.plan.items() if _rounds(entry)}


def _rounds(entry: SitePlan) -> bool:
    return entry.quantized and entry.kind == "conv"


def test_the_factors_are_those_of_the_paper() -> None:
    first, second = torch.rand(7, 3, 3, 3) + 0.1, torch.rand(5, 7, 3, 3) + 0.1
    r1, r2 = first.amax((1, 2, 3)), second.amax((0, 2, 3))
    s = equalizing_factors(r1, r2)
    for i in range(7):
        # Equation 11: s_i = (1 / r2_i) sqrt(r1_i r2_i).
        assert float(s[i]) == pytest.approx(1 / float(r2[i]) * (float(r1[i]) * float(r2[i])) ** 0.5)
    assert torch.allclose(r1 / s, r2 * s)


def test_a_channel_of_zeros_keeps_its_factor() -> None:
    assert equalizing_factors(torch.tensor([0.0, 2.0, 0.0]), torch.tensor([3.0, 0.0, 0.0])).tolist() == [1, 1, 1]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_one_scale_does_as_well_as_one_a_channel(norm: bool) -> None:
    model, data, x = images(norm=norm)
    expected = model(x)

    def quality(**config: Any) -> float:
        return decibels(expected, calibrated(model, data, **config).quantize(model)(x))

    equal, without = quality(), quality(activations={"smoothquant_alpha": None})
    per_channel = quality(weights={"granularity": "per_channel"})
    assert equal > without + 10
    assert equal > per_channel - 3


@pytest.mark.usefixtures("exact_byte_products")
@pytest.mark.parametrize("options", [{}, {"norm": True}, {"bias": False}, {"norm": True, "bias": False, "clip": True}])
def test_the_file_has_the_factors_folded_in_and_gives_what_the_proxy_gives(
    options: dict[str, bool], tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    model, data, x = images(**options)
    quantizer = calibrated(model, data)
    frozen = quantizer.quantize(model)
    quantizer.export(frozen, tmp_path / "model.onnx", x)
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert "equalized" in reasons(quantizer)["last"]
    kinds = [node.op_type for node in graph.node]
    assert "Mul" not in kinds
    # One quantizer for what is between two convolutions, and those of the input and of the result.
    assert kinds.count("QuantizeLinear") == 4
    assert "BatchNormalization" not in kinds
    sizes = {value.name: list(value.dims) for value in graph.initializer}
    weights = [
        node for node in graph.node if node.op_type == "DequantizeLinear" and len(sizes.get(node.input[0], [])) == 4
    ]
    # The folded normalization has a factor for each channel.
    first = [CHANNELS] if "norm" in options else []
    assert [sizes[node.input[1]] for node in weights] == [first, [], []]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert decibels(frozen(x), found) > 35


@pytest.mark.parametrize(
    ("variant", "site", "why"),
    [
        ("shared", "depthwise", "reads the same tensor"),
        ("residual", "last", "its input is not a convolution's output followed only by channelwise operations"),
    ],
)
def test_what_cannot_be_equalized_says_why(variant: str, site: str, why: str) -> None:
    model, data, _ = images(variant=variant)
    found = reasons(calibrated(model, data))
    assert "not equalized: " in found[site]
    assert why in found[site]


def test_a_folder_keeps_the_factors_for_another_backend(tmp_path: Path) -> None:
    model, data, _ = images()
    quantizer = calibrated(model, data, backend="openvino", sites={"residual_add": False})
    loaded = Quantizer.load(quantizer.save(tmp_path / "plan")).for_backend("onnxruntime")
    loaded.quantize(model)
    live = quantizer.for_backend("onnxruntime")
    live.quantize(model)
    for path, entry in live.plan.items():
        for one, other in zip(entry.operands, loaded.plan[path].operands, strict=True):
            assert (one.spread is None) == (other.spread is None), path
            assert one.spread is None or other.spread is None or torch.equal(one.spread, other.spread)


def test_one_scale_of_float16_is_one_in_the_file(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    torch.manual_seed(0)
    # Of the sizes that TensorRT's kernels take.
    model = nn.Sequential(
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 3)
    ).eval()
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-2, 1, 64).reshape(-1, 1, 1, 1))
    data = [torch.randn(4, 32, 8, 8) for _ in range(4)]
    quantizer = calibrated(model, data, backend="tensorrt")
    quantizer.export(quantizer.quantize(model), tmp_path / "model.onnx", data[0])
    graph = onnx.load(tmp_path / "model.onnx").graph
    sizes = {value.name: list(value.dims) for value in graph.initializer}
    scales = [
        sizes[node.input[1]]
        for node in graph.node
        if node.op_type == "DequantizeLinear" and len(sizes.get(node.input[0], [])) == 4
    ]
    assert scales == [[], [], []]


def test_alike_channels_with_a_scale_each_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    data = [torch.randn(8, 3, 10, 10) for _ in range(4)]
    found = calibrated(model, data, weights={"granularity": "per_channel"})
    assert "equalized" not in str(reasons(found))
