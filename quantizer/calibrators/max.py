"""The range is the largest magnitude seen."""

from __future__ import annotations

from torch import Tensor

from quantizer.calibrators.base import CALIBRATORS
from quantizer.calibrators.base import Calibrator
from quantizer.calibrators.histogram import in_memory_order

__all__ = ["MaxCalibrator"]

_EVERY = 5
"""One of so many values is counted: no divisor of the sizes that models have, so that all channels take part."""


@CALIBRATORS.add("max")
class MaxCalibrator(Calibrator):
    """Nothing is clipped.

    A histogram beside it only judges a residual operand: a part of the values is enough for that.
    """

    def counted(self, x: Tensor) -> Tensor:
        return in_memory_order(x).flatten()[::_EVERY]

    def estimate(self) -> float:
        return self.largest
