"""The view of the sensitivity ranking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quantizer.errors import SensitivityError
from quantizer.report.charts.axes import sensitivity_bars
from quantizer.report.charts.heat_map import sensitivity_heatmap
from quantizer.report.record import SensitivityRow
from quantizer.report.search.search_records import fallback_record
from quantizer.report.tables.tables import Column
from quantizer.report.tables.text import compact, error, error_words
from quantizer.sensitivity import Fallback, GroupSensitivity
from quantizer.views.table_view import Picture, Search, View


class Sensitivity(View[SensitivityRow]):
    """The groups, ranked by the error of quantizing one group alone."""

    tight = True

    def __init__(self, rows: Sequence[SensitivityRow], fallback: Fallback | None, measure: str) -> None:
        super().__init__(rows)
        self.measure = measure
        self._fallback = fallback
        self._words = error_words(measure)
        self.columns = (
            "rank",
            Column(title="group", mono=True),
            "kind",
            Column(title=self._words.column, numeric=True, show=error),
            "quantizers",
            Column(title="multiply adds", show=compact),
            "put back",
        )

    @classmethod
    def from_ranking(cls, ranking: Sequence[GroupSensitivity], fallback: Fallback | None, measure: str) -> Sensitivity:
        """Return the view of a ranking by ``measure``, in which the groups of ``fallback`` are marked."""
        back = set(fallback.reasons()) if fallback is not None else set()
        rows = [SensitivityRow(**asdict(entry), fallback=back.issuperset(entry.parts)) for entry in ranking]
        return cls(rows, fallback, measure)

    @property
    def search(self) -> Search:
        """The scores that ``fallback(max_drop=...)`` measured: a table, in a notebook with a picture."""
        if self._fallback is None or not self._fallback.evaluations:
            asked = "nothing was put back" if self._fallback is None else f"fallback({self._fallback.asked}) takes none"
            raise SensitivityError(f"there are no scores of a search: {asked}; fallback(amp, max_drop=...) searches")
        return Search(fallback_record(self._fallback))

    def title(self) -> str:
        return f"{len(self.rows)} groups by the {self._words.phrase}, with one of them quantized"

    def cells(self) -> list[list[Any]]:
        return [
            [
                row.rank,
                row.group,
                row.kind,
                row.error,
                row.activations,
                row.multiply_adds,
                "yes" if row.fallback else "",
            ]
            for row in self.rows
        ]

    def plot(self, limit: int = 30) -> Picture:
        """Return horizontal bars of the ``limit`` groups with the highest errors; ``.save(path)`` writes SVG."""
        return Picture(sensitivity_bars(self.rows, measure=self.measure, limit=limit))

    def heatmap(self) -> Picture:
        """Return a heat map of the errors by block and kind of site; ``.save(path)`` writes SVG."""
        return Picture(sensitivity_heatmap(self.rows, measure=self.measure))

    def pareto(self) -> Picture:
        """Return a plot of all scores of a search, drop against cost; ``.save(path)`` writes SVG."""
        return self.search.plot()
