"""The calibrators of this package: max, percentile, mse, entropy.

The calibrator ``max``: the range is the largest magnitude.

The calibrator ``percentile``: the range of a given share of all values; the rest is clipped.

The calibrator ``mse``: the range with the least mean squared rounding error.

The calibrator ``entropy``: the range whose rounded histogram diverges least from the original.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.calibrators.base import CALIBRATORS, Calibrator
from quantizer.calibrators.histogram import Histogram
from quantizer.numerics.qtype import qtype


@CALIBRATORS.add("max")
class MaxCalibrator(Calibrator):
    """The largest magnitude observed: no value is clipped."""

    def estimate(self) -> float:
        return self.largest


@CALIBRATORS.add("percentile")
class PercentileCalibrator(Calibrator):
    """The magnitude below which ``percentile`` per cent of the values lie, rounded up to a bin edge.

    Args:
        percentile: in (0, 100]; 100 is the same as ``max``.
        histogram: ignored, for the common signature; this calibrator always keeps a histogram.
    """

    def __init__(self, *, percentile: float = 99.99, histogram: bool = True) -> None:
        super().__init__(histogram=True)
        if not 0 < percentile <= 100:
            raise ValueError(f"percentile is {percentile}; expected a number in (0, 100]")
        self.percentile = percentile

    def estimate(self) -> float:
        assert isinstance(self.histogram, Histogram)
        if self.percentile == 100:
            return self.largest
        return min(self.histogram.quantile(self.percentile / 100), self.largest)


@CALIBRATORS.add("mse")
class MseCalibrator(Calibrator):
    """The amax with the least sum over bins of count * (x - Q(x))**2, x the centre of a bin.

    It balances the clipping of a few outliers against a finer scale for all other values. Candidates are the upper
    edges of all bins up to the largest value.

    Args:
        dtype: the format of the operand.
        histogram: ignored, for the common signature; this calibrator always keeps a histogram.
    """

    def __init__(self, *, dtype: str = "int8", histogram: bool = True) -> None:
        super().__init__(histogram=True)
        self.dtype = qtype(dtype)

    def for_format(self, dtype: str) -> Calibrator:
        return self if dtype == self.dtype.name else self.seen_as("mse", dtype=dtype)

    def estimate(self) -> float:
        histogram = self.histogram
        assert isinstance(histogram, Histogram)
        if histogram.exponent is None:
            return self.largest
        errors = squared_errors(histogram.counts, self.dtype.magnitudes)
        used = int(histogram.counts.nonzero().max()) + 1
        best = int(errors[:used].argmin()) + 1
        return min(best * 2.0**histogram.exponent, self.largest)


def squared_errors(counts: Tensor, levels: Tensor) -> Tensor:
    """Return the sum of squared errors for the range of the first 1, 2, .. bins, in squared bin widths: float64 [bins].

    Legend: counts [bins]; levels [L] the magnitudes of the format, ascending from 0. With a range of i bins, the level
    l stands for the value l * i / max(levels), in bin widths.

    The bins nearest to a level are contiguous, so their error follows from prefix sums of count, count * x and
    count * x**2: a range takes O(L) time, not O(bins).
    """
    bins = len(counts)
    counts, levels = counts.double(), levels.double()
    centres = torch.arange(bins, dtype=torch.float64) + 0.5
    scales = torch.arange(1, bins + 1, dtype=torch.float64) / levels[-1]
    borders = (levels[1:] + levels[:-1]) / 2
    # The first bin whose centre is at or above the border between two levels.
    starts = torch.ceil(borders[None, :] * scales[:, None] - 0.5).long().clamp(0, bins)
    starts = torch.nn.functional.pad(torch.nn.functional.pad(starts, (1, 0)), (0, 1), value=bins)
    held, first, second = (
        torch.cat([values.new_zeros(1), values.cumsum(0)])[starts].diff(dim=1)
        for values in (counts, counts * centres, counts * centres**2)
    )
    values = levels[None, :] * scales[:, None]
    return (second - 2 * values * first + values**2 * held).sum(1)


@CALIBRATORS.add("entropy")
class EntropyCalibrator(Calibrator):
    """The amax with the least Kullback-Leibler divergence between the clipped and the rounded histogram.

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017. For a range of i bins, P is the first i bins of the
    histogram, with the counts of all other bins added to the last of them. Q is the same bins without these counts,
    rounded to the levels of the format and spread over the bins that are not empty. The estimate is the range with the
    least KL(P || Q), of all ranges with at least as many bins as there are levels. As in NVIDIA's toolkits, the first
    bin, which contains the zeros, gets the count of the second, and of equal divergences the largest range wins.

    A range that clips values and ends in an empty bin has an infinite divergence. The range that ends at the last bin
    before it that is not empty clips the same values, so that usually no candidate is lost. But if a lone outlier
    leaves all other values in fewer bins than there are levels (less than an eighth of the bins), only the whole range
    would remain. Hence that one shorter range is a candidate too; each of its bins has its own level.

    Args:
        dtype: the integer format of the operand.
        histogram: ignored, for the common signature; this calibrator always keeps a histogram.

    Raises:
        ValueError: ``dtype`` is not an integer format.
    """

    def __init__(self, *, dtype: str = "int8", histogram: bool = True) -> None:
        super().__init__(histogram=True)
        kind = qtype(dtype)
        if kind.is_float:
            raise ValueError(f"entropy counts equal steps, and those of {dtype} are not; expected an integer format")
        self.dtype = dtype
        self.levels = kind.qmax + 1

    def for_format(self, dtype: str) -> Calibrator:
        return self if dtype == self.dtype else self.seen_as("entropy", dtype=dtype)

    def estimate(self) -> float:
        histogram = self.histogram
        assert isinstance(histogram, Histogram)
        if histogram.exponent is None:
            return self.largest
        used = int(histogram.counts.nonzero().max()) + 1
        if used <= self.levels:
            return self.largest
        counts = histogram.counts[:used].clone()
        counts[0] = counts[1]
        ends = ranges(counts, self.levels)
        found = divergences(counts, self.levels, ends)
        last_least = len(found) - 1 - int(found.flip(0).argmin())
        return min(int(ends[last_least]) * 2.0**histogram.exponent, self.largest)


def ranges(counts: Tensor, levels: int) -> Tensor:
    """Return the candidate ranges in bins, ascending: the first ends at the last value in ``levels`` bins, if any.

    There must be more counts than levels.
    """
    ends = torch.arange(levels, len(counts) + 1)
    inside = counts[:levels].nonzero()
    if len(inside):
        ends[0] = int(inside.max()) + 1
    return ends


def divergences(counts: Tensor, levels: int, ends: Tensor) -> Tensor:
    """Return KL(P || Q) for the ranges of ``ends`` [R] bins, float64 [R].

    Legend: c_k the counts. For a range of i bins, P is c_0 .. c_{i-1} with all other counts added to the last. The bins
    k with floor(k * levels / i) = g share the level g; with fewer bins than levels each bin has its own. Q is the mean
    count of the level's bins that are not empty, in each of these bins.

    All sums over the bins of a level are differences of prefix sums, so a range takes O(levels) time, not O(i).
    """
    counts = counts.double()
    taken = ends.clamp(max=levels)[:, None]
    # The first bin of each level: the least k with k * levels >= g * i. A level that is not used has no bins.
    starts = (torch.arange(levels + 1)[None, :].minimum(taken) * ends[:, None] + taken - 1) // taken
    held = _differences(counts, starts)
    means = held / _differences((counts > 0).double(), starts).clamp(min=1)
    total = counts.sum()
    inside = held.sum(1)
    beyond = total - inside
    last = counts[ends - 1]
    # sum_k p_k log p_k; the last bin includes the clipped counts.
    entropy = _prefix(_x_log_x(counts))[ends] - _x_log_x(last) + _x_log_x(last + beyond)
    # sum_k p_k log q_k: all bins of a level have one q.
    cross = torch.special.xlogy(held, means).sum(1)
    # The clipped counts are in the last bin of P. If its own count is 0, Q is 0 there, and the divergence infinite.
    mean_of_last = means.gather(1, taken - 1).squeeze(1)
    level_of_last = torch.where(last > 0, mean_of_last, torch.zeros_like(last))
    cross = cross + torch.where(beyond > 0, beyond * level_of_last.log(), torch.zeros_like(beyond))
    # Normalization: P sums to the total, Q to the counts inside the range.
    divergence: Tensor = (entropy - cross) / total - total.log() + inside.log()
    return divergence


def _prefix(values: Tensor) -> Tensor:
    """Return sums of the first 0, 1, .. values."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _differences(values: Tensor, starts: Tensor) -> Tensor:
    """Return the sums [R, L] of the values from each of the starts [R, L + 1] to the next."""
    sums: Tensor = _prefix(values)[starts].diff(dim=1)
    return sums


def _x_log_x(values: Tensor) -> Tensor:
    product: Tensor = torch.special.xlogy(values, values)
    return product
