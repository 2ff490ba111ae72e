"""The range whose rounded histogram diverges least from the true one."""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.calibrators.base import CALIBRATORS
from quantizer.calibrators.base import Calibrator
from quantizer.calibrators.histogram import Histogram
from quantizer.numerics.qtype import qtype

__all__ = ["EntropyCalibrator", "divergences", "ranges"]


@CALIBRATORS.add("entropy")
class EntropyCalibrator(Calibrator):
    """The amax with the least Kullback-Leibler divergence between the clipped and the rounded histogram.

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017. For a range of i bins, P is the histogram up to there,
    with all that lies beyond added to its last bin, and Q is the same bins without what lies beyond, rounded to the
    levels of the format and spread over the bins that are not empty. Of all ranges, from as many bins as there are
    levels on, that with the least KL(P || Q) is taken. With the conventions of NVIDIA's toolkits, counts of the first
    bin, where zeros stand, are taken from the second, and of equal divergences the largest range wins.

    A range that ends in an empty bin and clips something has no finite divergence. It clips what a shorter one clips,
    that which ends where the last values inside of it are; so nothing is lost, unless that one has fewer bins than
    there are levels. That is so where a lone outlier leaves all others less than an eighth of the bins, and then no
    range but the whole is left. Hence the one shorter range is tried as well; each of its bins has a level of its own.

    Args:
        dtype: the integer format that the operand will be held in.
        histogram: taken for the sake of the common signature; this calibrator always keeps one.

    Raises:
        ValueError: ``dtype`` is no integer format.
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
    """Return the ranges to try, in bins, ascending: from ``levels`` on, or the one shorter range that clips no more.

    There are more counts than levels.
    """
    ends = torch.arange(levels, len(counts) + 1)
    inside = counts[:levels].nonzero()
    if len(inside):
        ends[0] = int(inside.max()) + 1
    return ends


def divergences(counts: Tensor, levels: int, ends: Tensor) -> Tensor:
    """KL(P || Q) for the ranges of ``ends`` [R] bins, float64 [R].

    Legend: c_k the counts; for a range of i bins, P is c_0 .. c_{i-1} with everything beyond in the last of them; bins
    floor(k * levels / i) = g share one level (of fewer bins than levels each has its own), and Q gives each of them
    that is not empty their mean count.

    All sums over the bins of a level are differences of prefix sums, so a range costs ``levels`` steps and not i.
    """
    counts = counts.double()
    taken = ends.clamp(max=levels)[:, None]
    # Where each level begins: the first bin k with k * levels >= g * i. A level that is not taken holds nothing.
    starts = (torch.arange(levels + 1)[None, :].minimum(taken) * ends[:, None] + taken - 1) // taken
    held = _differences(counts, starts)
    means = held / _differences((counts > 0).double(), starts).clamp(min=1)
    total = counts.sum()
    inside = held.sum(1)
    beyond = total - inside
    last = counts[ends - 1]
    # sum_k p_k log p_k, the last bin with what lies beyond.
    entropy = _prefix(_x_log_x(counts))[ends] - _x_log_x(last) + _x_log_x(last + beyond)
    # sum_k p_k log q_k: all bins of a level have one q.
    cross = torch.special.xlogy(held, means).sum(1)
    # What lies beyond falls on the last bin, which Q leaves empty where its own count is 0: no finite divergence.
    mean_of_last = means.gather(1, taken - 1).squeeze(1)
    level_of_last = torch.where(last > 0, mean_of_last, torch.zeros_like(last))
    cross = cross + torch.where(beyond > 0, beyond * level_of_last.log(), torch.zeros_like(beyond))
    # P sums to the total and Q to what lies inside.
    divergence: Tensor = (entropy - cross) / total - total.log() + inside.log()
    return divergence


def _prefix(values: Tensor) -> Tensor:
    """Return sums of the first 0, 1, .. values."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _differences(values: Tensor, starts: Tensor) -> Tensor:
    """Return sums of the values from one start to the next: starts [R, L + 1] to sums [R, L]."""
    sums: Tensor = _prefix(values)[starts].diff(dim=1)
    return sums


def _x_log_x(values: Tensor) -> Tensor:
    product: Tensor = torch.special.xlogy(values, values)
    return product
