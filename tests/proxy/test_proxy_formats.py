"""Formats by rule: which site is held in what, what a target refuses, and that files compute what the proxy does."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from helpers import needs_exact_byte_products
from torch import Tensor, nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.errors import ConfigError
from quantizer.plan.site_plan import OperandPlan

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")

WIDTH = 32

pytestmark = pytest.mark.usefixtures("exact_byte_products")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2)) / math.sqrt(WIDTH)
        return torch.matmul(scores.softmax(-1), self.value(x))


class Net(nn.Module):
    """Attention, then a feed-forward block that ends in a GELU, whose output is almost all of one sign."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x + self.attention(x)
        return hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))


DATA = torch.randn(4, 24, WIDTH, generator=torch.Generator().manual_seed(5))


def calibrated(model: nn.Module, **options: Any) -> Quantizer:
    options = {"backend": "tensorrt", "sites": {"residual_add": False}, **options}
    return make_calibrated(model, [(DATA,)], **options)


def operand(quantizer: Quantizer, site: str, name: str) -> OperandPlan:
    (found,) = [entry for entry in quantizer.plan[site].operands if entry.name == name]
    return found


def sqnr(expected: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (found - expected).square().sum()))


# -- rules -------------------------------------------------------------------------------------------------------------


def test_the_last_rule_that_matches_decides_and_coverage_names_it() -> None:
    quantizer = calibrated(
        Net().eval(),
        formats=[
            {"weights": "int4", "block_size": 16, "kinds": ["linear"]},
            {"activations": "fp8", "weights": "fp8", "names": ["attention.*"]},
            {"weights": "fp8", "activations": "fp8", "module_types": ["Attention"], "kinds": ["matmul"]},
        ],
    )
    found = {row.name: (row.reason, row.rule) for row in quantizer.coverage.rows if row.quantized}
    assert found["up.forward.linear_0"] == ("int8: input; int4 in blocks of 16: weight", "formats[0]")
    assert found["attention.query.forward.linear_0"] == ("fp8: input, weight", "formats[1]")
    assert found["attention.forward.matmul_0"] == ("fp8: lhs, rhs", "formats[2]")


def test_a_rule_of_kinds_alone_takes_products_by_a_weight_for_linears() -> None:
    quantizer = calibrated(
        net("torch.matmul(x, self.weight)", weight=nn.Parameter(torch.randn(WIDTH, WIDTH))).eval(),
        formats=[{"weights": "int4", "block_size": 8, "kinds": ["linear"]}],
    )
    weight = operand(quantizer, "forward.matmul_0", "rhs")
    assert (weight.dtype, weight.axis, weight.block_size) == ("int4", 0, 8)
    assert weight.scale is not None
    assert weight.scale.shape == (WIDTH // 8, WIDTH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formats": [{"weights": "int4", "names": ["upp"]}]}, r"formats\[0\].names: 'upp' matches nothing.*'up'"),
        ({"backend": "openvino", "dtype": "fp8"}, "openvino does not support activations in fp8; use int8, uint8"),
        ({"formats": [{"activations": "uint8"}]}, r"formats\[0\]: tensorrt does not support activations in uint8"),
        (
            {"formats": [{"weights": "int4", "block_size": 24}]},
            "block_size 24 does not divide the 32 input",
        ),
        ({"formats": [{"activations": "int4"}]}, "activations: got the text 'int4'; expected 'int8', 'uint8', 'fp8'"),
        ({"formats": [{"kinds": ["matmul"]}]}, "sets no format"),
        (
            {"formats": [{"weights": "int8", "block_size": 16}]},
            "block_size: got 16; expected null, because only",
        ),
        ({"dtype": "fp8", "activations": {"calibrator": "entropy"}}, "needs uniform quantized values, which fp8 lacks"),
    ],
)
def test_formats_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrated(Net().eval(), **options).plan  # noqa: B018


def test_a_convolution_has_no_blocks_and_stays_float() -> None:
    convolution = nn.Sequential(nn.Conv2d(16, 16, 3)).eval()
    quantizer = Quantizer(preset="plain", backend="tensorrt", formats=[{"weights": "int4", "block_size": 16}])
    quantizer.calibrate(convolution, [(torch.randn(2, 16, 8, 8),)])
    (site,) = [entry for entry in quantizer.plan.values() if entry.multiply_adds]
    assert not site.quantized
    assert site.reason == "a weight with 4 axes cannot be split into blocks of input channels"
    assert not any(entry.quantized for entry in site.operands)


# -- FP8 attention -----------------------------------------------------------------------------------------------------


def test_softmax_in_fp8_has_the_scale_1_448() -> None:
    quantizer = calibrated(Net().eval(), dtype="fp8", fallback_dtype="float32")
    probabilities = operand(quantizer, "attention.forward.matmul_1", "lhs")
    assert probabilities.largest_scale == pytest.approx(1 / 448)
    value = operand(quantizer, "attention.forward.matmul_1", "rhs")
    assert value.largest_scale != pytest.approx(1 / 448)
    in_int8 = operand(calibrated(Net().eval()), "attention.forward.matmul_1", "lhs")
    assert in_int8.largest_amax is not None
    assert in_int8.largest_amax < 1


def test_fused_attention_in_fp8_has_it_too() -> None:
    class Fused(Attention):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in self.children())
            return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    torch.manual_seed(0)
    quantizer = calibrated(Fused().eval(), dtype="fp8", fallback_dtype="float32")
    (site,) = [entry for entry in quantizer.plan.values() if "scaled_dot" in entry.operation]
    scales = [entry.largest_scale for entry in site.operands]
    assert sum(scale == pytest.approx(1 / 448) for scale in scales) == 1


