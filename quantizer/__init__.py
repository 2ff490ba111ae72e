"""INT8 for PyTorch models on TensorRT and CPU engines: calibrated, measured, explained."""

from __future__ import annotations

from quantizer import functional
from quantizer.config import QuantizerConfig
from quantizer.errors import QuantizerError
from quantizer.qat_calibrate import QATCalibrate
from quantizer.quantizer import Quantizer

__all__ = ["QATCalibrate", "Quantizer", "QuantizerConfig", "QuantizerError", "functional"]

__version__ = "0.1.0"
