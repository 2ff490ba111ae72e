"""The calibrator ``mse``: the range with the least mean squared rounding error."""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.calibrators.base import CALIBRATORS, Calibrator
from quantizer.calibrators.histogram import Histogram
from quantizer.numerics.qtype import qtype


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
