"""The range with the least mean squared rounding error."""

from __future__ import annotations

from quantizer.calibrators.base import CALIBRATORS
from quantizer.calibrators.base import Calibrator
from quantizer.calibrators.histogram import Histogram
from quantizer.numerics.qtype import qtype

__all__ = ["MseCalibrator"]

_STRIDE = 8
"""Bins between two candidates: at most 1/128 of the largest value, a rounding step of INT8."""


@CALIBRATORS.add("mse")
class MseCalibrator(Calibrator):
    """The amax for which sum over bins of count * (x - Q(x))**2 is least, x at the bins' centres.

    Clipping a few outliers buys a finer step for all other values; this weighs the one against the other.

    Args:
        dtype: the format that the operand will be held in.
        histogram: taken for the sake of the common signature; this calibrator always keeps one.
    """

    def __init__(self, *, dtype: str = "int8", histogram: bool = True) -> None:
        super().__init__(histogram=True)
        self.dtype = qtype(dtype)

    def amax(self) -> float:
        histogram = self.histogram
        assert isinstance(histogram, Histogram)
        if histogram.exponent is None:
            return self.largest
        last = int(histogram.counts.nonzero().max()) + 1
        width = 2.0**histogram.exponent
        candidates = [min(edge * width, self.largest) for edge in range(last, 0, -_STRIDE)]
        low, high = self.dtype.qmin, self.dtype.qmax
        return min(candidates, key=lambda amax: histogram.noise(amax / high, low, high))
