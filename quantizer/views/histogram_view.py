"""The histogram of one operand with its candidate ranges: text in a terminal, a picture in a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantizer.report.charts.histogram_plot import histogram_figure, histogram_svg
from quantizer.report.run_records import Histogram, RangeCandidate
from quantizer.report.tables.tables import Column
from quantizer.report.tables.text import decibels, percent, significant
from quantizer.views.table_view import Picture, View

_ROWS = 20
_BAR = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramBin:
    """The number of values with magnitudes from ``low`` to ``high``, and the candidates with an amax in that range."""

    low: float
    high: float
    count: int
    cut_offs: tuple[RangeCandidate, ...]


class HistogramView:
    """The histogram of one operand in calibration, with candidates for its range.

    Attributes:
        data: the histogram as a record of a report.
        bins: about 20 bins, from 0 to the largest magnitude.
        candidates: the candidate ranges, largest first, each with its name, amax, the share of values that it clips and
            the SQNR in dB; ``chosen`` marks the range of the operand.
    """

    def __init__(self, data: Histogram) -> None:
        self.data = data
        self.bins = _bins(data)
        self.candidates = data.candidates

    def plot(self) -> Picture:
        """Return the histogram as a picture for a notebook; ``.save(path)`` writes it as SVG."""
        return Picture(histogram_svg(self.data))

    def __repr__(self) -> str:
        return f"{_Bins(self.bins, self.data).text()}\n\n{_Candidates(self.candidates, self.data).text()}"

    def _repr_html_(self) -> str:
        return histogram_figure(self.data)


class _Bins(View[HistogramBin]):
    columns: Sequence[Column | str] = ("magnitude from", "values", "log counts", "cut-offs")

    def __init__(self, bins: Sequence[HistogramBin], data: Histogram) -> None:
        super().__init__(bins)
        self._data = data

    def title(self) -> str:
        low, high = significant(self._data.minimum), significant(self._data.maximum)
        return f"{self._data.name}: {sum(self._data.counts):,} values from {low} to {high}"

    def cells(self) -> list[list[Any]]:
        largest = math.log1p(max(row.count for row in self.rows))
        return [
            [
                row.low,
                row.count,
                "█" * math.ceil(_BAR * math.log1p(row.count) / largest),
                ", ".join(f"{entry.name} (chosen)" if entry.chosen else entry.name for entry in row.cut_offs),
            ]
            for row in self.rows
        ]


class _Candidates(View[RangeCandidate]):
    columns: Sequence[Column | str] = (
        "candidate",
        "amax",
        Column(title="clipped", show=percent),
        Column(title="SQNR dB", show=decibels),
        "",
    )

    def __init__(self, candidates: Sequence[RangeCandidate], data: Histogram) -> None:
        super().__init__(candidates)
        self._data = data

    def title(self) -> str:
        return f"ranges, judged in {self._data.dtype}"

    def cells(self) -> list[list[Any]]:
        return [
            [entry.name, entry.amax, entry.clipped, entry.sqnr_db, "chosen" if entry.chosen else ""]
            for entry in self.rows
        ]


def _bins(data: Histogram) -> tuple[HistogramBin, ...]:
    together = math.ceil(len(data.counts) / _ROWS)
    width = together * data.width
    starts = range(0, len(data.counts), together)
    # An amax on the border of two bins belongs to the lower one, whose values it does not clip.
    places = [min(max(math.ceil(entry.amax / width) - 1, 0), len(starts) - 1) for entry in data.candidates]
    return tuple(
        HistogramBin(
            low=place * width,
            high=(place + 1) * width,
            count=sum(data.counts[start : start + together]),
            cut_offs=tuple(entry for entry, at in zip(data.candidates, places, strict=True) if at == place),
        )
        for place, start in enumerate(starts)
    )
