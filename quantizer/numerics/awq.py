"""AWQ, factors of input channels with which a weight loses least by rounding (Lin et al. 2023, arXiv:2306.00978).

Legend: W [N, K] the weight of a product x W^T; m [K] the mean of |x_j|; s [K] > 0 the factors; H [K, K] the sum of
x^T x over the rows that it multiplies; Q(.) rounding to the nearest codes.

    (x / s) Q(W s)^T ~ x W^T        s_j = m_j**alpha / sqrt(max s * min s)        (equation 4 of the paper)

A channel of large inputs counts most, and multiplied by a large factor it is rounded in finer steps. Which share alpha
is best is found by trying: the error of the product is tr((W - Q(W s) / s) H (W - Q(W s) / s)^T).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantizer.numerics.gptq import output_error

_SHARES = tuple(step / 20 for step in range(1, 20))
"""Values of alpha, as the paper's grid of 20."""

_LEAST = 1e-4
"""The smallest mean magnitude, as a share of the largest, so that channels of zeros have a finite factor."""


def input_factors(magnitude: Tensor, alpha: float) -> Tensor:
    """Return s [K] of the formula above, float64, for m [K], of which at least one is not zero."""
    m = magnitude.double()
    s = m.clamp(min=_LEAST * float(m.max())) ** alpha
    return s / (s.max() * s.min()).sqrt()


def awq_share(
    weights: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]], magnitude: Tensor, hessian: Tensor
) -> tuple[float, float] | None:
    """Return the share alpha with the least error, and that error as a part of the error without factors.

    None if no share makes a smaller error, or if H is not finite.

    Args:
        weights: each W [N, K] that multiplies the same x, with the function that rounds W s [N, K] for given s [K], and
            divides by s.
        magnitude: m, [K].
        hessian: H, [K, K].
    """
    if not bool(torch.isfinite(hessian).all()) or not bool(magnitude.any()):
        return None

    def error(s: Tensor) -> float:
        return math.fsum(output_error(weight, rounded(s), hessian) for weight, rounded in weights)

    usual = error(torch.ones_like(magnitude, dtype=torch.float64))
    least, alpha = min((error(input_factors(magnitude, alpha)), alpha) for alpha in _SHARES)
    return (alpha, least / usual) if least < usual else None
