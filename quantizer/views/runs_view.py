"""The view of finished runs side by side: text in a terminal, a table in a notebook, and a picture."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from quantizer.report.compare.compared_run import ComparedRun, read_runs
from quantizer.report.compare.comparison import Comparison, Pair, compare
from quantizer.report.compare.tables import comparison_sentence, comparison_svg, in_order, print_comparison, runs_html
from quantizer.report.page.compare_page import write_comparison
from quantizer.report.tables.tables import plain_text
from quantizer.views.table_view import Picture


def compare_runs(runs: Sequence[str | os.PathLike[str]]) -> Runs:
    """Compare finished runs, as ``quantizer compare`` does: scores or outputs, speed, size, and what differs.

    Args:
        runs: folders that ``QuantizedModel.save`` or ``quantizer run`` wrote, or ``report.json`` of them; the folder of
            a sweep is all its finished runs.

    Raises:
        QuantizerError: fewer than two, one twice, or one cannot be read.
    """
    return Runs(compare(read_runs([Path(run) for run in runs])))


class Runs:
    """Finished runs side by side.

    Attributes:
        runs: the runs, the best score first, each with its ``name`` and its ``record``; where there is no score, the
            one whose outputs are nearest to float.
        pairs: all pairs of scored runs, each with ``difference``, its 95% ``interval`` and ``verdict`` in words.
        notes: what cannot be compared, in words.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.runs: tuple[ComparedRun, ...] = tuple(in_order(comparison))
        self.pairs: tuple[Pair, ...] = comparison.pairs
        self.notes = comparison.notes
        self._comparison = comparison

    def plot(self) -> Picture:
        """Return the scores against the speed, with the runs that no other one beats in both joined by a line."""
        return Picture(comparison_svg(self._comparison))

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison as one HTML file that opens offline, and return its path."""
        page = Path(path)
        write_comparison(self._comparison, page, None, page.stem)
        return page

    def __repr__(self) -> str:
        return plain_text(partial(print_comparison, self._comparison, None)).rstrip("\n")

    def _repr_html_(self) -> str:
        lines = [comparison_sentence(self._comparison), *self.notes]
        told = "".join(f"<p>{html.escape(line[:1].upper() + line[1:])}</p>" for line in lines)
        return told + runs_html(self._comparison, {}, style=True)
