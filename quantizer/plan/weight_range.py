"""The ranges of weights: the largest magnitude of each scale's values, or less where clipping a few costs less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from quantizer.functional import fake_quantize
from quantizer.numerics.granularity import in_blocks
from quantizer.numerics.qtype import QType

_SHARES = tuple(round(1 - 0.02 * number, 2) for number in range(31))
"""The shares of the largest magnitude that ``mse`` compares: 1 to 0.4. INT4 clips most, and seldom below half."""


def scale_bounds(values: Tensor, axis: int | None, block_size: int | None) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest value of each scale of a weight [*]; arguments as in ``weight_amax``."""
    return over_scale(values, axis, block_size, torch.amin), over_scale(values, axis, block_size, torch.amax)


def weight_amax(
    values: Tensor,
    axis: int | None,
    block_size: int | None,
    dtype: QType,
    estimate: str | None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the range of each scale of a weight.

    Legend: w the values of one scale, r the range, w_r their rounded values with the scale r / qmax.

    Args:
        values: the weight, float32 [*].
        axis: the axis of scales or of blocks; None: one scale.
        block_size: the number of neighbours along ``axis`` that share a scale; None: no blocks.
        dtype: the format of the weight.
        estimate: ``mse``: the share of max|w| with the least sum of (w_r - w)^2; ``percentile P``: the least |w| that P
            percent of the magnitudes do not exceed; None: max|w|.
        bounds: what ``scale_bounds`` returns for the weight; None: it is computed.

    Returns:
        The ranges, float32, in the shape of the scale (see ``numerics/granularity.py``).
    """
    low, high = scale_bounds(values, axis, block_size) if bounds is None else bounds
    # Two passes over the weight, where its magnitudes would be written and read besides.
    largest = torch.maximum(low.abs(), high.abs())
    # A weight with NaN is refused by the caller, with its name.
    if estimate is None or not bool(torch.isfinite(largest).all()):
        return largest
    if estimate.startswith("percentile "):
        return _percentile(values.abs(), axis, block_size, float(estimate.split()[1]))
    return least_error_amax(values, largest, axis, block_size, dtype, _SHARES)


def least_error_amax(
    values: Tensor,
    largest: Tensor,
    axis: int | None,
    block_size: int | None,
    dtype: QType,
    shares: Iterable[float],
    costs: Tensor | None = None,
) -> Tensor:
    """Return the range of each scale with the least sum of c (w_r - w)^2, in the shape of the scale.

    Args:
        values: the weight, float32 [*].
        largest: the largest range of each scale.
        axis: the axis of scales or of blocks; None: one scale.
        block_size: the number of neighbours along ``axis`` that share a scale; None: no blocks.
        dtype: the format of the weight.
        shares: what shares of the largest range are compared; of equal ones the first is taken.
        costs: c of each value, [*]; None: 1.
    """
    best, least = largest, torch.full_like(largest, math.inf)
    for share in shares:
        amax = largest * share
        scale = torch.where(amax > 0, amax / dtype.qmax, 1.0)
        rounded = fake_quantize(values, scale, dtype.name, axis=axis, block_size=block_size)
        squares = (rounded - values).square()
        error = over_scale(squares if costs is None else squares * costs, axis, block_size, torch.sum)
        best, least = torch.where(error < least, amax, best), torch.minimum(error, least)
    return best


def over_scale(values: Tensor, axis: int | None, block_size: int | None, reduce: Callable[..., Tensor]) -> Tensor:
    """Return the values [*] of each scale, reduced by ``torch.amax``, ``mean`` or ``sum``."""
    if axis is None:
        return reduce(values, dim=list(range(values.dim())))
    if block_size is not None:
        return reduce(in_blocks(values, axis, block_size), dim=axis + 1)
    others = [d for d in range(values.dim()) if d != axis % values.dim()]
    return reduce(values, dim=others) if others else values


def _percentile(magnitudes: Tensor, axis: int | None, block_size: int | None, percentile: float) -> Tensor:
    if axis is None:
        rows, shape = magnitudes.reshape(1, -1), torch.Size()
    elif block_size is not None:
        blocks = in_blocks(magnitudes, axis, block_size).movedim(axis + 1, -1)
        rows, shape = blocks.reshape(-1, block_size), blocks.shape[:-1]
    else:
        rows = magnitudes.movedim(axis, 0).flatten(1) if magnitudes.dim() > 1 else magnitudes.reshape(-1, 1)
        shape = rows.shape[:1]
    place = max(1, math.ceil(percentile / 100 * rows.shape[1]))
    return rows.kthvalue(place, dim=1).values.reshape(shape)
