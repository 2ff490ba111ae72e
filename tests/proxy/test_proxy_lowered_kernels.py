"""The integer kernels of lowered proxies: their sums are those of whole numbers, with every kind of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import needs_exact_byte_products
from torch import Tensor
from torch.nn import functional

from quantizer.engines.for_this_cpu import EXACT_QMAX
from quantizer.numerics import torch_operators as ops
from quantizer.numerics.torch_operators import fake_quantize_dynamic
from quantizer.numerics.weight_codes import spend_deprecation_warning
from quantizer.proxy.integer_kernels import (
    Activation,
    IntegerConvolution,
    IntegerLinear,
    IntegerMatmul,
    ScaledMatmul,
    TableLookup,
)
from quantizer.proxy.operand_quantizer import OperandQuantizer

# On a CPU that of a GPU is oneDNN's, too.
LINEARS = [pytest.param(kernel, marks=needs_exact_byte_products) for kernel in (IntegerLinear, IntegerMatmul)]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    spend_deprecation_warning()


def quantizer(dtype: str, scale: float, zero_point: int | None = None) -> OperandQuantizer:
    made = OperandQuantizer()
    made.set_scale(torch.tensor(scale), dtype, None, None, zero_point)
    return made


def whole(*shape: int, low: int = -127, high: int = 128, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def sqnr_db(found: Tensor, expected: Tensor) -> float:
    noise = (found.double() - expected.double()).square().sum().clamp(min=1e-30)
    return float(10 * torch.log10(expected.double().square().sum() / noise))


@pytest.mark.parametrize("kernel", LINEARS)
@pytest.mark.parametrize(("dtype", "zero", "low", "high"), [("int8", None, -128, 128), ("uint8", 77, -77, 179)])
@pytest.mark.parametrize("shape", [(1, 3), (2, 5, 64), (40, 100), (7,)])
def test_sums_are_those_of_whole_numbers(
    kernel: Any, dtype: str, zero: int | None, low: int, high: int, shape: tuple[int, ...]
) -> None:
    # With steps of 1, values are codes and every sum is a number of float32: nothing may differ by a bit.
    x, weight = whole(*shape, low=low, high=high, dtype=torch.int32), whole(13, shape[-1])
    bias = torch.arange(13.0)
    found = kernel(weight, torch.ones(13), Activation(quantizer(dtype, 1.0, zero)))(x.float(), bias, ())
    expected = x.long() @ weight.long().t() + bias.long()
    assert found.shape == expected.shape
    assert torch.equal(found, expected.float())


@pytest.mark.parametrize("kernel", [IntegerLinear, IntegerConvolution])
def test_weights_that_fit_never_saturate(kernel: Any) -> None:
    """Holds on every CPU; ONEDNN_MAX_CPU_ISA=AVX2 makes one with VNNI compute as those without."""
    x = torch.full((32, 64), 255.0)
    weight = torch.full((16, 64), EXACT_QMAX, dtype=torch.int8)
    weight[::2] *= -1
    expected = x @ weight.float().t()
    given = Activation(quantizer("uint8", 1.0, 0))
    if kernel is IntegerConvolution:
        found = kernel(weight[..., None], torch.ones(16), given)(x[..., None], None, (1, 0, 1, 1))[..., 0]
    else:
        found = kernel(weight, torch.ones(16), given)(x, None, ())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kernel", LINEARS)
def test_values_beyond_the_range_are_clipped(kernel: Any) -> None:
    x = torch.tensor([[-1000.0, 1000.0, 0.4, 2.5]])
    weight = torch.eye(4, dtype=torch.int8)
    for given, expected in (
        (quantizer("int8", 1.0), [-128.0, 127.0, 0.0, 2.0]),
        (quantizer("uint8", 1.0, 10), [-10.0, 245.0, 0.0, 2.0]),
    ):
        found = kernel(weight, torch.ones(4), Activation(given))(x, None, ())
        assert found.tolist() == [expected]


@pytest.mark.parametrize("kernel", LINEARS)
def test_steps_of_activation_and_channels_and_factors(kernel: Any) -> None:
    x, weight = torch.randn(6, 32), whole(24, 32)
    scales, factor, bias = torch.rand(24) + 0.1, torch.rand(32) + 0.5, torch.randn(24)
    given = quantizer("uint8", 0.031, 120)
    given.set_factor(factor, -1)
    found = kernel(weight, scales, Activation(given))(x, bias, ())
    rounded = ops.fake_quantize(x * factor, given.scale, "uint8", None, None, given.zero_point)
    expected = functional.linear(rounded.double(), weight.double() * scales.double()[:, None], bias.double())
    assert sqnr_db(found, expected) > 100


@pytest.mark.parametrize("kernel", LINEARS)
@pytest.mark.parametrize(("dtype", "block"), [("uint8", None), ("int8", 32)], ids=["tensor", "row"])
def test_ranges_of_each_call(kernel: Any, dtype: str, block: int | None) -> None:
    weight, scales, bias = whole(24, 32), torch.rand(24) + 0.1, torch.randn(24)
    given = OperandQuantizer()
    given.set_dynamic(dtype, block)
    made = kernel(weight, scales, Activation(given))
    for size in (0.01, 1.0, 300.0):
        x = size * torch.randn(2, 5, 32)
        rounded = fake_quantize_dynamic(x, dtype, block)
        expected = functional.linear(rounded.double(), weight.double() * scales.double()[:, None], bias.double())
        # One value near a tie may take the next code.
        assert sqnr_db(made(x, bias, ()), expected) > 55


@needs_exact_byte_products
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize(
    ("window", "groups"),
    [
        ((1, 0, 1), 1),
        (([2], [1], [1]), 1),
        ((2, 1, 2), 4),
        ((1, "same", 1), 1),
        ((1, "valid", 1), 8),
    ],
)
def test_convolutions_are_those_of_whole_numbers(axes: int, window: tuple[Any, ...], groups: int) -> None:
    x = whole(2, 8, *[9] * axes, low=-77, high=179, dtype=torch.int32).float()
    weight, bias = whole(16, 8 // groups, *[3] * axes), torch.arange(16.0)
    kernel = IntegerConvolution(weight, torch.ones(16), Activation(quantizer("uint8", 1.0, 77)))
    call = functional.conv1d if axes == 1 else functional.conv2d
    expected = call(x.double(), weight.double(), bias.double(), *window, groups).float()
    found = kernel(x, bias, (*window, groups))
    assert found is not None
    assert torch.equal(found, expected)
    assert found.stride() == call(x, weight.float(), bias, *window, groups).stride()
    # Borders that are wider on one side are left to torch.
    assert (
        IntegerConvolution(weight[..., :2], torch.ones(16), kernel._activation)(x, bias, (1, "same", 1, groups)) is None
    )


@needs_exact_byte_products
def test_a_convolution_packed_once_takes_the_range_of_each_call() -> None:
    weight, scales = whole(16, 8, 3, 3), torch.rand(16) + 0.1
    given = OperandQuantizer()
    given.set_dynamic("uint8", None)
    kernel = IntegerConvolution(weight, scales, Activation(given))
    for size in (0.01, 300.0):
        x = size * torch.randn(2, 8, 9, 9)
        expected = functional.conv2d(fake_quantize_dynamic(x).double(), weight * scales.double().reshape(-1, 1, 1, 1))
        found = kernel(x, None, (1, 0, 1, 1))
        assert found is not None
        assert sqnr_db(found, expected) > 50


def test_fp8_products_are_those_of_its_numbers() -> None:
    weight = torch.randn(20, 50).to(torch.float8_e4m3fn)
    scales, bias, x = torch.rand(20) + 0.1, torch.randn(20), 3 * torch.randn(2, 7, 50)
    given = quantizer("fp8", 0.02)
    found = ScaledMatmul(weight, scales, Activation(given))(x, bias, ())
    rounded = ops.fake_quantize(x, given.scale, "fp8")
    expected = functional.linear(rounded.double(), weight.double() * scales.double()[:, None], bias.double())
    assert found.shape == expected.shape
    assert sqnr_db(found, expected) > 100


def test_a_lookup_is_bit_for_bit_that_of_floats() -> None:
    codes, scales, ids = whole(30, 8), torch.rand(30) + 0.1, torch.tensor([[3, 29], [0, 3]])
    assert torch.equal(TableLookup(codes, scales)(ids, None, ()), functional.embedding(ids, codes * scales[:, None]))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_kernels_of_a_gpu_compute_what_they_do_on_a_cpu(rows: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU is here")
    x, bias = torch.randn(rows, 52), torch.randn(20)
    cases: list[tuple[Any, Tensor, OperandQuantizer]] = [(IntegerMatmul, whole(20, 52), quantizer("uint8", 0.03, 120))]
    if torch.cuda.get_device_capability() >= (8, 9):
        cases.append((ScaledMatmul, torch.randn(20, 52).to(torch.float8_e4m3fn), quantizer("fp8", 0.02)))
    for kernel, weight, given in cases:
        here = kernel(weight, torch.ones(20), Activation(given))(x, bias, ())
        there = kernel(weight.cuda(), torch.ones(20).cuda(), Activation(given.cuda()))
        assert sqnr_db(there(x.cuda(), bias.cuda(), ()).cpu(), here) > 55
        compiled = torch.compile(there)
        assert sqnr_db(compiled(x.cuda(), bias.cuda(), ()).cpu(), here) > 55
