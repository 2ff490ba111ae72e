"""The loop that users of NVIDIA's pytorch-quantization know, with the import changed."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import needs_exact_byte_products
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import CalibrationError, ConfigError, ProxyError
from quantizer.integrations.pytorch_quantization import QuantDescriptor, calib, quant_modules, tensor_quant
from quantizer.integrations.pytorch_quantization import nn as quant_nn


class Net(nn.Module):
    """A convolution, a linear, and a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 8, 3)
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.conv(x).relu().mT)
        return y @ y.mT


X = torch.randn(5, 4, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    quant_modules.deactivate()
    for layer in (quant_nn.QuantLinear, quant_nn.QuantConv1d):
        layer.set_default_quant_desc_input(QuantDescriptor())
        layer.set_default_quant_desc_weight(QuantDescriptor(axis=(0,)))


def built() -> Net:
    quant_modules.initialize(Net)
    try:
        return Net().eval()
    finally:
        quant_modules.deactivate()


def quantizers(model: nn.Module, end: str = "_quantizer") -> dict[str, quant_nn.TensorQuantizer]:
    named = model.named_modules()
    return {name: m for name, m in named if name.endswith(end) and isinstance(m, quant_nn.TensorQuantizer)}


def input_quantizers(model: nn.Module) -> dict[str, quant_nn.TensorQuantizer]:
    return quantizers(model, "_input_quantizer")


def collect(model: nn.Module) -> None:
    for module in quantizers(model).values():
        module.enable_calib()
        module.disable_quant()


def round_again(model: nn.Module) -> None:
    for module in quantizers(model).values():
        module.disable_calib()
        module.load_calib_amax()
        module.enable_quant()


def calibrated() -> Net:
    model = built()
    collect(model)
    model(X)
    for module in quantizers(model).values():
        module.load_calib_amax()
        module.enable()
    return model


def test_the_loop() -> None:
    model = built()
    # Three operations with two operands each, and the branch of a convolution for other paddings, which never runs.
    assert len(quantizers(model)) == 8
    collect(model)
    reference = Net().eval()(X)
    assert torch.equal(model(X), reference)
    round_again(model)
    rounded = model(X)
    assert not torch.equal(rounded, reference)
    assert torch.allclose(rounded, reference, atol=0.1)
    ranges = {name: module.amax for name, module in input_quantizers(model).items()}
    assert sum(amax is None for amax in ranges.values()) == 1
    (conv,) = (amax for name, amax in ranges.items() if name.startswith("conv.") and amax is not None)
    assert float(conv) == pytest.approx(float(X.abs().max()))


def test_it_rounds_as_quantize_does_with_max() -> None:
    model = calibrated()
    quantizer = Quantizer(
        preset="plain", backend="openvino", activations={"calibrator": "max"}, sites={"residual_add": False}
    )
    float_model = Net().eval()
    quantizer.calibrate(float_model, [(X,)], progress=False)
    assert torch.equal(model(X), quantizer.quantize(float_model)(X))


def test_without_ranges_it_rounds_with_the_range_at_hand() -> None:
    model = built()
    rounded = model(X)
    assert not torch.equal(rounded, Net().eval()(X))
    for module in input_quantizers(model).values():
        module.disable()
    weights_only = model(X)
    assert not torch.equal(weights_only, rounded)
    for module in quantizers(model).values():
        module.disable()
    assert torch.equal(model(X), Net().eval()(X))


def test_default_descriptors() -> None:
    assert QuantDescriptor is tensor_quant.QuantDescriptor, "the toolkit's place of it"
    quant_nn.QuantLinear.set_default_quant_desc_input(QuantDescriptor(num_bits=8, calib_method="histogram"))
    quant_nn.QuantLinear.set_default_quant_desc_weight(QuantDescriptor(num_bits=8, axis=None))
    model = built()
    found = dict(model.named_modules())
    linear = found["linear.site_forward_linear_0._input_quantizer"]
    assert isinstance(linear._calibrator, calib.HistogramCalibrator)
    assert found["linear.site_forward_linear_0._weight_quantizer"].axis is None
    conv = found["conv.site__conv_forward_conv1d_0._input_quantizer"]
    assert isinstance(conv._calibrator, calib.MaxCalibrator)
    assert found["conv.site__conv_forward_conv1d_0._weight_quantizer"].axis == 0


class Up(nn.Module):
    """A transposed convolution, whose weight is [channels in, channels out, ..]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def test_a_transposed_convolution_has_a_range_for_each_output_channel() -> None:
    quant_modules.initialize(Up)
    model = Up().eval()
    quant_modules.deactivate()
    (weight,) = (m for name, m in model.named_modules() if name.endswith("_weight_quantizer"))
    assert weight.axis == 1
    weight.disable_quant()
    weight.enable_calib()
    model(X)
    weight.load_calib_amax()
    assert weight.scale.shape == (6,)


def test_a_histogram_takes_a_percentile() -> None:
    quant_nn.QuantLinear.set_default_quant_desc_input(QuantDescriptor(calib_method="histogram"))
    model = built()
    linear: Any = model.get_submodule("linear.site_forward_linear_0._input_quantizer")
    for module in quantizers(model).values():
        module.disable()
    linear.enable_calib()
    model(X)
    seen = Net().eval().conv(X).relu().abs().detach().numpy()
    for percentile in (50, 99.0):
        linear.load_calib_amax("percentile", percentile=percentile)
        expected = np.percentile(seen, percentile, method="inverted_cdf")
        assert float(linear.amax) == pytest.approx(float(expected), abs=float(seen.max()) / 1024)


def test_torchs_classes_and_models_outside_stay_float() -> None:
    quant_modules.initialize(Net)
    linear = nn.Linear(2, 2)
    quant_modules.deactivate()
    assert type(linear) is nn.Linear
    assert not input_quantizers(Net())


class Scaled(nn.Module):
    """A product and an add of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.mT).softmax(-1) @ x


