"""The base of all calibrators: a streaming estimator of an operand's range.

The estimates of several calibrators, for comparison, all from the statistics of one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.calibrators.histogram import Histogram
from quantizer.common import registry as choices
from quantizer.common.registry import Registry
from quantizer.errors import CalibrationError
from quantizer.numerics.granularity import in_memory_order
from quantizer.numerics.qtype import QType

CALIBRATORS: Registry[type[Calibrator]] = choices.CALIBRATORS
"""The calibrators by name; ``@CALIBRATORS.add("name")`` adds a subclass of ``Calibrator`` that has ``estimate()``."""


class Calibrator:
    """Statistics of one operand's values, in bounded memory, and the range estimated from them.

    The base class checks the data. It keeps the minimum and maximum, also for targets with zero points, and optionally
    a histogram. A subclass adds one formula, ``estimate``.

    Args:
        histogram: keep a histogram of |x|. Residual operands need one with every calibrator, to compute their SQNR.
    """

    def __init__(self, *, histogram: bool = False) -> None:
        self.minimum = math.inf
        self.maximum = -math.inf
        self.count = 0
        self.histogram = Histogram() if histogram else None
        self._estimated: tuple[int, float] | None = None

    def observe(self, x: Tensor) -> None:
        """Add the values of x [*] (any floating dtype and device).

        Raises:
            CalibrationError: x has a value that is NaN or infinite, in its own type or in float32. No value is added.
        """
        if x.numel() == 0:
            return
        low, high = (float(bound) for bound in torch.aminmax(in_memory_order(x.detach())))
        if not (math.isfinite(low) and math.isfinite(high)):
            what = "NaN" if math.isnan(low) or math.isnan(high) else "an infinite value"
            raise CalibrationError(f"{what} in its values, shape {tuple(x.shape)}")
        if math.isinf(float(torch.tensor(max(-low, high), dtype=torch.float32))):
            raise CalibrationError(
                f"a value of {max(-low, high):.3g} in its values, shape {tuple(x.shape)}, beyond what float32 holds, "
                "in which scales are kept"
            )
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)
        self.count += x.numel()
        if self.histogram is not None:
            self.histogram.add(x, max(abs(low), abs(high)))

    def start_histogram(self, x: Tensor) -> None:
        """Keep a histogram from now on, starting with x [*], the values observed last."""
        if self.histogram is None and x.numel():
            self.histogram = Histogram()
            self.histogram.add(x, float(x.detach().abs().max()))

    def copy(self) -> Calibrator:
        """Return a copy that can observe more values without changing this calibrator."""
        other = copy.copy(self)
        other.histogram = copy.copy(self.histogram)
        return other

    def widen(self, low: float, high: float) -> None:
        """Widen minimum and maximum by the bounds of values that are otherwise unknown and not counted."""
        self._estimated = None
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)

    def merge(self, other: Calibrator) -> None:
        """Add the statistics of another calibrator of the same kind."""
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self.count += other.count
        if other.histogram is not None:
            self.histogram = self.histogram or Histogram()
            self.histogram.merge(other.histogram)

    @property
    def largest(self) -> float:
        """The largest magnitude observed; 0 before any value."""
        return max(abs(self.minimum), abs(self.maximum)) if self.count else 0.0

    def seen_as(self, name: str, **options: Any) -> Calibrator:
        """Return a calibrator of the registered ``name`` with the statistics of this one.

        The two share a histogram: observe no more data with either.

        Raises:
            CalibrationError: ``name`` needs a histogram, and this calibrator has none.
        """
        other = make_calibrator(name, **options)
        if other.histogram is not None and self.histogram is None:
            raise CalibrationError(f"calibrator {name!r} needs a histogram of the values, and none was kept")
        other.minimum, other.maximum, other.count = self.minimum, self.maximum, self.count
        other.histogram = self.histogram
        return other

    def for_format(self, dtype: str) -> Calibrator:
        """Return a calibrator with the same statistics for another format; itself if its estimate needs no format."""
        return self

    def amax(self) -> float:
        """Return the magnitude that maps to the largest code of the format; cached until there is new data."""
        if self._estimated is None or self._estimated[0] != self.count:
            self._estimated = (self.count, self.estimate())
        return self._estimated[1]

    def estimate(self) -> float:
        """Compute ``amax``."""
        raise NotImplementedError


def make_calibrator(name: str, *, histogram: bool = False, **options: Any) -> Calibrator:
    """Return a new calibrator of the registered ``name``; ``options`` are its own keywords (``percentile=99.99``)."""
    return CALIBRATORS[name](histogram=histogram, **options)


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
