"""Every format, granularity and float type against ONNX Runtime's QuantizeLinear and DequantizeLinear.

ONNX Runtime 1.31 runs all of them on a CPU, but for bfloat16: the reference is then that of the same values in float32.
It divides half by half in float32, as we do. What it does otherwise, and what is left out here for that reason:

- quotients of 2**31 and more overflow a 32-bit integer on the way to an integer step and become the lowest step, where
  ONNX has the highest: with float16 inputs, and for the last element of an odd number in INT4;
- an empty tensor in blocks ends the process; one block of a tensor with one axis is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import QTYPES, qtype
from quantizer.numerics.granularity import beside, in_blocks, scale_shape

onnx = pytest.importorskip("onnx", reason="the reference is enginequant[onnx,onnxruntime]")
ort = pytest.importorskip("onnxruntime", reason="the reference is enginequant[onnx,onnxruntime]")

SESSIONS: dict[tuple[torch.dtype, str, int | None, int | None], Any] = {}


def session(element: torch.dtype, dtype: str, axis: int | None, block_size: int | None) -> Any:
    """x, s and z (as float32) in, q (as float32) and x' out, with nothing optimised; of any shape."""
    key = (element, dtype, axis, block_size)
    if key not in SESSIONS:
        kind = onnx.TensorProto.FLOAT16 if element == torch.float16 else onnx.TensorProto.FLOAT
        where = {name: value for name, value in (("axis", axis), ("block_size", block_size)) if value is not None}
        node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
        nodes = [
            node("Cast", ["z"], ["zero"], to=onnx.TensorProto.DataType.Value(qtype(dtype).onnx_type)),
            node("QuantizeLinear", ["x", "s", "zero"], ["steps"], **where),
            node("DequantizeLinear", ["steps", "s", "zero"], ["y"], **where),
            node("Cast", ["steps"], ["q"], to=onnx.TensorProto.FLOAT),
        ]
        inputs = [info("x", kind, None), info("s", kind, None), info("z", onnx.TensorProto.FLOAT, None)]
        outputs = [info("q", onnx.TensorProto.FLOAT, None), info("y", kind, None)]
        graph = onnx.helper.make_graph(nodes, "g", inputs, outputs)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        SESSIONS[key] = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return SESSIONS[key]


