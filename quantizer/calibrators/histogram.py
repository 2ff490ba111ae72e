"""A streaming histogram of |x| with a fixed number of bins.

Legend: w = 2**exponent the bin width; bin i counts the values with i * w <= |x| < (i + 1) * w; counts are 64-bit.

The width is a power of two and grows by doubling, which merges bins pairwise. Since floor(floor(|x| / w) / 2) =
floor(|x| / 2w), the merged histogram equals one of the final width from the start: the result depends neither on the
order of the data nor on its division into batches. Memory is bounded by the number of bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantizer.numerics.granularity import in_memory_order
from quantizer.numerics.torch_operators import fake_quantize

BINS = 2048

_PIECE = 2**17
"""The number of values counted at a time on a CPU: in its cache they take a third of the time of uncached memory."""

_FINEST = -127
"""The exponent of the smallest width whose inverse is finite in float32."""


class Histogram:
    """Counts of |x| in ``BINS`` bins whose width depends on the largest value so far.

    Attributes:
        counts: the counts, int64 [BINS].
        exponent: log2 of the bin width; None until there is a value other than zero.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64)
        self.exponent: int | None = None
        self._zeros = 0

    @classmethod
    def restored(cls, counts: Tensor, exponent: int | None, zeros: int) -> Histogram:
        """Return a histogram with the ``counts`` int64 [BINS], ``exponent`` and ``zeros`` of another."""
        made = cls()
        made.counts, made.exponent, made._zeros = counts.clone(), exponent, zeros
        return made

    @property
    def zeros(self) -> int:
        """The number of values in batches of only zeros, which the bins do not count."""
        return self._zeros

    @property
    def total(self) -> int:
        """The number of values."""
        return int(self.counts.sum()) + self._zeros

    def add(self, x: Tensor, amax: float) -> None:
        """Count the values of x [*]; ``amax`` is their largest magnitude, which must be finite."""
        if amax == 0:
            self._zeros += x.numel()
            return
        # The values are counted as float32, and a float64 amax may round up to the next power of two there.
        self._grow(_exponent_for(float(torch.tensor(amax, dtype=torch.float32))))
        assert self.exponent is not None
        size = _PIECE if x.device.type == "cpu" else x.numel()
        for piece in torch.split(in_memory_order(x.detach()).flatten(), size):
            # Scaling by a power of two is exact, so truncation toward 0 gives the bin, with the value's sign. 16 bits
            # suffice, and make the next passes faster.
            bins = piece.float().mul(2.0**-self.exponent).to(torch.int16).abs_()
            # Not in place: a tensor made in inference mode cannot be changed in place outside of it.
            self.counts = self.counts + torch.bincount(bins, minlength=BINS).cpu()

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        self._zeros += other._zeros
        if other.exponent is None:
            return
        self._grow(other.exponent)
        assert self.exponent is not None
        # Not in place: copies of this histogram share the tensor of counts.
        self.counts = self.counts + _coarsened(other.counts, self.exponent - other.exponent)

    def centres(self) -> Tensor:
        """Return the middle of each bin, float64 [BINS]; zeros are in the first bin."""
        width = 2.0 ** (self.exponent or 0)
        return (torch.arange(BINS, dtype=torch.float64) + 0.5) * width

    def quantile(self, share: float) -> float:
        """Return the upper edge of the bin with the quantile: the value below which ``share`` of all values lie."""
        if self.exponent is None:
            return 0.0
        wanted = math.ceil(share * self.total) - self._zeros
        cumulative = torch.cumsum(self.counts, 0)
        place = int(torch.searchsorted(cumulative, torch.tensor(max(wanted, 1), dtype=torch.int64)))
        return float((min(place, BINS - 1) + 1) * 2.0**self.exponent)

    def share_above(self, amax: float) -> float:
        """Return the share of all values in bins entirely above ``amax``."""
        if self.exponent is None:
            return 0.0
        first = math.ceil(amax * 2.0**-self.exponent)
        return int(self.counts[first:].sum()) / self.total

    def sqnr_db(self, scale: float, dtype: str) -> float:
        """Return the SQNR in dB of all values quantized to the format ``dtype`` with ``scale``, by the bin centres."""
        if self.exponent is None:
            return math.inf
        centres = self.centres().float()
        rounded = fake_quantize(centres, torch.tensor(scale, dtype=torch.float32), dtype)
        noise = float((self.counts.double() * (centres.double() - rounded.double()) ** 2).sum())
        signal = float((self.counts.double() * centres.double() ** 2).sum())
        return 10 * math.log10(signal / noise) if noise > 0 else math.inf

    def _grow(self, exponent: int) -> None:
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.counts = _coarsened(self.counts, exponent - self.exponent)
            self.exponent = exponent


def _exponent_for(amax: float) -> int:
    """Return the smallest exponent e, at least ``_FINEST``, such that ``BINS`` bins of width 2**e contain amax."""
    _, exponent = math.frexp(amax)  # amax = mantissa * 2**exponent, 0.5 <= mantissa < 1
    return max(exponent - int(math.log2(BINS)), _FINEST)


def _coarsened(counts: Tensor, doublings: int) -> Tensor:
    for _ in range(min(doublings, int(math.log2(BINS)))):
        merged = counts.reshape(-1, 2).sum(1)
        counts = torch.cat([merged, torch.zeros_like(merged)])
    if doublings > int(math.log2(BINS)):
        total = counts.sum()
        counts = torch.zeros_like(counts)
        counts[0] = total
    return counts
