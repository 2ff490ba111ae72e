"""The view of the scores in a search for a fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantizer.report.charts.pareto_plot import pareto_svg
from quantizer.report.record import Evaluation, Fallback
from quantizer.report.tables.search_table import EVALUATION_COLUMNS, evaluation_caption, evaluation_cells
from quantizer.report.tables.tables import Column
from quantizer.views.picture import Picture
from quantizer.views.table_view import View


class Search(View[Evaluation]):
    """The scores of a search, in order; a notebook shows the picture above the table.

    Attributes:
        fallback: the chosen fallback as a record of a report.
    """

    columns: Sequence[Column | str] = EVALUATION_COLUMNS

    def __init__(self, fallback: Fallback) -> None:
        super().__init__(fallback.evaluations)
        self.fallback = fallback

    def title(self) -> str:
        return evaluation_caption(self.fallback)

    def cells(self) -> list[list[Any]]:
        return evaluation_cells(self.fallback)

    def plot(self) -> Picture:
        """Return a plot of drop against cost, with the Pareto front, the budget and the chosen fallback."""
        return Picture(pareto_svg(self.fallback))

    def _repr_html_(self) -> str:
        return f"{self.plot().svg}{super()._repr_html_()}"
