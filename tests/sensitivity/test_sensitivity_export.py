"""What fallback keeps in float reaches the file: no Q/DQ there, and float tensors that hold its values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import batch, tiny
from torch import Tensor, nn

from quantizer import Quantizer

onnx = pytest.importorskip("onnx", reason="needs enginequant[onnx]")
pytest.importorskip("onnxscript", reason="needs enginequant[onnx]")


def _element_types(path: Path) -> set[int]:
    return {tensor.data_type for tensor in onnx.load(path).graph.initializer}


def _quantize_nodes(path: Path) -> int:
    return sum(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)


def test_groups_kept_in_float_have_no_quantizers_in_the_file(tmp_path: Path) -> None:
    model, data = tiny("bert"), batch("bert")
    quantizer = Quantizer(preset="plain", backend="tensorrt", sites={"residual_add": True})
    quantizer.calibrate(model, [data])
    amp = quantizer.amp(model)
    with torch.no_grad():
        amp(**data)
    counts = []
    for names in ([], ["encoder.layer.0"], ["encoder", "pooler"]):
        quantizer.fallback(amp, names=names)
        path = quantizer.export(quantizer.quantize(model), tmp_path / f"{len(names)}.onnx", data)
        counts.append(_quantize_nodes(path))
        assert onnx.TensorProto.FLOAT16 in _element_types(path)
    assert counts[0] > counts[1] > counts[2] == 0


@pytest.mark.parametrize("dtype", [pytest.param("int8", marks=pytest.mark.nightly), "fp8"])
def test_an_engine_builds_of_what_is_left(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs enginequant[tensorrt-rtx]")
    model, data = tiny("bert"), batch("bert")
    quantizer = Quantizer(preset="plain", backend="tensorrt-rtx", dtype=dtype, sites={"residual_add": dtype == "int8"})
    quantizer.calibrate(model, [data])
    amp = quantizer.amp(model)
    with torch.no_grad():
        amp(**data)
    quantizer.fallback(amp, num=3)
    path = quantizer.export(quantizer.quantize(model), tmp_path / "model.onnx", data)
    sizes = {"batch": (1, 2, 4), "sequence": (2, 8, 16)}
    built = quantizer.build(path, tmp_path / "model.engine", dynamic=sizes, compute_capability="sm89")
    assert built.size_bytes == (tmp_path / "model.engine").stat().st_size > 0


class Wide(nn.Module):
    """The second product reads values that float16 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        with torch.no_grad():
            self.first.weight.mul_(1e5)
            self.last.weight.mul_(1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def test_values_beyond_float16_stay_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(64, 16)
    quantizer = Quantizer(preset="plain", backend="tensorrt")
    quantizer.calibrate(model, [x])
    amp = quantizer.amp(model)
    quantizer.fallback(amp, names=["last"])
    reason = quantizer.plan["last.forward.linear_0"].reason
    assert reason.startswith(
        "kept in float by fallback(names=['last']), in float32: calibration observed 2.05e+05 here"
    )
    assert reason.endswith("and the maximum of float16 is 65504")
    with pytest.warns(UserWarning, match="3 modules stay float32: their values exceed float16, the largest is 2.05e"):
        path = quantizer.export(quantizer.quantize(model), tmp_path / "float32.onnx", x)
    # Both linears with their weights; only the model's input and output are half.
    assert onnx.TensorProto.FLOAT16 not in _element_types(path)
    assert _quantize_nodes(path) == 1
    ort = pytest.importorskip("onnxruntime", reason="needs enginequant[onnxruntime]")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.half().numpy()})
    with torch.no_grad():
        expected = quantizer.simulate(model)(x)
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-3)
