"""The former place of ``quantizer.graph_check``, for one release."""

from __future__ import annotations

import warnings

from quantizer.graph_check import Finding
from quantizer.graph_check import check_file

__all__ = ["Finding", "check_file"]

warnings.warn(
    "quantizer.export.check is now quantizer.graph_check, and goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)
