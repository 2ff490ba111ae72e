"""The estimates of several calibrators, for comparison, all from the statistics of one."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from quantizer.calibrators.base import Calibrator
from quantizer.numerics.qtype import QType

__all__ = ["CANDIDATES", "OF_FORMAT", "estimates"]

OF_FORMAT = frozenset({"mse", "entropy"})
"""The calibrators that estimate rounding errors, and so need the ``dtype`` of the operand."""

CANDIDATES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("max", {}),
    ("percentile", {"percentile": 99.999}),
    ("percentile", {"percentile": 99.99}),
    ("percentile", {"percentile": 99.9}),
    ("mse", {}),
    ("entropy", {}),
)
"""The calibrators that are compared, with their options."""


def estimates(calibrator: Calibrator, dtype: QType) -> Iterator[tuple[str, float]]:
    """Yield name and amax of each candidate; without ``entropy`` for float formats, whose codes are not equidistant.

    Raises:
        CalibrationError: ``calibrator`` has no histogram.
    """
    for name, options in CANDIDATES:
        if name == "entropy" and dtype.is_float:
            continue
        of_format = {"dtype": dtype.name} if name in OF_FORMAT else {}
        yield " ".join([name, *map(str, options.values())]), calibrator.seen_as(name, **options, **of_format).amax()