BUILT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "convolution": lambda: nn.Conv1d(4, 4, 1),
    "sequence": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    "list": lambda: nn.Sequential(*nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])),
    "layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "defined before": Scaled,
}


def defined_later() -> nn.Module:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    class LaterStill(Later):
        pass

    return LaterStill()


@pytest.mark.parametrize("name", [*BUILT, "defined later"])
def test_whatever_is_built_after_initialize_is_quantized(name: str) -> None:
    make, x = {**BUILT, "defined later": defined_later}[name], torch.randn(2, 4, 8)
    torch.manual_seed(0)
    reference = make().eval()(x)
    quant_modules.initialize()
    torch.manual_seed(0)
    model = make().eval()
    quant_modules.deactivate()
    torch.manual_seed(0)
    after = make().eval()
    assert not input_quantizers(after)
    assert len(quantizers(model)) >= 2
    with torch.no_grad():
        rounded = model(x)
        assert not torch.equal(rounded, reference)
        assert torch.allclose(rounded, reference, atol=0.1)
        collect(model)
        assert torch.allclose(model(x), reference, atol=1e-6)
        round_again(model)
        assert any(module.amax is not None for module in quantizers(model).values())
        assert torch.allclose(model(x), reference, atol=0.1)


def test_parts_keep_what_was_set_on_them() -> None:
    quant_modules.initialize()
    linear = nn.Linear(8, 8)
    (first,) = input_quantizers(linear).values()
    first.enable_calib()
    linear(torch.ones(1, 8) * 3)
    first.load_calib_amax()
    model = nn.Sequential(linear, nn.ReLU())
    assert next(iter(input_quantizers(model).values())) is first
    assert float(first.amax) == pytest.approx(3.0)


