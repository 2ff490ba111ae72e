"""Ranges at run time against ONNX Runtime's DynamicQuantizeLinear, bit for bit, and their gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantizer.numerics.torch_operators import block_scales, dynamic_range, fake_quantize_dynamic

VALUES = {
    "both signs": lambda g: torch.randn(5, 7, generator=g) * 3 + 1,
    "above 0": lambda g: torch.rand(40, generator=g) + 5,
    "below 0": lambda g: -torch.rand(2, 3, 4, generator=g) - 0.1,
    "one value": lambda g: torch.tensor([-2.5]),
    "zeros": lambda g: torch.zeros(3, 3),
    "large": lambda g: torch.randn(1000, generator=g) * 1e30,
    "small": lambda g: torch.randn(1000, generator=g) * 1e-30,
    "outlier": lambda g: torch.cat([torch.randn(999, generator=g), torch.tensor([1e4])]),
}


@pytest.fixture(scope="module")
def reference() -> Any:
    onnx = pytest.importorskip("onnx", reason="the reference is enginequant[onnx,onnxruntime]")
    ort = pytest.importorskip("onnxruntime", reason="the reference is enginequant[onnx,onnxruntime]")
    node, info, kinds = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto
    nodes = [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    outputs = [info("y", kinds.FLOAT, None), info("s", kinds.FLOAT, []), info("z", kinds.UINT8, [])]
    graph = onnx.helper.make_graph(nodes, "g", [info("x", kinds.FLOAT, None)], outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", VALUES)
def test_it_is_that_of_onnx_runtime(name: str, reference: Any) -> None:
    for seed in range(20):
        x: Tensor = VALUES[name](torch.Generator().manual_seed(seed))
        values, scale, zero_point = reference.run(None, {"x": x.numpy()})
        ours = dynamic_range(x, "uint8")
        assert (float(ours[0]), int(ours[1])) == (float(scale), int(zero_point))
        np.testing.assert_array_equal(fake_quantize_dynamic(x).numpy(), values)


def test_blocks_have_ranges_of_their_own() -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    x[1, 2, 16:32] *= 1000
    x[0, 0, :16] = 0
    scales = block_scales(x, "int8", 16)
    assert scales.shape == (3, 5, 4)
    assert float(scales[0, 0, 0]) == 1
    result = fake_quantize_dynamic(x, "int8", 16)
    for row, column, block in ((1, 2, 1), (1, 2, 2), (2, 4, 3)):
        part = x[row, column, 16 * block :][:16]
        scale = part.abs().max() / 127
        expected = torch.round(part / scale) * scale
        assert torch.equal(result[row, column, 16 * block :][:16], expected)
    assert torch.equal(result[0, 0, :16], x[0, 0, :16])


def test_half_values_are_rounded_in_float32() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    result = fake_quantize_dynamic(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, fake_quantize_dynamic(x.float()).to(torch.bfloat16))


def test_no_value_has_no_range() -> None:
    assert fake_quantize_dynamic(torch.zeros(0, 4)).shape == (0, 4)


def test_the_gradient_passes_straight_through() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    weights = torch.randn(6, 3)
    (fake_quantize_dynamic(x) * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights)


@pytest.mark.parametrize(("dtype", "block_size"), [("uint8", None), ("int8", 4)])
def test_opcheck(dtype: str, block_size: int | None) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.quantizer.fake_quantize_dynamic.default, (x, dtype, block_size))
