"""What each group of sites costs, and which to put back."""

from __future__ import annotations

from quantizer.sensitivity.fallback import Fallback
from quantizer.sensitivity.fallback import choose
from quantizer.sensitivity.measure import GroupError
from quantizer.sensitivity.measure import Measurement

__all__ = ["Fallback", "GroupError", "Measurement", "choose"]
