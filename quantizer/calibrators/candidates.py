"""The estimates of several calibrators, for comparison, all from the statistics of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantizer.calibrators.base import Calibrator
from quantizer.numerics.qtype import QType

OF_FORMAT = frozenset({"mse", "entropy"})
"""The calibrators that estimate rounding errors, and so need the ``dtype`` of the operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A calibrator by its registered name, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name and the values of the options, as a coverage shows them."""
        return " ".join([self.name, *(f"{value:g}" for value in self.options.values())])

    def amax(self, calibrator: Calibrator, dtype: str) -> float:
        """Return the estimate from the statistics of a calibrator, for operands in the format ``dtype``.

        Raises:
            CalibrationError: the estimate needs a histogram, and ``calibrator`` has none.
        """
        of_format = {"dtype": dtype} if self.name in OF_FORMAT else {}
        return calibrator.seen_as(self.name, **self.options, **of_format).amax()


CANDIDATES = (
    Estimate(name="max"),
    Estimate(name="percentile", options={"percentile": 99.999}),
    Estimate(name="percentile", options={"percentile": 99.99}),
    Estimate(name="percentile", options={"percentile": 99.9}),
    Estimate(name="mse"),
    Estimate(name="entropy"),
)
"""The estimates that are compared, the wider first."""


def estimates(calibrator: Calibrator, dtype: QType) -> Iterator[tuple[str, float]]:
    """Yield name and amax of each candidate; without ``entropy`` for float formats, whose codes are not equidistant.

    Raises:
        CalibrationError: ``calibrator`` has no histogram.
    """
    for candidate in CANDIDATES:
        if candidate.name == "entropy" and dtype.is_float:
            continue
        yield candidate.label, candidate.amax(calibrator, dtype.name)
