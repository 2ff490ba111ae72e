"""What the groups cost, to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantizer.report.plots import sensitivity_bars
from quantizer.report.tables import Column
from quantizer.sensitivity import Fallback
from quantizer.sensitivity import GroupError
from quantizer.table_view import View

__all__ = ["BarPlot", "Sensitivity", "SensitivityRow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SensitivityRow:
    """A group's place in the ranking, and whether it was put back to float."""

    rank: int
    group: str
    kind: str
    error: float
    fallback: bool
    sites: tuple[str, ...]
    parts: tuple[str, ...]
    activations: int


class Sensitivity(View[SensitivityRow]):
    """The groups, ranked: what the model's output loses when one alone is quantized."""

    columns = (
        "rank",
        Column(title="group", mono=True),
        "kind",
        Column(title="relative error", show=lambda value: f"{value:.3e}"),
        "put back",
    )

    @classmethod
    def from_ranking(cls, ranking: Sequence[GroupError], fallback: Fallback | None) -> Sensitivity:
        """The groups of a ranking, and which of them are put back."""
        back = set(fallback.groups) if fallback is not None else set()
        return cls(
            [
                SensitivityRow(
                    rank=entry.rank,
                    group=entry.group,
                    kind=entry.kind,
                    error=entry.error,
                    fallback=back.issuperset(entry.parts),
                    sites=entry.sites,
                    parts=entry.parts,
                    activations=entry.activations,
                )
                for entry in ranking
            ]
        )

    def title(self) -> str:
        return f"{len(self.rows)} groups by the relative error of the output with one of them quantized"

    def cells(self) -> list[list[Any]]:
        return [[row.rank, row.group, row.kind, row.error, "yes" if row.fallback else ""] for row in self.rows]

    def plot(self, limit: int = 30) -> BarPlot:
        """Horizontal bars of the worst ``limit`` groups; shows itself in a notebook, ``.save(path)`` writes SVG."""
        return BarPlot(sensitivity_bars(self.rows, limit=limit))


class BarPlot:
    """An SVG picture."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def __repr__(self) -> str:
        return "a picture: a notebook shows it, .save(path) writes it as SVG"

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str) -> None:
        """Write the picture to an ``.svg`` file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)