def test_fp8_attention_is_whole_or_not_at_all() -> None:
    quantizer = calibrated(Net().eval(), dtype="fp8", exclude={"sites": ["attention.forward.matmul_1"]})
    first = quantizer.plan["attention.forward.matmul_0"]
    assert not first.quantized
    assert "query, key, value and softmax must be quantized together" in first.reason
    assert quantizer.plan["attention.query.forward.linear_0"].quantized
    in_int8 = calibrated(Net().eval(), exclude={"sites": ["attention.forward.matmul_1"]})
    assert in_int8.plan["attention.forward.matmul_0"].quantized


# -- what comes of them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 35.0),
        ({"dtype": "fp8"}, 25.0),
        ({"formats": [{"weights": "int4", "block_size": 16, "kinds": ["linear"]}]}, 20.0),
        ({"formats": [{"weights": "int4", "block_size": 16, "activations": "float", "kinds": ["linear"]}]}, 20.0),
        ({"backend": "openvino", "formats": [{"activations": "uint8"}]}, 35.0),
    ],
)
@pytest.mark.parametrize("calibrator", ["max", "mse"])
def test_every_format_survives_freezing_and_saving(
    options: dict[str, Any], least: float, calibrator: str, tmp_path: Path
) -> None:
    model = Net().eval()
    quantizer = calibrated(model, activations={"calibrator": calibrator}, **options)
    with torch.no_grad():
        found = quantizer.quantize(model)(DATA)
        assert sqnr(model(DATA), found) > least
        quantizer.save(tmp_path / "saved")
        assert torch.equal(Quantizer.load(tmp_path / "saved").quantize(model)(DATA), found)


@pytest.mark.parametrize(("sign", "zero_point"), [(1.0, 0), (-1.0, 255)])
def test_an_asymmetric_range_of_one_sign_ends_at_zero(sign: float, zero_point: int) -> None:
    data = sign * torch.linspace(3, 5, 4 * 32).reshape(4, 32)
    options: dict[str, Any] = {"backend": "onnxruntime", "activations": {"calibrator": "max"}}
    formats = [{"activations": "uint8"}]
    quantizer = make_calibrated(nn.Sequential(nn.Linear(32, 32)), [data], **options, formats=formats)
    found = operand(quantizer, "0.forward.linear_0", "input")
    assert found.scale is not None
    assert float(found.scale) == pytest.approx(5 / 255)
    assert found.zero_point == zero_point


def test_an_asymmetric_range_uses_all_steps() -> None:
    model = Net().eval()
    options: dict[str, Any] = {"backend": "onnxruntime", "activations": {"calibrator": "max"}}
    symmetric = operand(calibrated(model, **options), "down.forward.linear_0", "input")
    quantizer = calibrated(model, **options, formats=[{"activations": "uint8"}])
    found = operand(quantizer, "down.forward.linear_0", "input")
    assert found.minimum is not None
    assert found.maximum is not None
    assert found.zero_point == round(-found.minimum / float(found.scale))  # type: ignore[arg-type]
    assert found.largest_scale == pytest.approx((found.maximum - found.minimum) / 255)
    assert found.largest_scale is not None
    assert symmetric.largest_scale is not None
    assert found.largest_scale < 0.6 * symmetric.largest_scale


@pytest.mark.parametrize(
    ("backend", "options", "least"),
    [
        pytest.param("onnxruntime", {"formats": [{"activations": "uint8"}]}, 100.0, marks=needs_exact_byte_products),
        (
            "onnxruntime",
            {"formats": [{"weights": "int4", "block_size": 16}]},
            100.0,
        ),
        # Its kernel for such weights rounds the activations to 8 bits by itself.
        (
            "onnxruntime",
            {"formats": [{"weights": "int4", "block_size": 16, "activations": "float"}]},
            45.0,
        ),
        # It rounds in another order somewhere; the score is the proxy's.
        ("openvino", {"formats": [{"activations": "uint8"}]}, 30.0),
        ("openvino", {"formats": [{"weights": "int4", "block_size": 16, "activations": "float"}]}, 30.0),
    ],
)
def test_engines_compute_what_the_proxy_does(
    backend: str, options: dict[str, Any], least: float, tmp_path: Path
) -> None:
    model = Net().eval()
    quantizer = calibrated(model, backend=backend, **options)
    frozen = quantizer.quantize(model)
    path = quantizer.export(frozen, tmp_path / "model.onnx", (DATA,))
    engine = load_engine(backend, path)
    (found,) = engine({engine.input_names[0]: DATA.numpy()}).values()
    with torch.no_grad():
        assert sqnr(frozen(DATA), torch.from_numpy(found)) > least


@pytest.mark.skipif(find_spec("tensorrt_rtx_bindings") is None, reason="install enginequant[tensorrt-rtx]")
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp8"},
        {"formats": [{"weights": "int4", "block_size": 16, "activations": "float", "kinds": ["linear"]}]},
    ],
)
def test_tensorrt_builds_it(options: dict[str, Any], tmp_path: Path) -> None:
    model = Net().eval()
    quantizer = calibrated(model, backend="tensorrt-rtx", **options)
    path = quantizer.export(
        quantizer.quantize(model), tmp_path / "model.onnx", (DATA,), dynamic_axes={"x": {0: "batch"}}
    )
    kinds = {onnx.TensorProto.DataType.Name(item.data_type) for item in onnx.load(path).graph.initializer}
    assert kinds & {"FLOAT8E4M3FN", "INT4"}
    built = build_engine(
        "tensorrt-rtx",
        path,
        tmp_path / "model.engine",
        BuildOptions(dynamic={"batch": (1, 4, 8)}, compute_capability="sm89"),
    )
    assert built.path.stat().st_size > 0
