"""Products and what follows them in one kernel, against operations of torch; sizes are no multiples of a tile.

Results in INT8 are equal bit for bit. Where ``exp`` and ``erf`` are not those of torch, they are at most one step
apart, as those in FP8 and float16 are, and those in bfloat16, which the interpreter truncates. Of FP8 operands, torch
sums the products in another order: float16 and bfloat16 are within 1%.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from triton_kernels.interpreted import products, steps

from quantizer.numerics.triton_kernels import reference
from quantizer.numerics.triton_kernels.tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

TILE = Tile(rows=32, columns=32, depth=32, warps=4, stages=2)
MANY_TILES = (300, 33, 129)
SIZES = [(1, 1, 1), (3, 5, 7), (37, 48, 70), (64, 96, 128), MANY_TILES]
# The interpreter takes seconds for all activations of many tiles, which other tests have daily with one.
MANY_NIGHTLY = [*SIZES[:-1], pytest.param(MANY_TILES, marks=pytest.mark.nightly)]
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def _quantized(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == INT8:
        return torch.randint(-128, 128, shape, dtype=INT8, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def _both(
    size: tuple[int, int, int],
    operands: torch.dtype = INT8,
    result: torch.dtype = torch.float16,
    activation: str = "none",
    parts: int = 1,
    *,
    bias: bool = True,
    residual: bool = True,
    scale: float = 0.02,
) -> tuple[Tensor, Tensor]:
    """The result of the kernel and of the reference."""
    m, n, k = size
    generator = torch.Generator().manual_seed(m + n + k)
    a, w = _quantized(generator, operands, m, k), _quantized(generator, operands, n, k)
    scales = 1e-3 + 1e-2 * torch.rand(n, generator=generator)
    added = torch.randn(n, generator=generator) if bias else None
    rest = torch.randn(m, n, generator=generator).half() if residual and parts == 1 else None
    next_scale = 0.05 * torch.arange(1.0, parts + 1) if result in (INT8, FP8) else None
    epilogue = products.Epilogue(activation=activation, dtype=result, parts=parts)
    arguments = (a, w, scale, scales, added, rest, next_scale)
    return products.linear(*arguments, epilogue, TILE), reference.linear(
        *arguments, activation=activation, dtype=result, parts=parts
    )


@pytest.mark.parametrize("size", MANY_NIGHTLY)
def test_every_activation_and_result_of_int8(size: tuple[int, int, int]) -> None:
    for activation, result in itertools.product(reference.ACTIVATIONS, (torch.float16, torch.bfloat16, INT8, FP8)):
        found, expected = _both(size, INT8, result, activation)
        assert found.dtype == result
        is_exact = result == INT8 and activation in ("none", "relu")
        assert steps(found, expected) <= (0 if is_exact else 1), (activation, result)


@pytest.mark.parametrize("size", SIZES)
def test_every_result_of_fp8(size: tuple[int, int, int]) -> None:
    for result in (torch.float16, torch.bfloat16, FP8):
        found, expected = _both(size, FP8, result, residual=False, bias=False)
        if result == FP8:
            assert steps(found, expected) <= 1
        else:
            torch.testing.assert_close(found.float(), expected.float(), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(("bias", "residual"), [(True, False), (False, True), (False, False)])
def test_what_is_left_out(bias: bool, residual: bool) -> None:
    found, expected = _both(MANY_TILES, result=INT8, bias=bias, residual=residual)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("result", [torch.float16, INT8])
def test_several_results_with_their_own_scales(result: torch.dtype) -> None:
    found, expected = _both((37, 48, 70), result=result, parts=3)
    assert found.shape == (3, 37, 16)
    assert torch.equal(found, expected)


def test_int8_sums_are_exact() -> None:
    """The largest possible sum of 300 products."""
    k = 300
    a, w = torch.full((2, k), -128, dtype=INT8), torch.full((3, k), -128, dtype=INT8)
    ones = torch.ones(3)
    found = products.linear(a, w, 2.0**-12, ones, None, None, None, products.Epilogue(), TILE)
    assert bool((found == 128 * 128 * k / 2**12).all())


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_zero_and_extreme_scales(scale: float) -> None:
    for result in (INT8, FP8):
        found, expected = _both((3, 5, 7), result=result, scale=scale)
        assert steps(found, expected) <= (0 if result == INT8 else 1)


def test_a_following_scale_of_zero_gives_zeros() -> None:
    a, w = torch.ones(2, 4, dtype=INT8), torch.ones(3, 4, dtype=INT8)
    for result in (INT8, FP8):
        epilogue = products.Epilogue(dtype=result)
        found = products.linear(a, w, 1.0, torch.ones(3), None, None, torch.zeros(1), epilogue, TILE)
        assert not found.float().any()


def test_nan_becomes_zero_in_int8_and_stays_in_floats() -> None:
    """The interpreter converts no NaN to FP8."""
    a, w, bias = torch.ones(2, 4, dtype=INT8), torch.ones(3, 4, dtype=INT8), torch.tensor([0.0, torch.nan, 0.0])
    for result, next_scale in ((INT8, torch.ones(1)), (torch.float16, None)):
        epilogue = products.Epilogue(dtype=result)
        found = products.linear(a, w, 1.0, torch.ones(3), bias, None, next_scale, epilogue, TILE).float()
        assert found[:, [0, 2]].tolist() == [[4, 4], [4, 4]]
        assert bool((found[:, 1] == 0).all() if result == INT8 else found[:, 1].isnan().all())


@pytest.mark.parametrize("point", [-128, -37, 0, 127])
def test_a_zero_point_of_the_result(point: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, w = _quantized(generator, INT8, 37, 70), _quantized(generator, INT8, 48, 70)
    arguments = (a, w, 0.02, torch.full((48,), 5e-3), torch.randn(48, generator=generator), None, torch.tensor([0.2]))
    found = products.linear(*arguments, products.Epilogue(dtype=INT8), TILE, zero_point=point)
    floats = products.linear(*arguments[:-1], None, products.Epilogue(dtype=torch.float32), TILE)
    assert torch.equal(found, reference.linear(*arguments, dtype=INT8, zero_point=point))
    assert torch.equal(found, ((floats / 0.2).round() + point).clamp(-128, 127).to(INT8))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_scale_for_each_column_of_the_result(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, w = _quantized(generator, INT8, 37, 70), _quantized(generator, INT8, 48, 70)
    next_scale = 0.05 + torch.rand(48, generator=generator)
    arguments = (a, w, 0.02, torch.full((48,), 5e-3), None, None, next_scale)
    found = products.linear(*arguments, products.Epilogue(dtype=INT8, parts=parts), TILE)
    floats = products.linear(*arguments[:-1], None, products.Epilogue(dtype=torch.float32), TILE)
    assert torch.equal(found, reference.linear(*arguments, dtype=INT8, parts=parts))
    columns = found.transpose(0, 1).reshape(37, 48) if parts > 1 else found
    assert torch.equal(columns, (floats / next_scale).round().clamp(-128, 127).to(INT8))


@pytest.mark.parametrize("size", MANY_NIGHTLY)
def test_an_epilogue_alone_writes_what_a_product_with_it_does(size: tuple[int, int, int]) -> None:
    """Its operand is the exact sums of another library: int32, or float32 for the sums of FP8."""
    m, n, k = size
    generator = torch.Generator().manual_seed(0)
    a, w = _quantized(generator, INT8, m, k), _quantized(generator, INT8, n, k)
    sums = a.int() @ w.int().t()
    scales, bias = torch.rand(n, generator=generator) / 100, torch.randn(n, generator=generator)
    residual = torch.randn(m, n, generator=generator).half()
    parts = 3 if n % 3 == 0 else 1
    for activation, result in itertools.product(("none", "gelu"), (torch.float16, torch.bfloat16, INT8, FP8)):
        next_scale = torch.rand(n, generator=generator) / 10 if result in (INT8, FP8) else None
        epilogue = products.Epilogue(activation=activation, dtype=result, parts=parts)
        rest = (0.02, scales, bias, residual if parts == 1 else None, next_scale, epilogue)
        point = 5 if result == INT8 else 0
        expected = products.linear(a, w, *rest, TILE, zero_point=point)
        for x in (sums, sums.float()):
            assert steps(products.finished(x, *rest, zero_point=point), expected) == 0
