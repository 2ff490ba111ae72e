"""Streaming range estimators, one per file; their results do not depend on the order of the batches."""

from __future__ import annotations

from quantizer.calibrators.base import (
    CALIBRATORS,
    CANDIDATES,
    OF_FORMAT,
    Calibrator,
    Estimate,
    estimates,
    make_calibrator,
)
from quantizer.calibrators.builtin import EntropyCalibrator, MaxCalibrator, MseCalibrator, PercentileCalibrator

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
