"""GPTQ of one weight: the columns one by one as in the paper, and what it must not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantizer.numerics.weight_codes import column_costs, gptq_codes, output_error, output_gains

LOW, HIGH = -8, 7


def inputs(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    """Rows x [M, K] whose columns are strongly correlated."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * torch.logspace(0, -1.5, columns)[:, None]
    return torch.randn(rows, columns, generator=generator) @ mix


def weights(rows: int, columns: int, *, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def hessian_of(x: Tensor) -> Tensor:
    return (x.mT @ x).double()


def steps(weight: Tensor) -> Tensor:
    return weight.abs().amax(-1, keepdim=True) / HIGH


def nearest(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).round().clamp(LOW, HIGH)


def column_by_column(weight: Tensor, hessian: Tensor, scale: Tensor, rows: int, order: list[int]) -> Tensor:
    """The codes by optimal brain quantization in a fixed order, equations 2 and 3 of the paper: after each column all
    others that are left are updated, and it is taken out of the inverse of H by a step of Gaussian elimination."""
    columns = len(order)
    mean = hessian.diagonal().mean()
    inverse = torch.linalg.inv(hessian + torch.eye(columns).double() * mean * max(0.01, columns / rows))
    values, codes = weight.double().clone(), torch.zeros_like(weight)
    scale = scale.expand(weight.shape)
    for column in order:
        code = (values[:, column].float() / scale[:, column]).round().clamp(LOW, HIGH)
        codes[:, column] = code
        error = (values[:, column] - code.double() * scale[:, column].double()) / inverse[column, column]
        values -= error[:, None] * inverse[column][None, :]
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes


@pytest.mark.parametrize("columns", [1, 7, 40, 150])
def test_the_codes_are_those_of_the_columns_one_by_one(columns: int) -> None:
    # 150 columns are more than are updated at once.
    x, weight = inputs(400, columns), weights(12, columns)
    hessian, scale = hessian_of(x), steps(weight)
    found = gptq_codes(weight, hessian, scale, LOW, HIGH, rows=400)
    assert found is not None
    assert found.dtype == torch.int8
    assert torch.equal(found.float(), column_by_column(weight, hessian, scale, 400, list(range(columns))))


def test_act_order_takes_columns_with_large_inputs_first() -> None:
    x, weight = inputs(400, 40), weights(12, 40)
    hessian, scale = hessian_of(x), steps(weight)
    order = hessian.diagonal().argsort(descending=True).tolist()
    found = gptq_codes(weight, hessian, scale, LOW, HIGH, rows=400, by_size=True)
    assert found is not None
    assert torch.equal(found.float(), column_by_column(weight, hessian, scale, 400, order))


@pytest.mark.parametrize("by_size", [False, True])
def test_inputs_that_are_independent_give_the_nearest_codes(by_size: bool) -> None:
    weight = weights(12, 40)
    found = gptq_codes(weight, torch.eye(40).double() * 3.0, steps(weight), LOW, HIGH, rows=400, by_size=by_size)
    assert found is not None
    assert torch.equal(found.float(), nearest(weight, steps(weight)))


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("block", [None, 8])
def test_the_error_is_far_below_that_of_nearest_where_inputs_are_correlated(block: int | None, by_size: bool) -> None:
    x, weight = inputs(2000, 64), weights(32, 64)
    blocks = weight.unflatten(1, (-1, block or 64))
    scale = (blocks.abs().amax(-1, keepdim=True) / HIGH).expand(blocks.shape).flatten(1)
    hessian = hessian_of(x)
    found = gptq_codes(weight, hessian, scale, LOW, HIGH, rows=2000, by_size=by_size)
    assert found is not None
    gptq, usual = (output_error(weight, codes * scale, hessian) for codes in (found, nearest(weight, scale)))
    assert gptq < 0.5 * usual
    # Of rows that it did not see, too.
    other = hessian_of(inputs(2000, 64, seed=0) + 0.01 * inputs(2000, 64, seed=5))
    assert output_error(weight, found * scale, other) < 0.7 * output_error(
        weight, nearest(weight, scale) * scale, other
    )


def test_the_error_is_that_of_the_products() -> None:
    x, weight = inputs(50, 16).double(), weights(5, 16).double()
    rounded = nearest(weight, steps(weight)) * steps(weight)
    expected = float((x @ (weight - rounded).mT).square().sum())
    assert output_error(weight, rounded, x.mT @ x) == pytest.approx(expected, rel=1e-9)


def test_the_gain_makes_outputs_as_large_as_exact_ones() -> None:
    x, weight = inputs(500, 16).double(), weights(5, 16).double()
    x -= x.mean(0)
    rounded = nearest(weight, steps(weight)) * steps(weight) * torch.tensor([0.7, 0.9, 1.0, 1.1, 1.3])[:, None]
    gains = output_gains(weight, rounded, x.mT @ x)
    exact, found = x @ weight.mT, x @ (gains[:, None] * rounded).mT
    torch.testing.assert_close((exact * found).sum(0), exact.square().sum(0))


def test_rows_with_nothing_in_common_have_no_gain() -> None:
    weight = weights(3, 16).double()
    covariance = torch.eye(16).double()
    rounded = torch.stack([torch.zeros(16).double(), -weight[1], weight[2] / 3])
    assert output_gains(weight, rounded, covariance).tolist() == [1, 1, 1]
    assert output_gains(weight, weight, torch.zeros(16, 16).double()).tolist() == [1, 1, 1]


def test_columns_with_inputs_of_one_size_stay_in_order() -> None:
    weight, hessian = weights(12, 80), hessian_of(inputs(400, 80))
    hessian = hessian / hessian.diagonal().outer(hessian.diagonal()).sqrt()
    hessian.fill_diagonal_(1.0)
    by_size, in_order = (
        gptq_codes(weight, hessian, steps(weight), LOW, HIGH, rows=400, by_size=by_size) for by_size in (True, False)
    )
    assert by_size is not None
    assert in_order is not None
    assert torch.equal(by_size, in_order)


def test_the_size_of_all_inputs_changes_no_code() -> None:
    weight, hessian = weights(12, 40), hessian_of(inputs(400, 40))
    codes, of_small_inputs = (
        gptq_codes(weight, hessian * size, steps(weight), LOW, HIGH, rows=400) for size in (1.0, 2.0**-30)
    )
    assert codes is not None
    assert of_small_inputs is not None
    assert torch.equal(codes, of_small_inputs)


def test_columns_of_zero_inputs_are_rounded_to_nearest() -> None:
    x, weight = inputs(400, 40), weights(12, 40)
    x[:, [0, 17, 39]] = 0.0
    found = gptq_codes(weight, hessian_of(x), steps(weight), LOW, HIGH, rows=400)
    assert found is not None
    assert torch.equal(found[:, [0, 17, 39]].float(), nearest(weight, steps(weight))[:, [0, 17, 39]])
    none = gptq_codes(weight, torch.zeros(40, 40).double(), steps(weight), LOW, HIGH, rows=0)
    assert none is not None
    assert torch.equal(none.float(), nearest(weight, steps(weight)))


def test_products_of_their_own_are_rounded_by_themselves() -> None:
    x = torch.stack([inputs(300, 9, seed=seed) for seed in range(4)])
    weight = torch.stack([weights(3, 9, seed=seed) for seed in range(4)])
    together = gptq_codes(weight, hessian_of(x), steps(weight), LOW, HIGH, rows=300, by_size=True)
    assert together is not None
    for index in range(4):
        alone = gptq_codes(weight[index], hessian_of(x[index]), steps(weight[index]), LOW, HIGH, rows=300, by_size=True)
        assert alone is not None
        assert torch.equal(together[index], alone)


def test_few_rows_stay_near_the_nearest_codes() -> None:
    """With fewer samples than columns, H alone would let columns make up for each other at will."""
    weight = weights(32, 64)
    scale, seen, other = steps(weight), inputs(16, 64), hessian_of(inputs(2000, 64)[1000:])
    found = gptq_codes(weight, hessian_of(seen), scale, LOW, HIGH, rows=16)
    trusting = gptq_codes(weight, hessian_of(seen), scale, LOW, HIGH, rows=10**6)
    assert found is not None
    assert trusting is not None
    assert output_error(weight, found * scale, other) < output_error(weight, trusting * scale, other)


def test_inputs_without_an_end_have_no_codes() -> None:
    weight, hessian = weights(4, 8), torch.full((8, 8), float("inf"))
    assert gptq_codes(weight, hessian, steps(weight), LOW, HIGH, rows=8) is None
    assert column_costs(hessian, rows=8) is None


@pytest.mark.parametrize("by_size", [False, True])
def test_the_cost_of_a_column_is_what_later_columns_cannot_make_up_for(by_size: bool) -> None:
    hessians = torch.stack([hessian_of(inputs(400, 9, seed=seed).double()) for seed in range(2)])
    found = column_costs(hessians, rows=400, by_size=by_size)
    assert found is not None
    for hessian, costs in zip(hessians, found, strict=True):
        diagonal = hessian.diagonal()
        damped = hessian + torch.eye(9).double() * diagonal.mean() * 9 / 400
        order = diagonal.argsort(descending=True) if by_size else torch.arange(9)
        for place, column in enumerate(order):
            later = order[place + 1 :]
            saved = damped[column, later] @ torch.linalg.inv(damped[later][:, later]) @ damped[later, column]
            assert float(costs[column]) == pytest.approx(float(damped[column, column] - saved), rel=1e-9)


def test_codes_stay_inside_of_the_bounds() -> None:
    weight = weights(12, 40)
    found = gptq_codes(weight, hessian_of(inputs(400, 40)), steps(weight) / 4, -3, 3, rows=400)
    assert found is not None
    assert int(found.min()) == -3
    assert int(found.max()) == 3
