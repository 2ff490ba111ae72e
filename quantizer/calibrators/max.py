"""The range is the largest magnitude seen."""

from __future__ import annotations

from quantizer.calibrators.base import CALIBRATORS
from quantizer.calibrators.base import Calibrator

__all__ = ["MaxCalibrator"]


@CALIBRATORS.add("max")
class MaxCalibrator(Calibrator):
    """Nothing is clipped."""

    def estimate(self) -> float:
        return self.largest
