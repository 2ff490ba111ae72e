"""The calibrator ``max``: the range is the largest magnitude."""

from __future__ import annotations

from quantizer.calibrators.base import CALIBRATORS, Calibrator


@CALIBRATORS.add("max")
class MaxCalibrator(Calibrator):
    """The largest magnitude observed: no value is clipped."""

    def estimate(self) -> float:
        return self.largest
