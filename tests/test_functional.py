"""``quantizer.functional``: what it refuses, and that the checks are in nobody's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quantizer
from quantizer import functional
from quantizer.functional import dequantize, fake_quantize, quantize
from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import QTYPES
from quantizer.numerics.granularity import scale_shape

X = torch.linspace(-4, 4, 48).reshape(6, 8)
S = torch.tensor(0.05)
ZERO = torch.tensor(3, dtype=torch.uint8)
FUNCTIONS: tuple[Callable[..., Tensor], ...] = (quantize, fake_quantize)


def test_it_is_reached_by_its_name() -> None:
    assert quantizer.functional is functional


@pytest.mark.parametrize("dtype", sorted(QTYPES))
@pytest.mark.parametrize(("axis", "block_size"), [(None, None), (0, None), (-1, None), (0, 3), (1, 8), (-1, 2)])
def test_it_is_the_operators(dtype: str, axis: int | None, block_size: int | None) -> None:
    scale = torch.rand(scale_shape(X.shape, axis, block_size)) + 0.5
    zero_point = torch.full(scale.shape, 3, dtype=torch.uint8) if dtype == "uint8" else None
    where = (scale, dtype, axis, block_size, zero_point)
    steps = quantize(X, *where)
    assert torch.equal(steps.float(), ops.quantize(X, *where).float())
    assert torch.equal(dequantize(steps, *where), ops.dequantize(steps, *where))
    assert torch.equal(fake_quantize(X, *where), ops.fake_quantize(X, *where))
    assert torch.equal(fake_quantize(X, *where), dequantize(steps, *where))


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16, torch.float64])
def test_types(element: torch.dtype) -> None:
    x = X.to(element)
    assert fake_quantize(x, S).dtype == element
    assert dequantize(quantize(x, S), S.to(element)).dtype == element
    assert torch.equal(fake_quantize(x, S), fake_quantize(x.float(), S).to(element))


# -- what it refuses -----------------------------------------------------------------------------------------------


MISUSES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "format": ({"dtype": "int7"}, ValueError, "unknown dtype 'int7'; known: fp8, int4, int8, uint8"),
    "integer scale": ({"scale": torch.tensor(1)}, TypeError, "scale is torch.int64; expected float16, bfloat16"),
    "axis": ({"axis": 2}, ValueError, "axis=2 is out of range for a tensor with 2 axes"),
    "negative axis": ({"axis": -3}, ValueError, "axis=-3 is out of range for a tensor with 2 axes"),
    "scale of an axis, no axis": ({"scale": torch.ones(8)}, ValueError, r"a tensor \[6, 8\] per tensor"),
    "scale of one, no axis": (
        {"scale": torch.ones(1)},
        ValueError,
        r"the shape \[1\]; .* per tensor needs \[\]",
    ),
    "scale of another axis": ({"scale": torch.ones(8), "axis": 0}, ValueError, r"along axis 0 needs \[6\]"),
    "scale of an axis for blocks": (
        {"scale": torch.ones(8), "axis": 1, "block_size": 4},
        ValueError,
        r"the shape \[8\]; .* along axis 1 in blocks of 4 needs \[6, 2\]",
    ),
    "block without axis": ({"block_size": 4}, ValueError, "block_size=4 needs the axis that it divides"),
    "block that does not divide": (
        {"scale": torch.ones(6, 3), "axis": 1, "block_size": 3},
        ValueError,
        "block_size=3 does not divide axis 1 of size 8",
    ),
    "no block": ({"scale": torch.ones(6, 8), "axis": 1, "block_size": 0}, ValueError, "block_size=0 does not divide"),
    "zero scale": ({"scale": torch.tensor(0.0)}, ValueError, r"scale must be positive and finite; it has 0\.0"),
    "negative scale": ({"scale": torch.tensor([1, 1, 1, -0.5, 1, 1]), "axis": 0}, ValueError, r"scale must be positiv"),
    "infinite scale": ({"scale": torch.tensor(torch.inf)}, ValueError, "scale must be positive and finite; it has inf"),
    "scale that is no number": ({"scale": torch.tensor(torch.nan)}, ValueError, "positive and finite; it has nan"),
    "zero point of int8": ({"zero_point": ZERO}, ValueError, "int8 is symmetric: zero_point must be None"),
    "zero point of fp8": (
        {"zero_point": ZERO, "dtype": "fp8"},
        ValueError,
        "fp8 is symmetric: zero_point must be None",
    ),
    "type of the zero point": ({"zero_point": torch.tensor(3), "dtype": "uint8"}, TypeError, "zero_point is torch.int"),
    "shape of the zero point": (
        {"zero_point": ZERO, "dtype": "uint8", "scale": torch.ones(6), "axis": 0},
        ValueError,
        r"zero_point \[\] and scale \[6\] must have the same shape",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuses(misuse: str) -> None:
    keywords, error, message = MISUSES[misuse]
    for function in FUNCTIONS:
        with pytest.raises(error, match=message):
            function(X, **{"scale": S, **keywords})
    kind = QTYPES.get(keywords.get("dtype", "int8"))
    steps = torch.zeros(6, 8).to(kind.storage if kind is not None else torch.int8)
    with pytest.raises(error, match=message):
        dequantize(steps, **{"scale": S, **keywords})


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("element", [torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_x_is_floating(function: Callable[..., Tensor], element: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"x is {element}; expected float16, bfloat16, float32 or float64"):
        function(X.to(element), S)


@pytest.mark.parametrize(("dtype", "wrong"), [("int8", torch.uint8), ("uint8", torch.int8), ("fp8", torch.float32)])
def test_steps_are_of_the_storage_type(dtype: str, wrong: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"q is {wrong}; the quantized values of {dtype} are {QTYPES[dtype].storage}"):
        dequantize(torch.zeros(3).to(wrong), S, dtype)


def test_steps_of_int4_are_in_its_range() -> None:
    for value in (-9, 8):
        with pytest.raises(ValueError, match="q has values outside of the range of int4, -8 to 7"):
            dequantize(torch.tensor([0, value], dtype=torch.int8), S, "int4")


# -- in programs ---------------------------------------------------------------------------------------------------


class Dynamic(torch.nn.Module):
    """A scale for each row, from the row; blocks; a zero point."""

    def forward(self, x: Tensor) -> Tensor:
        rows = fake_quantize(x, x.abs().amax(1) / 127 + 1e-6, axis=0)
        blocks = fake_quantize(x, x.abs().unflatten(1, (-1, 4)).amax(2) / 448 + 1e-6, "fp8", 1, 4)
        steps = quantize(x, S, "uint8", zero_point=ZERO)
        return rows + blocks + dequantize(steps, S, "uint8", zero_point=ZERO)


def test_compiled_in_one_graph() -> None:
    compiled = torch.compile(Dynamic(), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 3):
        assert torch.equal(compiled(X[:rows]), Dynamic()(X[:rows]))


@pytest.mark.parametrize("strict", [True, False])
def test_exported_with_a_dynamic_shape(strict: bool) -> None:
    shapes = {"x": {0: torch.export.Dim("rows")}}
    program = torch.export.export(Dynamic(), (X,), dynamic_shapes=shapes, strict=strict)
    for rows in (6, 3):
        assert torch.equal(program.module()(X[:rows]), Dynamic()(X[:rows]))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_traced() -> None:
    traced = torch.jit.trace(Dynamic(), X)
    assert torch.equal(traced(X[:3]), Dynamic()(X[:3]))


def test_the_gradients_of_values_and_scale() -> None:
    x, scale = X.clone().requires_grad_(), S.clone().requires_grad_()
    fake_quantize(x, scale).sum().backward()
    assert x.grad.eq(1).all()
    assert scale.grad is not None
    steps = X / S
    torch.testing.assert_close(scale.grad, (steps.round() - steps).sum())
