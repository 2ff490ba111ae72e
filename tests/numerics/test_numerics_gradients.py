"""Gradients of ``fake_quantize`` against float64 references of the straight-through estimator and of LSQ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import qtype
from quantizer.numerics.granularity import in_blocks
from quantizer.numerics.rounding import GAIN, learned, trained_scale


@dataclass(frozen=True)
class Case:
    dtype: str
    axis: int | None = None
    block_size: int | None = None
    zero_point: int | None = None
    shape: tuple[int, ...] = ()


CASES = [
    Case("int8"),
    Case("int8", axis=0, shape=(6,)),
    Case("int8", axis=1, shape=(8,)),
    Case("int4", axis=1, block_size=4, shape=(6, 2)),
    Case("fp8"),
    Case("fp8", axis=0, shape=(6,)),
    Case("uint8", zero_point=100),
    Case("uint8", zero_point=0),
]


def reference(x: Tensor, scale: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x and the scale as leaves in float64, and the rounded values, whose gradients torch derives."""
    kind = qtype(case.dtype)
    x, scale = x.double().requires_grad_(), scale.double().requires_grad_()
    beside = scale
    if case.block_size is not None:
        beside = scale.unsqueeze(2)
    elif case.axis is not None:
        beside = scale.reshape(-1, 1) if case.axis == 0 else scale
    steps = in_blocks(x, case.axis, case.block_size) / beside
    zero = case.zero_point or 0
    if kind.is_float:
        inside = steps.clamp(kind.qmin, kind.qmax)
        rounded = inside.detach().float().to(kind.storage).double()
        steps = inside + (rounded - inside).detach()
    else:
        steps = steps + (steps.round() - steps).detach()
        steps = steps.clamp(kind.qmin - zero, kind.qmax - zero)
    return x, scale, (steps * beside).reshape(x.shape)


def example(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(6, 8, generator=generator) * 3, torch.randn(6, 8, generator=generator)
    # About a third of the values are clipped.
    scale = (torch.rand(case.shape, generator=generator) + 1) * 2 / qtype(case.dtype).qmax
    zero = None if case.zero_point is None else torch.tensor(case.zero_point, dtype=torch.uint8)
    return x, scale, weights, zero


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_references(case: Case) -> None:
    x, scale, weights, zero = example(case)
    exact_x, exact_scale, exact = reference(x, scale, case)
    (exact * weights.double()).sum().backward()
    learned_x, learned_scale = x.clone().requires_grad_(), scale.clone().requires_grad_()
    result = ops.fake_quantize(learned_x, learned_scale, case.dtype, case.axis, case.block_size, zero)
    (result * weights).sum().backward()
    fixed_x = x.clone().requires_grad_()
    (ops.fake_quantize(fixed_x, scale, case.dtype, case.axis, case.block_size, zero) * weights).sum().backward()
    assert exact_x.grad is not None
    assert exact_scale.grad is not None
    assert 0 < int((exact_x.grad == 0).sum()) < x.numel()
    for found in (learned_x.grad, fixed_x.grad):
        assert found is not None
        assert torch.equal(found.double(), exact_x.grad)
    assert learned_scale.grad is not None
    torch.testing.assert_close(learned_scale.grad.double(), exact_scale.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [CASES[0], CASES[-2]], ids=str)
def test_gradients_of_many_values_are_those_of_the_references(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2**17, generator=generator) * 3  # three pieces, the last one shorter
    scale = torch.tensor(1 / 32)  # x / s is exact: no tie is decided by the precision
    zero = example(case)[3]
    exact_x, exact_scale, exact = reference(x, scale, case)
    exact.square().sum().backward()
    assert exact_x.grad is not None
    assert exact_scale.grad is not None
    x, scale = x.requires_grad_(), scale.requires_grad_()
    ops.fake_quantize(x, scale, case.dtype, zero_point=zero).square().sum().backward()
    assert x.grad is not None
    assert scale.grad is not None
    assert torch.equal(x.grad.double(), exact_x.grad)
    torch.testing.assert_close(scale.grad.double(), exact_scale.grad, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("shape", "axis"), [((1, 2**18 + 1), None), ((3, 2**17), 0), ((2**17, 3), 1)], ids=["one-row", "axis-0", "axis-1"]
)
def test_many_values_in_one_row_or_with_many_scales(shape: tuple[int, int], axis: int | None) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    scale = torch.tensor(1 / 32) if axis is None else torch.tensor([1 / 32, 1 / 64, 1 / 16])
    exact_x, exact_scale, exact = reference(x, scale, Case("int8", axis))
    exact.square().sum().backward()
    learned_x, learned_scale = x.requires_grad_(), scale.requires_grad_()
    ops.fake_quantize(learned_x, learned_scale, "int8", axis).square().sum().backward()
    assert learned_x.grad is not None
    assert learned_scale.grad is not None
    assert torch.equal(learned_x.grad.double(), exact_x.grad)
    torch.testing.assert_close(learned_scale.grad.double(), exact_scale.grad, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[-2]], ids=str)