@dataclass
class Case:
    """Arguments of the operators."""

    x: Tensor
    scale: Tensor
    dtype: str
    axis: int | None = None
    block_size: int | None = None
    zero_point: Tensor | None = None

    def check(self) -> None:
        """All three operators give what ONNX Runtime gives, bit for bit."""
        arguments = (self.scale, self.dtype, self.axis, self.block_size, self.zero_point)
        steps, values = self._reference()
        ours = ops.quantize(self.x, *arguments)
        assert ours.dtype == qtype(self.dtype).storage
        known = self._does_not_overflow()
        assert torch.equal(ours.float()[known], steps[known])
        for result in (ops.dequantize(ours, *arguments), ops.fake_quantize(self.x, *arguments)):
            assert result.dtype == self.x.dtype
            assert torch.equal(result[known], values[known])

    def _does_not_overflow(self) -> Tensor:
        """Where ONNX Runtime's 32-bit integers hold the quotient."""
        x = in_blocks(self.x.float(), self.axis, self.block_size)
        quotient = x / beside(self.scale, self.x.dim(), self.axis, self.block_size)
        return (quotient < 2.0**31).reshape(self.x.shape) | qtype(self.dtype).is_float

    def _reference(self) -> tuple[Tensor, Tensor]:
        wide = torch.float32 if self.x.dtype == torch.bfloat16 else self.x.dtype
        zero = torch.zeros(self.scale.shape) if self.zero_point is None else self.zero_point.float()
        feed = {"x": self.x.to(wide).numpy(), "s": self.scale.to(wide).numpy(), "z": zero.numpy()}
        q, y = session(self.x.dtype, self.dtype, self.axis, self.block_size).run(None, feed)
        return torch.from_numpy(np.asarray(q)), torch.from_numpy(np.asarray(y)).to(self.x.dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any format, float type, shape with empty axes too, granularity, range, and zero point."""
    kind = qtype(draw(st.sampled_from(sorted(QTYPES))))
    element = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    granularity = draw(st.sampled_from(["tensor", "axis", "block"]))
    size = st.integers(1 if granularity == "block" else 0, 5)
    shape = draw(st.lists(size, min_size=0 if granularity == "tensor" else 1, max_size=4))
    axis = None if granularity == "tensor" else draw(st.integers(-len(shape), len(shape) - 1))
    block_size = draw(st.integers(1, 4)) if granularity == "block" else None
    if axis is not None and block_size is not None:
        shape[axis] *= block_size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = torch.rand(scale_shape(shape, axis, block_size), generator=generator) + 0.5
    assume(granularity != "block" or scale.shape != (1,))
    # From the smallest subnormal of each type up.
    lowest = {torch.float32: -148, torch.float16: -23, torch.bfloat16: -132}[element]
    scale = (scale.double() * 2.0 ** draw(st.integers(lowest, 5))).to(element)
    x = steps_near(kind.qmax, shape, generator)
    x = (in_blocks(x, axis, block_size) * beside(scale, len(shape), axis, block_size)).reshape(shape).to(element)
    x = torch.nextafter(x, torch.full_like(x, draw(st.sampled_from([-torch.inf, 0.0, torch.inf]))))
    zero_point = None
    if kind.has_zero_point and draw(st.booleans()):
        zero_point = torch.randint(kind.qmin, kind.qmax + 1, scale.shape, generator=generator).to(kind.storage)
    return Case(x, scale, kind.name, axis, block_size, zero_point)


def steps_near(qmax: int, shape: list[int], generator: torch.Generator) -> Tensor:
    """Quotients [*shape]: ties between integers, small and subnormal ones, within and beyond the range."""
    ties = torch.randint(-2 * qmax, 2 * qmax + 1, shape, generator=generator) / 2
    small = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-12, 3, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, ties, small)


@settings(max_examples=400, deadline=None)
@given(case=cases())
def test_any_case(case: Case) -> None:
    case.check()


FLOATS = st.floats(allow_nan=False, width=32)
SCALES = st.floats(min_value=2.0**-20, max_value=2.0**10, width=32)


@pytest.mark.parametrize("dtype", sorted(QTYPES))
@settings(max_examples=100, deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=40), scale=SCALES)
def test_any_float(dtype: str, values: list[float], scale: float) -> None:
    Case(torch.tensor([values]), torch.tensor(scale), dtype).check()


@pytest.mark.parametrize("dtype", sorted(QTYPES))
@pytest.mark.parametrize("element", [torch.float32, torch.float16, torch.bfloat16])
def test_extremes(dtype: str, element: torch.dtype) -> None:
    info = torch.finfo(element)
    small = [info.tiny, info.smallest_normal, info.tiny * info.eps, 0.0]
    values = torch.tensor([[*small, 1.0, info.max, torch.inf]], dtype=element)
    x = torch.cat([values, -values])
    for scale in (info.tiny * info.eps, info.tiny, 1.0, info.max):
        Case(x, torch.tensor(scale, dtype=element), dtype).check()


@pytest.mark.parametrize("dtype", sorted(QTYPES))
@pytest.mark.parametrize(("axis", "block_size"), [(None, None), (0, None), (1, None), (0, 32), (1, 16)])
def test_many_values(dtype: str, axis: int | None, block_size: int | None) -> None:
    """Long enough for the vector instructions of both."""
    x = torch.randn(64, 1024) * 3
    scale = torch.rand(scale_shape(x.shape, axis, block_size)) * 0.03 + 0.003
    for element in (torch.float32, torch.float16):
        Case(x.to(element), scale.to(element), dtype, axis, block_size).check()
