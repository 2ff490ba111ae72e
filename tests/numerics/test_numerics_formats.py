"""FP8, INT4, UINT8 and blocks: against what defines them, as operators, and their gradients."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import BLOCKS_OPSET, FP8, INT4, QTYPES, UINT8
from quantizer.numerics.granularity import beside, in_blocks, scale_of_each, scale_shape
from quantizer.numerics.rounding import held_scale

GRANULARITIES = [(None, None), (0, None), (-1, None), (0, 3), (-1, 2)]
ONE = torch.tensor(1.0)


def arguments(x: Tensor, dtype: str, axis: int | None, block_size: int | None) -> tuple[Any, ...]:
    """A scale, and a zero point where the format has one, as the operators take them."""
    kind = QTYPES[dtype]
    scale = (torch.rand(scale_shape(x.shape, axis, block_size)) * 2 + 0.5) / kind.qmax
    zero_point = torch.randint(kind.qmin, kind.qmax + 1, scale.shape).to(kind.storage) if kind.has_zero_point else None
    return scale.to(x.dtype), dtype, axis, block_size, zero_point


# -- formats as data -----------------------------------------------------------------------------------------------


def test_the_ranges_are_those_of_the_storage() -> None:
    for kind in (QTYPES["int8"], UINT8):
        assert (kind.qmin, kind.qmax) == (torch.iinfo(kind.storage).min, torch.iinfo(kind.storage).max)
    assert (FP8.qmin, FP8.qmax) == (torch.finfo(FP8.storage).min, torch.finfo(FP8.storage).max)
    assert (INT4.qmin, INT4.qmax) == (-(2 ** (INT4.bits - 1)), 2 ** (INT4.bits - 1) - 1)
    assert [name for name, kind in QTYPES.items() if kind.is_packed] == ["int4"]


def test_the_magnitudes_are_the_steps_from_zero_on() -> None:
    for kind in (QTYPES["int8"], UINT8, INT4):
        assert kind.magnitudes.tolist() == list(range(kind.qmax + 1))
    codes = torch.arange(256).to(torch.uint8).view(FP8.storage).float()
    assert torch.equal(FP8.magnitudes, codes[codes.isfinite()].abs().unique())
    assert all(kind.magnitudes.dtype == torch.float32 for kind in QTYPES.values())


def test_the_opsets_are_those_of_onnx() -> None:
    onnx = pytest.importorskip("onnx")

    def first(typed: str, attribute: str | None = None) -> int:
        """The first version whose QuantizeLinear makes a type, and has an attribute."""
        for version in range(10, onnx.defs.onnx_opset_version() + 1):
            schema = onnx.defs.get_schema("QuantizeLinear", version)
            held = {text for entry in schema.type_constraints for text in entry.allowed_type_strs}
            if f"tensor({typed.lower()})" in held and (attribute is None or attribute in schema.attributes):
                return version
        raise AssertionError(f"no version of ONNX has {typed}")

    assert {kind.name: first(kind.onnx_type) for kind in QTYPES.values()} == {
        kind.name: kind.onnx_opset for kind in QTYPES.values()
    }
    assert first("int8", "block_size") == BLOCKS_OPSET


def test_a_format_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'qmax'"):
        FP8.qmax = 1  # type: ignore[misc]
    assert len({*QTYPES.values()}) == len(QTYPES)


@pytest.mark.parametrize(("axis", "block_size", "shape"), [(None, None, ()), (1, None, (8,)), (1, 4, (6, 2))])
def test_the_worked_shapes_of_the_granularities(
    axis: int | None, block_size: int | None, shape: tuple[int, ...]
) -> None:
    assert scale_shape((6, 8), axis, block_size) == shape


@pytest.mark.parametrize(
    ("axis", "block_size", "scale", "first", "last"),
    [
        (None, None, torch.tensor(3.0), [3.0] * 4, [3.0] * 4),
        (1, None, torch.tensor([1.0, 2.0, 3.0, 4.0]), [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
        (-1, 2, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 4.0, 4.0]),
    ],
)
def test_each_value_has_the_scale_of_its_group(
    axis: int | None, block_size: int | None, scale: Tensor, first: list[float], last: list[float]
) -> None:
    assert scale_of_each(scale, (2, 4), axis, block_size).tolist() == [first, last]


def test_a_scale_below_the_normal_numbers_is_rounded_up() -> None:
    least, normal = 2.0**-24, 2.0**-14  # of float16
    scales = torch.tensor([1e-12, least, 1.1 * least, 2.5 * least, normal, normal * (1 + 2**-12)])
    assert held_scale(scales, torch.float16).tolist() == [least, least, 2 * least, 3 * least, normal, normal]


# -- FP8 -----------------------------------------------------------------------------------------------------------


def e4m3() -> list[float]:
    """The finite numbers of E4M3 from 0 up, from its bits: 4 of exponent, with bias 7, and 3 of mantissa."""
    subnormal = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return (subnormal + normal)[:-1]  # the last is NaN


def nearest(value: float) -> float:
    """The number of E4M3 next to a value, of two that are as near that with an even last bit."""
    numbers = e4m3()
    index = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - abs(value)), i % 2))
    return numbers[index] if value >= 0 else -numbers[index]


def test_fp8_at_each_tie_and_beside_it() -> None:
    numbers = torch.tensor(e4m3(), dtype=torch.float64)
    ties = ((numbers[1:] + numbers[:-1]) / 2).float()
    x = torch.cat([numbers.float(), ties, torch.nextafter(ties, ONE * 0), torch.nextafter(ties, ONE * 1e9)])
    x = torch.cat([x, -x])
    expected = torch.tensor([nearest(value) for value in x.tolist()])
    assert torch.equal(ops.quantize(x, ONE, "fp8").float(), expected)
    assert torch.equal(ops.fake_quantize(x, ONE, "fp8"), expected)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-600, 600, width=32), min_size=1, max_size=20),
    scale=st.floats(2.0**-10, 2.0**10, width=32),
)
def test_fp8_is_the_cast_of_the_clamped_quotient(values: list[float], scale: float) -> None:
    x = torch.tensor(values)
    quotient = (x / scale).clamp(-448, 448)
    ours = ops.quantize(x, torch.tensor(scale), "fp8")
    assert torch.equal(ours.view(torch.uint8), quotient.to(torch.float8_e4m3fn).view(torch.uint8))
    assert ours.float().tolist() == [nearest(value) for value in quotient.tolist()]


def test_all_steps_of_fp8_come_back() -> None:
    numbers = torch.tensor(e4m3())
    steps = torch.cat([numbers, -numbers]).to(torch.float8_e4m3fn)
    for scale in (2.0**-14, 0.0123, 1.0, 77.7):
        values = ops.dequantize(steps, torch.tensor(scale), "fp8")
        assert torch.equal(ops.quantize(values, torch.tensor(scale), "fp8").view(torch.uint8), steps.view(torch.uint8))


@pytest.mark.parametrize("dtype", sorted(QTYPES))
def test_nan_stays(dtype: str) -> None:
    x = torch.tensor([torch.nan, 1.0])
    assert ops.fake_quantize(x, ONE, dtype).isnan().tolist() == [True, False]
    assert ops.quantize(x, ONE, "fp8").float().isnan().tolist() == [True, False]


# -- INT4 and UINT8 ------------------------------------------------------------------------------------------------


def test_int4_saturates_and_ties_go_to_even() -> None:
    x = torch.tensor([-9.0, -8.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 7.5, 100.0])
    assert ops.quantize(x, ONE, "int4").tolist() == [-8, -8, -2, -2, 0, 0, 2, 2, 7, 7]


def test_uint8_rounds_before_it_adds_the_zero_point() -> None:
    """With an odd zero point, rounding the sum would take each tie the other way."""
    x, zero_point = torch.tensor([-300.0, -1.5, -0.5, 0.0, 0.5, 1.5, 300.0]), torch.tensor(3, dtype=torch.uint8)
    steps = ops.quantize(x, ONE, "uint8", None, None, zero_point)
    assert steps.tolist() == [0, 1, 3, 3, 3, 5, 255]
    assert ops.dequantize(steps, ONE, "uint8", None, None, zero_point).tolist() == [-3, -2, 0, 0, 0, 2, 252]


@pytest.mark.parametrize("axis", [None, 0])
def test_torchs_uint8_differs_near_ties_alone(axis: int | None) -> None:
    x = torch.randn(64, 3000) * 2
    scale, _, _, _, zero_point = arguments(x, "uint8", axis, None)
    ours = ops.fake_quantize(x, scale, "uint8", axis, None, zero_point)
    if axis is None:
        theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero_point.int(), UINT8.qmin, UINT8.qmax)
    else:
        theirs = torch.fake_quantize_per_channel_affine(x, scale, zero_point.int(), axis, UINT8.qmin, UINT8.qmax)
    wide = beside(scale, 2, axis, None).double()
    quotient = x.double() / wide
    near_tie = (quotient - quotient.floor() - 0.5).abs() <= quotient.abs() * 2.0**-22 + 2.0**-22
    steps = ((ours - theirs).abs() / wide).round()
    assert float(steps.max()) <= 1
    assert int((steps > 0).sum()) <= 5
    assert bool(near_tie[steps > 0].all())


# -- blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(QTYPES))
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_a_block_is_quantized_like_a_tensor_of_its_own(dtype: str, axis: int) -> None:
    x = torch.randn(4, 6, 8)
    scale, _, _, _, zero_point = arguments(x, dtype, axis, 2)
    whole = ops.fake_quantize(x, scale, dtype, axis, 2, zero_point)
    for block in torch.cartesian_prod(*(torch.arange(size) for size in scale.shape)).tolist():
        place: list[Any] = list(block)
        place[axis] = slice(2 * block[axis], 2 * block[axis] + 2)
        zero = None if zero_point is None else zero_point[tuple(block)]
        alone = ops.fake_quantize(x[tuple(place)], scale[tuple(block)], dtype, None, None, zero)
        assert torch.equal(whole[tuple(place)], alone)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (3, 0, 2)])
@pytest.mark.parametrize("dtype", sorted(QTYPES))
def test_empty_tensors_in_blocks(shape: tuple[int, ...], dtype: str) -> None:
    x = torch.zeros(shape)
    for axis in range(x.dim()):
        where = arguments(x, dtype, axis, 1)
        steps = ops.quantize(x, *where)
        assert (steps.shape, steps.dtype) == (x.shape, QTYPES[dtype].storage)
        assert ops.dequantize(steps, *where).shape == ops.fake_quantize(x, *where).shape == x.shape


# -- as operators --------------------------------------------------------------------------------------------------


LAYOUTS = {
    "plain": lambda: torch.randn(6, 4),
    "transposed": lambda: torch.randn(4, 6).t(),
    "sliced": lambda: torch.randn(6, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 4).expand(6, 4),
    "expanded, transposed": lambda: torch.randn(1, 6).expand(4, 6).t(),
}


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("dtype", sorted(QTYPES))
def test_opcheck(dtype: str, axis: int | None, block_size: int | None) -> None:
    operators = torch.ops.quantizer
    # torch cannot compare tensors of FP8, which the check of the schema does.
    checks = ("test_autograd_registration", "test_faketensor", *(() if dtype == "fp8" else ("test_schema",)))
    for element in (torch.float32, torch.bfloat16):
        x = torch.randn(6, 4).to(element)
        where = arguments(x, dtype, axis, block_size)
        torch.library.opcheck(operators.fake_quantize.default, (x, *where))
        torch.library.opcheck(operators.quantize.default, (x, *where), test_utils=checks)
        torch.library.opcheck(operators.dequantize.default, (ops.quantize(x, *where), *where), test_utils=checks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
def test_layout_and_values_do_not_depend_on_each_other(layout: str, axis: int | None, block_size: int | None) -> None:
    x = LAYOUTS[layout]()
    where = arguments(x, "uint8", axis, block_size)
    result = ops.fake_quantize(x, *where)
    assert torch.equal(result, ops.fake_quantize(x.contiguous(), *where))
    assert result.stride() == torch.empty_like(x).stride()
    assert ops.quantize(x, *where).stride() == torch.empty_like(x).stride()


class Rounded(nn.Module):
    """Blocks, a zero point and FP8 in one program."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(3, 2) * 0.05 + 0.01)
        self.register_buffer("zero_point", torch.tensor(77, dtype=torch.uint8))
        self.register_buffer("weight", torch.randn(3, 4).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        weight = ops.dequantize(self.weight, self.scale, "fp8", 1, 2)
        return ops.fake_quantize(x, self.scale[0, 0], "uint8", None, None, self.zero_point) @ weight.t()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_traced_exported_and_compiled(tmp_path: Path) -> None:
    model, x = Rounded().eval(), torch.randn(5, 4)
    expected = model(x)
    torch.jit.save(torch.jit.trace(model, x), tmp_path / "rounded.pt")
    assert torch.equal(torch.jit.load(tmp_path / "rounded.pt")(x), expected)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    torch.export.save(program, tmp_path / "rounded.pt2")
    assert torch.equal(torch.export.load(tmp_path / "rounded.pt2").module()(x), expected)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_gradient_of_uint8_is_that_of_torchs_fake_quantize(axis: int | None) -> None:
    x = (torch.randn(6, 5) * 3).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    scale, _, _, _, zero_point = arguments(x.detach(), "uint8", axis, None)
    upstream = torch.randn(6, 5)
    (ops.fake_quantize(x, scale, "uint8", axis, None, zero_point) * upstream).sum().backward()
    if axis is None:
        theirs = torch.fake_quantize_per_tensor_affine(twin, scale, zero_point.int(), UINT8.qmin, UINT8.qmax)
    else:
        theirs = torch.fake_quantize_per_channel_affine(twin, scale, zero_point.int(), axis, UINT8.qmin, UINT8.qmax)
    (theirs * upstream).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, twin.grad)
    assert 0 < int((x.grad == 0).sum()) < x.numel()


