"""The layers of a model, one row each, and the groups: what it would give and cost to put them back to float."""

from __future__ import annotations

from collections.abc import Sequence

from quantizer.common.layer_rows import GroupRow, LayerRow, group_rows, layer_rows
from quantizer.common.records import GroupTime
from quantizer.common.shown import Rows, Shown
from quantizer.plan.coverage import Coverage
from quantizer.sensitivity.prices import Prices
from quantizer.sensitivity.ranking import Sensitivity


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
