"""The sensitivity ranking as a picture."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Protocol

from quantizer.report.svg import svg_picture
from quantizer.report.svg import svg_text
from quantizer.report.text import percent
from quantizer.report.text import shorten

__all__ = ["BarRow", "sensitivity_bars"]

# Each is at least 3:1 against a white and against a near-black page (WCAG 1.4.11), and they differ for the
# common forms of colour blindness; a wide picture also writes the kind beside each bar.
_COLOURS = {"linear": "#2f7fd6", "matmul": "#c26a12", "residual_add": "#a35bd0", "conv": "#1f8f6a"}
_OTHER = "#7d8590"
_ROW = 31
_LEGEND_ROW = 20


class BarRow(Protocol):
    """What a row must have to be drawn."""

    @property
    def group(self) -> str:
        """Name of the group."""

    @property
    def kind(self) -> str:
        """Kind of its sites."""

    @property
    def error(self) -> float:
        """Relative error of the output."""

    @property
    def fallback(self) -> bool:
        """Whether it was put back to float."""


def sensitivity_bars(rows: Sequence[BarRow], *, limit: int = 30) -> str:
    """Horizontal bars, the largest error first, coloured by kind; a hollow bar was put back to float.

    Args:
        rows: the groups, in any order.
        limit: bars to draw at most.

    Returns:
        One ``<svg>`` element that fills the width it is given; a sentence in it if ``rows`` is empty.
    """
    # A NaN compares with nothing: it goes last, so that the order is the same for every order of the rows.
    ranked = sorted(rows, key=lambda row: (row.error != row.error, -row.error, row.group))[:limit]
    if not ranked:
        return svg_picture(
            "Sensitivity was not measured", 24, [svg_text(0, 16, "Sensitivity was not measured.", "qz-name")]
        )
    kinds = list(dict.fromkeys(row.kind for row in ranked))
    legend, top = _legend(kinds, any(row.fallback for row in ranked))
    finite = [row.error for row in ranked if 0 < row.error < float("inf")]
    largest = max(finite, default=1.0)
    bars = [_bar(row, top + index * _ROW, largest) for index, row in enumerate(ranked)]
    first = ranked[0]
    label = (
        f"Relative error of the output with one group quantized at a time: {len(ranked)} of {len(rows)} groups; "
        f"largest {first.group}, {percent(first.error)}"
    )
    return svg_picture(label, top + len(ranked) * _ROW, [*legend, *bars])


def _bar(row: BarRow, top: float, largest: float) -> str:
    share = min(max(row.error, 0.0) / largest, 1.0) if row.error == row.error else 0.0
    note = f"{row.kind}, float" if row.fallback else row.kind
    short = "float  " if row.fallback else ""
    title = f"{row.group} ({note}): {percent(row.error)}"
    width = f"{max(share * 100, 0.3):.2f}%"
    return (
        f"<g><title>{html.escape(title)}</title>"
        + svg_text(0, top + 11, row.group, "qz-name qz-wide")
        + svg_text(0, top + 11, shorten(row.group, 42), "qz-name qz-narrow")
        + svg_text("100%", top + 11, f"{note}  {percent(row.error)}", "qz-value qz-wide", anchor="end")
        + svg_text("100%", top + 11, f"{short}{percent(row.error)}", "qz-value qz-narrow", anchor="end")
        + f'<rect class="qz-track" x="0" y="{top + 16}" width="100%" height="8" rx="2"/>'
        + f'<rect x="0" y="{top + 16}" width="{width}" height="8" rx="2" {_look(row.kind, row.fallback)}/></g>'
    )


def _look(kind: str, hollow: bool) -> str:
    """Fill of a bar or swatch of ``kind``."""
    colour = _COLOURS.get(kind, _OTHER)
    return f'fill="{colour}"' + (f' fill-opacity="0.15" stroke="{colour}" stroke-width="1.5"' if hollow else "")


def _legend(kinds: Sequence[str], fallback: bool) -> tuple[list[str], int]:
    """Swatches, two in a row, and the height they take."""
    entries = [(kind, _look(kind, False)) for kind in kinds]
    entries += [("put back to float", _look("", True))] if fallback else []
    parts = []
    for index, (name, look) in enumerate(entries):
        x, y = 50 * (index % 2), _LEGEND_ROW * (index // 2)
        parts.append(f'<svg x="{x}%" y="{y}" overflow="visible" width="1" height="1">')
        parts.append(f'<rect x="1" y="3" width="11" height="11" rx="2" {look}/>')
        parts.append(svg_text(19, 13, name, "qz-value") + "</svg>")
    return parts, _LEGEND_ROW * ((len(entries) + 1) // 2) + 12
