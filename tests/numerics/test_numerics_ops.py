"""The three operators against torch's own fake quantization and a formula in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import INT8, qtype


def formula(x: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    """The definition, in float64: exact for float32 but for a rounding of the quotient, which float32 does too."""
    shaped = scale if axis is None else scale.reshape([-1 if d == axis else 1 for d in range(x.dim())])
    quotient = (x.double() / shaped.double()).float()
    return quotient.double().round().clamp(-128, 127).to(torch.int8)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2), ()], ids=["vector", "no rows", "no columns", "scalar"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_empty_tensors_and_scalars(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.zeros(shape, dtype=dtype)
    scale = torch.tensor(0.1, dtype=dtype)
    steps = ops.quantize(x, scale)
    assert (steps.shape, steps.dtype) == (x.shape, torch.int8)
    for result in (ops.dequantize(steps, scale), ops.fake_quantize(x, scale)):
        assert (result.shape, result.dtype) == (x.shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extremes_saturate(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([info.max, info.min, torch.inf, -torch.inf, info.tiny, -info.tiny, 0.0, -0.0], dtype=dtype)
    scale = torch.tensor(0.5, dtype=dtype)
    assert ops.quantize(x, scale).tolist() == [127, -128, 127, -128, 0, 0, 0, 0]
    assert ops.fake_quantize(x, scale).tolist() == [63.5, -64.0, 63.5, -64.0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 33) * 4).to(dtype)
    for axis, size in ((None, ()), (0, (64,)), (1, (33,)), (-1, (33,))):
        scale = (torch.rand(size) * 0.05 + 0.01).to(dtype)
        shaped = scale if axis is None else scale.reshape([-1 if d == axis % 2 else 1 for d in range(2)])
        steps = (x.float() / shaped.float()).round().clamp(-128, 127)
        assert torch.equal(ops.quantize(x, scale, "int8", axis), steps.to(torch.int8))
        expected = (steps * shaped.float()).to(dtype)
        assert torch.equal(ops.fake_quantize(x, scale, "int8", axis), expected)
        assert torch.equal(ops.dequantize(steps.to(torch.int8), scale, "int8", axis), expected)


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_any_shape_and_axis(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    axis = data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    scale = torch.rand(() if axis is None else (shape[axis],), generator=generator) * 0.05 + 0.001
    assert torch.equal(ops.quantize(x, scale, "int8", axis), formula(x, scale, axis))
    twice = ops.fake_quantize(ops.fake_quantize(x, scale, "int8", axis), scale, "int8", axis)
    assert torch.equal(twice, ops.fake_quantize(x, scale, "int8", axis))


def test_all_steps_come_back() -> None:
    steps = torch.arange(-128, 128).to(torch.int8)
    for scale in (2.0**-14, 0.0123, 1.0, 77.7):
        values = ops.dequantize(steps, torch.tensor(scale))
        assert torch.equal(ops.quantize(values, torch.tensor(scale)), steps)


@pytest.mark.parametrize("strides", ["transposed", "sliced", "expanded"])
def test_tensors_of_any_layout(strides: str) -> None:
    x = torch.randn(6, 8)
    view = {"transposed": x.t(), "sliced": x[:, ::2], "expanded": x[:1].expand(6, 8)}[strides]
    scale = torch.rand(view.shape[1]) * 0.05 + 0.01
    assert torch.equal(
        ops.fake_quantize(view, scale, "int8", 1), ops.fake_quantize(view.contiguous(), scale, "int8", 1)
    )


def test_the_input_is_never_changed() -> None:
    x = torch.randn(5, 5)
    before = x.clone()
    result = ops.fake_quantize(x, torch.tensor(0.01))
    result.zero_()
    ops.quantize(x, torch.tensor(0.01))
    assert torch.equal(x, before)


# -- against torch.fake_quantize -----------------------------------------------------------------------------------


def near_tie(x: Tensor, scale: Tensor) -> Tensor:
    """Where x / s is so near half a step that a rounding of 1 / s decides."""
    quotient = x.double() / scale.double()
    return (quotient - quotient.floor() - 0.5).abs() <= quotient.abs() * 2.0**-22 + 2.0**-22


def test_torch_per_tensor_differs_near_ties_alone() -> None:
    x, scale = torch.randn(200_000) * 3, torch.tensor(0.0247)
    ours = ops.fake_quantize(x, scale)
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, torch.tensor(0, dtype=torch.int32), INT8.qmin, INT8.qmax)
    different = ours != theirs
    assert int(different.sum()) <= 5
    assert bool(near_tie(x, scale)[different].all())


def test_torch_differs_by_one_step_on_adversarial_values() -> None:
    scale = torch.tensor(0.0247)
    ties = ((torch.arange(-130, 130).double() + 0.5) * scale.double()).float()
    x = torch.stack([ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    ours = ops.fake_quantize(x, scale)
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, torch.tensor(0, dtype=torch.int32), INT8.qmin, INT8.qmax)
    steps = (ours - theirs).abs() / scale
    assert float(steps.max()) <= 1.001
    assert 0 < int((steps > 0).sum()) < x.numel() // 2


def test_torch_per_channel_differs_near_ties_alone() -> None:
    x, scale = torch.randn(64, 3000), torch.rand(64) * 0.02 + 0.005
    ours = ops.fake_quantize(x, scale, "int8", 0)
    zero = torch.zeros(64, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(x, scale, zero, 0, INT8.qmin, INT8.qmax)
    different = (ours - theirs).abs() > scale[:, None] / 2
    assert int(different.sum()) <= 5
    assert bool(near_tie(x, scale[:, None].expand_as(x))[different].all())


# -- as operators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_opcheck(axis: int | None, dtype: torch.dtype) -> None:
    x = torch.randn(6, 4).to(dtype)
    scale = (torch.rand(() if axis is None else (x.shape[axis],)) * 0.05 + 0.01).to(dtype)
    torch.library.opcheck(torch.ops.quantizer.quantize.default, (x, scale, "int8", axis))
    torch.library.opcheck(torch.ops.quantizer.fake_quantize.default, (x, scale, "int8", axis))
    steps = ops.quantize(x, scale, "int8", axis)
    torch.library.opcheck(torch.ops.quantizer.dequantize.default, (steps, scale, "int8", axis))


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_the_fake_kernels_know_the_layout(layout: str) -> None:
    x = torch.randn(6, 4)
    x = x.t() if layout == "transposed" else x[:, ::2]
    torch.library.opcheck(torch.ops.quantizer.fake_quantize.default, (x, torch.tensor(0.1)))
    torch.library.opcheck(torch.ops.quantizer.quantize.default, (x, torch.tensor(0.1)))
    torch.library.opcheck(
        torch.ops.quantizer.dequantize.default, (ops.quantize(x, torch.tensor(0.1)), torch.tensor(0.1))
    )


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(4) * 0.05 + 0.01)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.ops.quantizer.quantize(x, self.scale, "int8", 1)
        return torch.ops.quantizer.dequantize(steps, self.scale, "int8", 1) + torch.ops.quantizer.fake_quantize(
            x, self.scale[0]
        )


def test_export_with_a_dynamic_shape() -> None:
    model = Rounded()
    program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    names = [str(node.target) for node in program.graph.nodes]
    assert sum(name.startswith("quantizer.") for name in names) == 3
    for rows in (2, 7):
        x = torch.randn(rows, 4)
        assert torch.equal(program.module()(x), model(x))


# -- formats -------------------------------------------------------------------------------------------------------


def test_int8() -> None:
    assert qtype("int8") is INT8
    assert (INT8.qmin, INT8.qmax, INT8.bits, INT8.storage) == (-128, 127, 8, torch.int8)


def test_an_unknown_format() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'int7'; known: fp8, int4, int8, uint8"):
        qtype("int7")
    with pytest.raises(ValueError, match="unknown dtype 'int7'; known: fp8, int4, int8, uint8"):
        ops.quantize(torch.zeros(2), torch.tensor(1.0), "int7")


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_gradient_is_that_of_torchs_fake_quantize(axis: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(6, 5, generator=generator) * 3).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    scale = torch.tensor(0.02) if axis is None else torch.linspace(0.01, 0.03, x.shape[axis])
    weight = torch.randn(6, 5, generator=generator)
    (ops.fake_quantize(x, scale, "int8", axis) * weight).sum().backward()
    if axis is None:
        reference = torch.fake_quantize_per_tensor_affine(twin, scale, torch.tensor(0, dtype=torch.int32), -128, 127)
    else:
        zeros = torch.zeros(len(scale), dtype=torch.int32)
        reference = torch.fake_quantize_per_channel_affine(twin, scale, zeros, axis, -128, 127)
    (reference * weight).sum().backward()
    assert torch.equal(x.grad, twin.grad)
    assert 0 < int((x.grad == 0).sum()) < x.numel()
