"""The limits of float16."""

from __future__ import annotations

FLOAT16_MAX = 65504.0
"""The largest number of float16 (IEEE 754-2008, binary16)."""

FLOAT16_MASK = -30000.0
"""The value of masks in float16: adding a score to it does not overflow, and exp(-30000) is 0 in every float type."""
