"""The calibrator ``percentile``: the range of a given share of all values; the rest is clipped."""

from __future__ import annotations

from quantizer.calibrators.base import CALIBRATORS, Calibrator
from quantizer.calibrators.histogram import Histogram


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
