"""The range whose rounded histogram diverges least from the true one."""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.calibrators.base import CALIBRATORS
from quantizer.calibrators.base import Calibrator
from quantizer.calibrators.histogram import Histogram
from quantizer.numerics.qtype import qtype

__all__ = ["EntropyCalibrator", "divergences"]


@CALIBRATORS.add("entropy")
class EntropyCalibrator(Calibrator):
    """The amax with the least Kullback-Leibler divergence between the clipped and the rounded histogram.

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017, with the conventions of NVIDIA's toolkits: counts of the
    first bin, where zeros stand, are taken from the second, and of equal divergences the largest range wins.

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
        found = divergences(histogram.counts[:used], self.levels)
        last_least = len(found) - 1 - int(found.flip(0).argmin())
        return min((self.levels + last_least) * 2.0**histogram.exponent, self.largest)


def divergences(counts: Tensor, levels: int) -> Tensor:
    """KL(P || Q) for every range of ``levels`` to all bins, float64 [bins - levels + 1].

    Legend: c_k the counts; for a range of i bins, P is c_0 .. c_{i-1} with everything beyond in the last of them; bins
    floor(k * levels / i) = g share one level, and Q gives each of them that is not empty their mean count.

    All sums over the bins of a level are differences of prefix sums, so a range costs ``levels`` steps and not i.
    """
    counts = counts.double()
    counts[0] = counts[1]
    bins = len(counts)
    ends = torch.arange(levels, bins + 1)
    # Where each level begins: the first bin k with k * levels >= g * i.
    starts = (torch.arange(levels + 1)[None, :] * ends[:, None] + levels - 1) // levels
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
    level_of_last = torch.where(last > 0, means[:, -1], torch.zeros_like(last))
    cross = cross + torch.where(beyond > 0, beyond * level_of_last.log(), torch.zeros_like(beyond))
    # P sums to the total and Q to what lies inside.
    divergence: Tensor = (entropy - cross) / total - total.log() + inside.log()
    return divergence


def _prefix(values: Tensor) -> Tensor:
    """Sums of the first 0, 1, .. values."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _differences(values: Tensor, starts: Tensor) -> Tensor:
    """Sums of the values from one start to the next: starts [R, L + 1] to sums [R, L]."""
    sums: Tensor = _prefix(values)[starts].diff(dim=1)
    return sums


def _x_log_x(values: Tensor) -> Tensor:
    product: Tensor = torch.special.xlogy(values, values)
    return product
