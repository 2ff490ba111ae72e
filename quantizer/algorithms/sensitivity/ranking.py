"""The ranking of groups and layers, as results that show themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantizer.algorithms.fallback import Fallback, fallback_record
from quantizer.algorithms.sensitivity.prices import Prices
from quantizer.errors import SensitivityError
from quantizer.plan.coverage import Coverage
from quantizer.utils.display import Rows, Shown
from quantizer.utils.records import Evaluation, GroupRow, GroupSensitivity, GroupTime, LayerRow, group_rows, layer_rows

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


class PutBack(Rows[GroupRow]):
    """The groups, with the error that each would give back as float, and the time that it would cost."""

    look = "groups"

    def __init__(self, rows: Sequence[GroupRow], measure: str | None) -> None:
        super().__init__(rows)
        self.measure = measure


class Layers(Rows[LayerRow]):
    """One line for each layer that ran: its formats, range, SQNR, sensitivity, share of the work, and times.

    Attributes:
        put_back: what it would give and cost to put each group back; empty if neither is known.
        measure: the measure of the errors; None: none were measured.
        where: where the times were measured; None: they were not.
    """

    look = "layers"

    def __init__(
        self, coverage: Coverage, sensitivity: Sensitivity | None = None, prices: Prices | None = None
    ) -> None:
        self._coverage, self._sensitivity = coverage, sensitivity
        self.measure = None if sensitivity is None else sensitivity.measure
        self.where = None if prices is None else prices.where
        ranking = () if sensitivity is None else sensitivity.rows
        priced = () if prices is None else prices.groups.items()
        times = [GroupTime(group=name, low_us=price.low_us, float_us=price.float_us) for name, price in priced]
        super().__init__(layer_rows(coverage.rows, coverage.escaped.rows, ranking, times))
        self.put_back = PutBack(group_rows(coverage.rows, ranking, times), self.measure)

    def timed(self, prices: Prices) -> Layers:
        """Return the same layers with the times that ``measured_prices`` returned."""
        return Layers(self._coverage, self._sensitivity, prices)

    def below(self) -> list[Shown | str]:
        """Return the table of the groups, if there is one."""
        return [self.put_back] if len(self.put_back) else []