def test_the_gradient_of_fp8_stops_where_it_saturates() -> None:
    x = torch.tensor([-1000.0, -448.5, -448.0, -0.001, 0.0, 447.0, 448.0, 449.0, torch.inf], requires_grad=True)
    ops.fake_quantize(x, ONE, "fp8").backward(torch.full((9,), 2.0))
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 2, 2, 2, 2, 2, 0, 0]


@pytest.mark.parametrize("dtype", sorted(QTYPES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_blocks_is_that_of_their_scales_spread_out(dtype: str, layout: str) -> None:
    x = (LAYOUTS[layout]().detach() * 3).requires_grad_()
    scale, _, _, _, zero_point = arguments(x.detach(), dtype, 1, 2)
    upstream = torch.randn(x.shape)
    ops.fake_quantize(x, scale, dtype, 1, 2, zero_point).backward(upstream)
    quotient = in_blocks(x.detach(), 1, 2) / scale.unsqueeze(2)
    if zero_point is not None:
        quotient = quotient.round() + zero_point.unsqueeze(2)
    elif dtype != "fp8":
        quotient = quotient.round()
    kind = QTYPES[dtype]
    inside = ((quotient >= kind.qmin) & (quotient <= kind.qmax)).reshape(x.shape)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream * inside)
    assert "expanded" in layout or 0 < int((~inside).sum()) < x.numel()
