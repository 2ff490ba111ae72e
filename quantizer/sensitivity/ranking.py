"""The ranking of groups and the scores of a search, as results that show themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantizer.common.records import Evaluation, GroupSensitivity
from quantizer.common.shown import Rows
from quantizer.errors import SensitivityError
from quantizer.sensitivity.fallback import Fallback, fallback_record

if TYPE_CHECKING:
    from quantizer.report.notebook import Picture


class Search(Rows[Evaluation]):
    """The scores of a search, in order; a notebook shows the picture above the table.

    Attributes:
        fallback: the chosen fallback as a record of a report.
    """

    look = "search"

    def __init__(self, chosen: Fallback) -> None:
        self.fallback = fallback_record(chosen)
        super().__init__(self.fallback.evaluations)

    def plot(self) -> Picture:
        """Return a plot of drop against cost, with the Pareto front, the budget and the chosen fallback."""
        return self._picture("search")


class Sensitivity(Rows[GroupSensitivity]):
    """The groups, ranked by the error of quantizing one group alone; those in float are marked."""

    look = "sensitivity"

    def __init__(self, ranking: Sequence[GroupSensitivity], fallback: Fallback | None, measure: str) -> None:
        back = set(fallback.reasons()) if fallback is not None else set()
        super().__init__([replace(entry, fallback=back.issuperset(entry.parts or (entry.group,))) for entry in ranking])
        self.measure = measure
        self._fallback = fallback

    @property
    def search(self) -> Search:
        """The scores that ``fallback(max_drop=...)`` measured: a table, in a notebook with a picture."""
        if self._fallback is None or not self._fallback.evaluations:
            asked = "nothing was put back" if self._fallback is None else f"fallback({self._fallback.asked}) takes none"
            raise SensitivityError(f"there are no scores of a search: {asked}; fallback(amp, max_drop=...) searches")
        return Search(self._fallback)

    def plot(self, limit: int = 30) -> Picture:
        """Return horizontal bars of the ``limit`` groups with the highest errors; ``.save(path)`` writes SVG."""
        return self._picture("bars", limit=limit)

    def heatmap(self) -> Picture:
        """Return a heat map of the errors by block and kind of site; ``.save(path)`` writes SVG."""
        return self._picture("heatmap")

    def pareto(self) -> Picture:
        """Return a plot of all scores of a search, drop against cost; ``.save(path)`` writes SVG."""
        return self.search.plot()