def test_other_threads_and_activations_stay_float_and_all_is_restored() -> None:
    before = {cls: cls.__dict__.get("__init__") for cls in (nn.Module, nn.Linear, nn.Sequential, Net, Scaled)}
    made: list[nn.Module] = []
    quant_modules.initialize()
    thread = threading.Thread(target=lambda: made.append(nn.Linear(8, 8)))
    thread.start()
    thread.join()
    activation = nn.GELU()
    with pytest.raises(TypeError, match="in_features"):
        nn.Linear()
    quant_modules.deactivate()
    assert type(made[0]) is nn.Linear
    assert {cls: cls.__dict__.get("__init__") for cls in before} == before
    assert "__init_subclass__" not in vars(nn.Module)
    # What was built meanwhile and has nothing to quantize may become part of a float model.
    Quantizer(preset="plain", backend="openvino").calibrate(
        nn.Sequential(made[0], activation).eval(), [torch.randn(2, 8)]
    )


def test_what_torch_builds_for_itself_and_what_is_lazy_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    quant_modules.initialize()
    graph = torch.fx.GraphModule({}, torch.fx.Graph())
    assert not hasattr(graph, "_quantizer_proxy")
    assert type(nn.LazyLinear(4)) is nn.LazyLinear
    assert "a LazyLinear is not quantized" in caplog.text


@needs_exact_byte_products
def test_it_exports(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    pytest.importorskip("openvino", reason="needs enginequant[openvino]")
    from quantizer.engines import load_engine

    model = calibrated()
    path = Quantizer(preset="plain", backend="openvino").export(model, tmp_path / "net.onnx", (X,))
    (got,) = load_engine("openvino", path)({"x": X.numpy()}).values()
    assert np.allclose(got, model(X).detach().numpy(), atol=0.05)


@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_with_fb_fake_quant_torch_exports_it(dynamo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the toolkit: the class attribute, and then torch's own export, by both of its exporters."""
    onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")
    pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
    ort = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    torch.manual_seed(0)
    quant_modules.initialize()
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 6)).eval()
    quant_modules.deactivate()
    collect(model)
    model(X)
    round_again(model)
    before = model(X)
    assert quant_nn.TensorQuantizer.use_fb_fake_quant is False
    monkeypatch.setattr(quant_nn.TensorQuantizer, "use_fb_fake_quant", True)
    # A value near a tie may become the neighboring integer.
    torch.testing.assert_close(model(X), before, rtol=0, atol=0.05)
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        # torch deprecates its older exporter, and the newer one reads deprecated names.
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (X,), path, dynamo=dynamo, opset_version=18 if dynamo else 13, input_names=["x"])
    counts = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert counts["QuantizeLinear"] == counts["DequantizeLinear"] == 4
    (got,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": X.numpy()})
    assert np.allclose(got, model(X).detach().numpy(), atol=0.05)
    for quantizer in quantizers(model).values():
        quantizer.disable_quant()
    assert (model(X) - before).abs().max() > 1e-4, "quantizers that are off round nothing"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_bits": 4}, "num_bits=4; expected 8"),
        ({"axis": (0, 1)}, r"axis=\(0, 1\); expected one axis"),
        ({"calib_method": "entropi"}, "calib_method='entropi'; expected max or histogram"),
        ({"amax": -1.0}, "amax=-1.0; expected a positive finite number"),
        ({"calib_method": "histogram", "axis": 0}, "a histogram has one range for the tensor"),
    ],
)
def test_descriptors_without_meaning(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantDescriptor(**keywords)


def test_mistakes() -> None:
    quantizer = quant_nn.TensorQuantizer()
    with pytest.raises(CalibrationError, match="no values were collected"):
        quantizer.load_calib_amax()
    quantizer.load_calib_amax(strict=False)
    assert quantizer.amax is None
    quantizer.enable_calib()
    with pytest.raises(CalibrationError, match="NaN or an infinite value"):
        quantizer(torch.tensor([1.0, float("nan")]))
    with pytest.raises(CalibrationError, match="expected one of percentile, mse, entropy"):
        calib.HistogramCalibrator().compute_amax("median")
    quant_modules.initialize(Net)
    with pytest.raises(ProxyError, match="is already active"):
        quant_modules.initialize(Net)


def test_a_known_amax() -> None:
    quantizer = quant_nn.TensorQuantizer(QuantDescriptor(amax=2.0))
    assert float(quantizer.amax) == pytest.approx(2.0)
    assert float(quantizer(torch.tensor([5.0]))[0]) == pytest.approx(2.0)
