"""A search for a fallback as a picture: the drop of the metric against the cost of the groups in float.

Drops may be negative, and span decades around a small budget. The axis is therefore asinh(drop / budget), which is
about linear up to the budget and about logarithmic beyond.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from quantizer.common.records import Evaluation, FallbackRecord
from quantizer.report.charts.axes import svg_legend, svg_note, svg_picture, svg_text
from quantizer.report.text import amount, counted, error, significant

# Both colours have a contrast of at least 3:1 to white and to near-black pages (WCAG 1.4.11), and differ for the common
# forms of colour blindness.
_FRONT, _BUDGET = "#2f7fd6", "#c26a12"
_HEIGHT, _MARGIN = 220, 14
_LEFT, _RIGHT = 17, 97
_LABEL = 15
"""The smallest distance in pixels between two labels of the axis."""


class _Axes:
    """The axes of costs and drops."""

    def __init__(self, points: Sequence[Evaluation], budget: float) -> None:
        sizes = [abs(point.drop) for point in points if point.drop]
        self._unit = budget if budget > 0 else min(sizes, default=1.0)
        heights = [math.asinh(drop / self._unit) for drop in (0.0, budget, *(point.drop for point in points))]
        self._low, self._high = min(heights), max(max(heights), min(heights) + 1)
        self.cost = max((point.cost for point in points), default=0.0) or 1.0

    def x(self, cost: float) -> str:
        return f"{_LEFT + (_RIGHT - _LEFT) * cost / self.cost:.2f}%"

    def y(self, drop: float) -> float:
        share = (math.asinh(drop / self._unit) - self._low) / (self._high - self._low)
        return round(_MARGIN + (_HEIGHT - 2 * _MARGIN) * (1 - share), 1)

    def ticks(self, budget: float) -> list[float]:
        """Return the drops to label: the budget, 0, and the powers of ten for which there is room."""
        found: list[float] = []
        sizes = [10.0**power for power in range(-9, 10)]
        for drop in (budget, 0.0, *reversed(sizes), *(-size for size in reversed(sizes))):
            # Within the picture, and not over another label.
            if self._low <= math.asinh(drop / self._unit) <= self._high and all(
                abs(self.y(drop) - self.y(other)) >= _LABEL for other in found
            ):
                found.append(drop)
        return found


def pareto_svg(fallback: FallbackRecord) -> str:
    """Return all scores of a search, the Pareto front as a line, the budget, and the chosen fallback."""
    points = [point for point in fallback.evaluations if math.isfinite(point.drop) and math.isfinite(point.cost)]
    if not points:
        return svg_note("No search was made.")
    budget = fallback.max_drop if fallback.max_drop is not None else 0.0
    axes = _Axes(points, budget)
    legend, top = svg_legend(list(_legend(fallback)))
    # The chosen point comes last, so that no other point covers it.
    drawn = sorted(points, key=lambda point: (point.chosen, point.front))
    inner = [*_grid(axes, budget), *_line(points, axes), *(_point(point, axes) for point in drawn)]
    end = top + _HEIGHT + 10
    names = [
        svg_text(0, top + 13, "drop", "qz-value"),
        svg_text(f"{(_LEFT + _RIGHT) / 2}%", end + 20, "cost of what is put back to float", "qz-value", "middle"),
    ]
    frame = f'<svg x="0" y="{top + 10}" width="100%" height="{_HEIGHT + 24}" overflow="visible">{"".join(inner)}</svg>'
    label = (
        f"Drop of the metric against the cost of what is put back: {counted(len(points), 'evaluation')}, "
        f"{sum(point.front for point in points)} of them on the front; the budget is a drop of {error(budget)}"
    )
    return svg_picture(label, end + 28, [*legend, *names, frame])


def _grid(axes: _Axes, budget: float) -> Iterator[str]:
    for drop in axes.ticks(budget):
        y = axes.y(drop)
        look = f'stroke="{_BUDGET}" stroke-width="2" stroke-dasharray="6 4"'
        if drop != budget:
            look = f'stroke="currentColor" stroke-opacity="{0.4 if drop == 0 else 0.12}"'
        yield f'<line x1="{_LEFT}%" x2="100%" y1="{y}" y2="{y}" {look}/>'
        yield svg_text(f"{_LEFT - 1.5}%", y + 4, error(drop), "qz-value", "end")
    for cost in _round_costs(axes.cost):
        yield svg_text(axes.x(cost), _HEIGHT + 4, amount(cost), "qz-value", "middle")


def _round_costs(largest: float) -> list[float]:
    """Return 0 and up to five round numbers, none above the largest cost."""
    size = 10.0 ** math.floor(math.log10(largest))
    step = next(size * share for share in (0.2, 0.5, 1, 2) if largest / (size * share) <= 5)
    return [step * number for number in range(math.floor(largest / step) + 1)]


def _line(points: Sequence[Evaluation], axes: _Axes) -> Iterator[str]:
    front = sorted((point for point in points if point.front), key=lambda point: (point.cost, point.drop))
    for one, two in pairwise(front):
        ends = f'x1="{axes.x(one.cost)}" y1="{axes.y(one.drop)}" x2="{axes.x(two.cost)}" y2="{axes.y(two.drop)}"'
        yield f'<line {ends} stroke="{_FRONT}" stroke-width="2"/>'


def _point(point: Evaluation, axes: _Axes) -> str:
    words = ["on the front"] if point.front else []
    words += ["chosen"] if point.chosen else []
    title = (
        f"{counted(len(point.groups), 'group')} put back, cost {amount(point.cost)}: score {significant(point.score)}, "
        f"drop {error(point.drop)}{''.join(f', {word}' for word in words)}"
    )
    place = f'cx="{axes.x(point.cost)}" cy="{axes.y(point.drop)}"'
    ring = f'<circle {place} r="8.5" {_RING}/>' if point.chosen else ""
    look = _FILLED if point.front else _HOLLOW
    return f'<g><title>{html.escape(title)}</title>{ring}<circle {place} r="4.5" {look}/></g>'


_RING = 'fill="none" stroke="currentColor" stroke-width="2"'
_FILLED = f'fill="{_FRONT}"'
_HOLLOW = 'fill="currentColor" fill-opacity="0.08" stroke="currentColor" stroke-opacity="0.7" stroke-width="1.5"'


def _legend(fallback: FallbackRecord) -> Iterator[tuple[str, str]]:
    yield f'<circle cx="7" cy="9" r="4.5" {_FILLED}/>', "on the front"
    yield f'<circle cx="7" cy="9" r="4.5" {_HOLLOW}/>', "another evaluation"
    if fallback.max_drop is not None:
        line = f'stroke="{_BUDGET}" stroke-width="2" stroke-dasharray="6 4"'
        yield f'<line x1="0" x2="15" y1="9" y2="9" {line}/>', f"budget: drop {error(fallback.max_drop)}"
    if any(point.chosen for point in fallback.evaluations):
        yield f'<circle cx="7" cy="9" r="6.5" {_RING}/>', "chosen"
