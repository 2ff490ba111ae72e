"""Factors of AWQ and of cross-layer equalization beside the formulas of the papers, computed directly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantizer.functional import fake_quantize
from quantizer.numerics.weight_codes import awq_share, equalizing_factors, input_factors

ROWS, INPUTS, OUTPUTS = 200, 16, 8


def rounded(weight: Tensor, s: Tensor) -> Tensor:
    """Q(W s) / s in INT4, one scale for each output."""
    values = weight * s
    return fake_quantize(values, values.abs().amax(1) / 7, "int4", axis=0) / s


def example(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)
    x[:, 3] *= 40
    return x, torch.randn(OUTPUTS, INPUTS, generator=generator, dtype=torch.float64)


def test_factors_are_those_of_the_paper() -> None:
    m = torch.tensor([1.0, 4.0, 16.0])
    expected = m.double().sqrt() / (4.0 * 1.0) ** 0.5
    torch.testing.assert_close(input_factors(m, 0.5), expected)
    # A channel of zeros has a finite factor.
    assert bool(torch.isfinite(input_factors(torch.tensor([0.0, 1.0]), 0.95)).all())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_share_is_the_best_of_the_products_themselves(seed: int) -> None:
    x, weight = example(seed)
    magnitude = x.abs().mean(0)

    def error(s: Tensor) -> float:
        return float((x @ weight.T - x @ rounded(weight, s).T).square().sum())

    errors = {step / 20: error(input_factors(magnitude, step / 20)) for step in range(1, 20)}
    usual = error(torch.ones(INPUTS, dtype=torch.float64))
    found = awq_share([(weight, lambda s: rounded(weight, s))], magnitude, x.T @ x)
    assert found is not None
    alpha, part = found
    assert errors[alpha] == pytest.approx(min(errors.values()))
    assert part == pytest.approx(min(errors.values()) / usual)
    assert part < 0.7


def test_weights_of_one_input_share_their_factors() -> None:
    (x, first), (_, second) = example(0), example(1)
    magnitude, hessian = x.abs().mean(0), x.T @ x
    apart = [awq_share([(w, lambda s, w=w: rounded(w, s))], magnitude, hessian) for w in (first, second)]
    together = awq_share([(w, lambda s, w=w: rounded(w, s)) for w in (first, second)], magnitude, hessian)
    both = torch.cat([first, second])
    assert together is not None
    assert together == pytest.approx(awq_share([(both, lambda s: rounded(both, s))], magnitude, hessian))
    assert all(entry is not None for entry in apart)


def test_nothing_is_said_of_inputs_that_say_nothing() -> None:
    x, weight = example(0)
    pair = [(weight, lambda s: rounded(weight, s))]
    assert awq_share(pair, torch.zeros(INPUTS), torch.zeros(INPUTS, INPUTS)) is None
    assert awq_share(pair, x.abs().mean(0), torch.full((INPUTS, INPUTS), torch.inf)) is None
    # What is rounded without a loss cannot gain.
    assert awq_share([(weight, lambda s: weight)], x.abs().mean(0), x.T @ x) is None


def test_one_product_without_an_end_says_nothing() -> None:
    x, weight = example(0)
    hessian, row = x.T @ x, weight[:1]
    hessian[3, 5] = hessian[5, 3] = torch.inf
    mirrored = row.clone()
    mirrored[:, 3] *= -1  # its error would be infinite with the other sign
    pairs = [(w, lambda s, w=w: rounded(w, s)) for w in (row, mirrored)]
    assert awq_share(pairs, x.abs().mean(0), hessian) is None


def test_an_input_that_is_always_zero_keeps_no_other_from_a_factor() -> None:
    x, weight = example(0)
    x[:, 5] = 0
    found = awq_share([(weight, lambda s: rounded(weight, s))], x.abs().mean(0), x.T @ x)
    assert found is not None
    assert found[1] < 0.7


def test_equalizing_factors_make_both_magnitudes_one() -> None:
    first, second = torch.tensor([8.0, 1.0, 3.0]), torch.tensor([2.0, 4.0, 3.0])
    s = equalizing_factors(first, second)
    assert s.tolist() == [2.0, 0.5, 1.0]
    torch.testing.assert_close(first.double() / s, second.double() * s)


def test_a_channel_of_zeros_on_either_side_keeps_its_magnitudes() -> None:
    first, second = torch.tensor([0.0, 8.0, 0.0]), torch.tensor([2.0, 0.0, 0.0])
    assert equalizing_factors(first, second).tolist() == [1.0, 1.0, 1.0]
