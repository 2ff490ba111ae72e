"""Streaming range estimators, one per file; their results do not depend on the order of the batches."""

from __future__ import annotations

from quantizer.calibrators.base import CALIBRATORS
from quantizer.calibrators.base import Calibrator
from quantizer.calibrators.base import make_calibrator
from quantizer.calibrators.candidates import CANDIDATES
from quantizer.calibrators.candidates import OF_FORMAT
from quantizer.calibrators.candidates import Estimate
from quantizer.calibrators.candidates import estimates
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
