"""Histograms of operands in calibration, with candidate ranges."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from quantizer.errors import QuantizerError
from quantizer.numerics.formats import QType, qtype
from quantizer.observe.calibrators import Calibrator, estimates
from quantizer.observe.calibrators import Histogram as Counts
from quantizer.observe.statistics import Seen
from quantizer.plan.decide_operands import judged_as
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.utils.display import Rows, Shown
from quantizer.utils.records import Histogram, RangeCandidate

if TYPE_CHECKING:
    from quantizer.report.notebook import Picture

_SHOWN_BINS = 20
_BINS = 128
"""The largest number of bins in a record: enough for a picture, and few enough for a report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramBin:
    """The number of values with magnitudes from ``low`` to ``high``, and the candidates whose amax is in it."""

    low: float
    high: float
    count: int
    cut_offs: tuple[RangeCandidate, ...]


class RangeCandidates(Rows[RangeCandidate]):
    """The candidate ranges of an operand, evaluated in the format ``dtype``."""

    look = "candidates"

    def __init__(self, rows: Sequence[RangeCandidate], dtype: str) -> None:
        super().__init__(rows)
        self.dtype = dtype


class OperandHistogram(Rows[HistogramBin]):
    """The histogram of one operand in calibration, about 20 bins from 0 on, with candidate ranges.

    Attributes:
        data: the histogram as a record of a report.
        bins: the bins, equal to ``rows``.
        candidates: the candidate ranges, largest first, each with its name, amax, share of clipped values (0 to 1) and
            SQNR in dB; ``chosen`` marks the range of the operand.
    """

    look = "histogram"

    def __init__(self, data: Histogram) -> None:
        super().__init__(_bins(data))
        self.data, self.bins, self.candidates = data, self.rows, data.candidates

    def plot(self) -> Picture:
        """Return the histogram as a picture for a notebook; ``.save(path)`` writes it as SVG."""
        return self._picture("histogram")

    def below(self) -> list[Shown | str]:
        """Return the table of candidates."""
        return [RangeCandidates(self.candidates, self.data.dtype)]


def _bins(data: Histogram) -> tuple[HistogramBin, ...]:
    merged = math.ceil(len(data.counts) / _SHOWN_BINS)
    width = merged * data.width
    starts = range(0, len(data.counts), merged)
    # An amax on the border of two bins belongs to the lower one, whose values it does not clip.
    places = [min(max(math.ceil(entry.amax / width) - 1, 0), len(starts) - 1) for entry in data.candidates]
    return tuple(
        HistogramBin(
            low=place * width,
            high=(place + 1) * width,
            count=sum(data.counts[start : start + merged]),
            cut_offs=tuple(entry for entry, at in zip(data.candidates, places, strict=True) if at == place),
        )
        for place, start in enumerate(starts)
    )


def histogram_of(name: str, plan: Plan, observation: Seen | None) -> Histogram:
    """Return the histogram of an operand, with its candidate ranges.

    Raises:
        QuantizerError: the name is unknown, or calibration kept no histogram of the operand.
    """
    operands = {f"{path}.{operand.name}": (path, operand) for path, site in plan.items() for operand in site.operands}
    if name not in operands:
        near = difflib.get_close_matches(name, operands, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise QuantizerError(f"unknown operand {name!r}; {hint}print(q.ranges) lists all operands, as SITE.OPERAND")
    path, operand = operands[name]
    if operand.role == "weight":
        raise QuantizerError(f"no histogram of {name}: it is a weight, and only activations have histograms")
    if observation is None:
        raise QuantizerError(
            f"no histogram of {name}: this quantizer was loaded; calib(model, resume=True) restores the statistics"
        )
    observed = observation.records[path].operands.get(operand.name)
    if observed is None or observed.range is None:
        raise QuantizerError(f"no histogram of {name}: it was not observed: {operand.reason}")
    calibrator = observed.range.calibrator
    if calibrator.histogram is None:
        raise QuantizerError(
            f"no histogram of {name}: {type(calibrator).__name__} does not collect one; calibrate with percentile, "
            "mse, entropy or auto"
        )
    return _record(name, operand, calibrator, calibrator.histogram)


def noisiest(plan: Plan, number: int) -> list[str]:
    """Return the quantized activations with the lowest SQNR, lowest first, one for each shared range."""
    lowest: dict[str | None, tuple[float, str]] = {}
    for path, site in plan.items():
        for operand in site.operands:
            if operand.quantized and operand.role == "activation" and operand.sqnr_db is not None:
                lowest.setdefault(operand.range_group, (operand.sqnr_db, f"{path}.{operand.name}"))
    return [name for _, name in sorted(lowest.values())[:number]]


def _record(name: str, operand: OperandPlan, calibrator: Calibrator, histogram: Counts) -> Histogram:
    dtype = judged_as(qtype(operand.dtype))
    width, counts = _few_bins(histogram)
    return Histogram(
        name=name,
        dtype=dtype.name,
        minimum=calibrator.minimum,
        maximum=calibrator.maximum,
        width=width,
        counts=tuple(counts.tolist()),
        candidates=_candidates(operand, calibrator, histogram, dtype),
    )


def _candidates(
    operand: OperandPlan, calibrator: Calibrator, histogram: Counts, dtype: QType
) -> tuple[RangeCandidate, ...]:
    amax_of_plan = operand.largest_amax
    ranges = list(estimates(calibrator, dtype))
    # The amax of the plan is rounded to float32.
    if amax_of_plan is not None and not any(math.isclose(amax, amax_of_plan, rel_tol=1e-6) for _, amax in ranges):
        ranges.append((operand.estimate or "chosen", amax_of_plan))
    return tuple(
        RangeCandidate(
            name=name,
            amax=amax,
            clipped=histogram.share_above(amax),
            sqnr_db=histogram.sqnr_db(amax / dtype.qmax, dtype.name),
            chosen=amax_of_plan is not None and math.isclose(amax, amax_of_plan, rel_tol=1e-6),
        )
        for name, amax in sorted(ranges, key=lambda entry: -entry[1])
    )


def _few_bins(histogram: Counts) -> tuple[float, Tensor]:
    """Return the width and counts of at most ``_BINS`` bins up to the last non-empty one; zeros are in the first."""
    counts = histogram.counts.clone()
    counts[0] += histogram.total - counts.sum()
    used = int(counts.nonzero().max()) + 1
    merged = 1
    while used > _BINS * merged:
        merged *= 2
    # If all values are zero there is no exponent, and any width will do.
    width = 2.0 ** (histogram.exponent or 0) * merged
    return width, counts.reshape(-1, merged).sum(1)[: math.ceil(used / merged)]
