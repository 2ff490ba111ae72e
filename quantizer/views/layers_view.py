"""The views of layers, one line each, and of groups: what it would give and cost to put them back to float."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantizer.report.record import SensitivityRow
from quantizer.report.run_records import GroupTime, Site, UnquantizedProduct
from quantizer.report.tables.layer_table import (
    FLOAT,
    GroupRow,
    LayerRow,
    group_cells,
    group_rows,
    layer_cells,
    layer_rows,
)
from quantizer.sensitivity.prices import Prices
from quantizer.views.coverage import Coverage
from quantizer.views.sensitivity_view import Sensitivity
from quantizer.views.table_view import View


class PutBack(View[GroupRow]):
    """The groups, with the error that each would give back as float, and the time that it would cost."""

    shortened = True

    def __init__(self, rows: Sequence[GroupRow], measure: str | None) -> None:
        super().__init__(rows)
        self.columns, self._cells = group_cells(self.rows, measure)

    def title(self) -> str:
        return "what if these go back to float, each alone"

    def cells(self) -> list[list[Any]]:
        return self._cells


class Layers(View[LayerRow]):
    """One line for each layer that ran: its formats, range, SQNR, sensitivity, share of the work, and times.

    Attributes:
        put_back: what it would give and cost to put each group back; empty if neither is known.
    """

    shortened = True

    def __init__(
        self, coverage: Coverage, sensitivity: Sensitivity | None = None, prices: Prices | None = None
    ) -> None:
        self._coverage, self._sensitivity = coverage, sensitivity
        self._where = None if prices is None else prices.where
        ranking: Sequence[SensitivityRow] = () if sensitivity is None else sensitivity.rows
        measure = None if sensitivity is None else sensitivity.measure
        times = () if prices is None else [_time(prices, group) for group in prices.groups]
        sites: Sequence[Site] = coverage.rows
        products: Sequence[UnquantizedProduct] = coverage.escaped.rows
        super().__init__(layer_rows(sites, products, ranking, times))
        self.columns, self._cells = layer_cells(self.rows, measure)
        self.put_back = PutBack(group_rows(sites, ranking, times), measure)

    def timed(self, prices: Prices) -> Layers:
        """Return the same layers with the times that ``measured_prices`` returned."""
        return Layers(self._coverage, self._sensitivity, prices)

    def title(self) -> str:
        quantized = sum({row.activations, row.weights} - {FLOAT, None} != set() for row in self.rows)
        times = "" if self._where is None else f"; times: {self._where}"
        return f"{quantized} of {len(self.rows)} layers quantized{times}"

    def cells(self) -> list[list[Any]]:
        return self._cells

    def text(self, limit: int | None = None) -> str:
        """Return the table as plain text, followed by that of the groups, if there is one."""
        return "\n\n".join([super().text(limit), *([self.put_back.text(limit)] if len(self.put_back) else [])])

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (self.put_back._repr_html_() if len(self.put_back) else "")


def _time(prices: Prices, group: str) -> GroupTime:
    price = prices.groups[group]
    return GroupTime(group=group, low_us=price.low_us, float_us=price.float_us)
