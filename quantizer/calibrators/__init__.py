"""Streaming range estimators, one per file; their results do not depend on the order of the batches."""

from __future__ import annotations

from quantizer.calibrators.base import CALIBRATORS, Calibrator, make_calibrator
from quantizer.calibrators.candidates import CANDIDATES, OF_FORMAT, Estimate, estimates
from quantizer.calibrators.entropy import EntropyCalibrator
from quantizer.calibrators.max import MaxCalibrator
from quantizer.calibrators.mse import MseCalibrator
from quantizer.calibrators.percentile import PercentileCalibrator

__all__ = [
    "CALIBRATORS",
    "CANDIDATES",
    "OF_FORMAT",
    "Calibrator",
    "EntropyCalibrator",
    "Estimate",
    "MaxCalibrator",
    "MseCalibrator",
    "PercentileCalibrator",
    "estimates",
    "make_calibrator",
]
