"""Calibrated quantizers for tests.

Apart from ``helpers.py``, because the goldens hold the lines of the nets in there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from quantizer import Quantizer


def make_calibrated(model: nn.Module, batches: Iterable[Any], **config: Any) -> Quantizer:
    """A quantizer of this configuration, calibrated with the batches."""
    quantizer = Quantizer(preset="plain", **config)
    quantizer.calibrate(model, batches, progress=False)
    return quantizer