def test_what_backward_calls_can_be_traced(case: Case, dtype: torch.dtype) -> None:
    x, scale, weights, zero = example(case)
    granularity = (case.dtype, case.axis, case.block_size, zero)
    torch.library.opcheck(torch.ops.quantizer.inside.default, (x.to(dtype), scale, *granularity))
    gradients = (weights.to(dtype), x.to(dtype), scale, *granularity)
    torch.library.opcheck(torch.ops.quantizer.lsq_gradients.default, gradients)


def test_an_infinite_value_counts_as_the_edge_of_the_range() -> None:
    x, scale = torch.tensor([1.0, torch.inf, -torch.inf], requires_grad=True), torch.tensor(0.5, requires_grad=True)
    ops.fake_quantize(x, scale).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 0.0]
    assert scale.grad is not None
    assert scale.grad.item() == 127 - 128


@pytest.mark.parametrize("learns", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize(
    ("dtype", "zero_point"), [("int8", None), ("int4", None), ("uint8", 100), ("uint8", 101), ("fp8", None)]
)
def test_the_edges_of_the_range_are_those_of_the_values(dtype: str, zero_point: int | None, learns: bool) -> None:
    kind = qtype(dtype)
    scale, zero = torch.tensor(0.25, requires_grad=learns), zero_point or 0
    # Halfway between steps, and the nearest numbers on both sides of that: division by 0.25 is exact.
    ends = torch.tensor([kind.qmin - zero, kind.qmax - zero], dtype=torch.float32)
    ties = (ends[:, None] + torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])).flatten() * 0.25
    upwards, downwards = torch.full_like(ties, torch.inf), torch.full_like(ties, -torch.inf)
    x = torch.cat([ties, ties.nextafter(upwards), ties.nextafter(downwards)]).requires_grad_()
    given = None if zero_point is None else torch.tensor(zero_point, dtype=torch.uint8)
    ops.fake_quantize(x, scale, dtype, None, None, given).sum().backward()
    steps = x.detach() / 0.25 if kind.is_float else (x.detach() / 0.25).round() + zero
    expected = (steps >= kind.qmin) & (steps <= kind.qmax)
    assert 0 < int(expected.sum()) < x.numel()
    assert x.grad is not None
    assert torch.equal(x.grad.bool(), expected)


def test_the_scale_learns_from_a_value_between_the_last_step_and_the_edge() -> None:
    scale, zero_point = torch.tensor(1.0, requires_grad=True), torch.tensor(0, dtype=torch.uint8)
    ops.fake_quantize(torch.tensor([255.25]), scale, "uint8", None, None, zero_point).sum().backward()
    assert scale.grad is not None
    assert scale.grad.item() == 255 - 255.25


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_scale_alone_can_be_trained(case: Case) -> None:
    x, scale, weights, zero = example(case)
    _, exact_scale, exact = reference(x, scale, case)
    (exact * weights.double()).sum().backward()
    learned = scale.clone().requires_grad_()
    (ops.fake_quantize(x, learned, case.dtype, case.axis, case.block_size, zero) * weights).sum().backward()
    assert learned.grad is not None
    assert exact_scale.grad is not None
    torch.testing.assert_close(learned.grad.double(), exact_scale.grad, rtol=1e-5, atol=1e-5)


def test_half_precision_inputs_keep_their_type() -> None:
    x, scale = torch.randn(6, 8).bfloat16().requires_grad_(), torch.tensor(0.01).requires_grad_()
    ops.fake_quantize(x, scale).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert scale.grad is not None
    assert scale.grad.dtype == torch.float32


def test_what_backward_keeps_of_a_fixed_scale_is_a_byte_a_value() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(6, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ops.fake_quantize(x, torch.tensor(0.01))
    assert [(tensor.dtype, tensor.numel()) for tensor in kept] == [(torch.int8, 48)]


def test_the_gradient_of_a_trained_scale_is_divided() -> None:
    start, change = torch.tensor([0.5, 0.25]), torch.tensor([0.0, 1 / GAIN], requires_grad=True)
    trained = trained_scale(start, change, values=50, qmax=127)
    torch.testing.assert_close(trained.detach(), torch.tensor([0.5, 0.25 * math.e]))
    assert trained[0].item() == 0.5
    (trained * torch.tensor([3.0, 4.0])).sum().backward()
    assert change.grad is not None
    torch.testing.assert_close(change.grad, torch.tensor([1.5, math.e]) / (50 * 127) ** 0.5 / GAIN)


def test_plain_descent_moves_the_logarithm_as_without_the_gain() -> None:
    start, change = torch.tensor(0.5), torch.tensor(0.0, requires_grad=True)
    (trained_scale(start, change, values=1, qmax=1) * 3).backward()
    assert change.grad is not None
    moved = torch.tensor(-0.01) * change.grad
    torch.testing.assert_close((learned(start, moved) / start).log(), torch.tensor(-0.015))


def test_a_scale_that_moves_no_more_has_a_gradient_of_zero() -> None:
    start, change = torch.tensor([0.5]), torch.tensor([0.3], requires_grad=True)
    trained = trained_scale(start, change, values=1, qmax=127, moves=False)
    assert torch.equal(trained, start)
    trained.sum().backward()
    assert change.grad is not None
    assert change.grad.item() == 0
