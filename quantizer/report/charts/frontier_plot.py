"""Plans between everything in low precision and everything in float: the error that is left, against the time."""

from __future__ import annotations

import html

from quantizer.report import text
from quantizer.report.charts.axes import svg_legend, svg_note, svg_picture, svg_text
from quantizer.report.record import Placement, PlacementPoint

_COLOURS = {"plan": "#2f7fd6", "taken": "#c26a12"}
"""See ``pareto_plot.py``."""
_HEIGHT, _MARGIN, _LEFT, _RIGHT = 200, 14, 17, 88
_NAME = 22
"""Room for the name of the axis, in pixels, above what is drawn."""


def frontier_svg(placement: Placement) -> str:
    """Return the plans that put back one group more each, by predicted time and error, and the one that was taken."""
    points = placement.frontier
    if len(points) < 2:
        return svg_note("No errors of groups were measured: the run has no amp.")
    fast, slow = (pick(point.milliseconds for point in points) for pick in (min, max))
    most = max(point.error for point in points) or 1.0

    def x(milliseconds: float) -> float:
        return _LEFT + 2 + (_RIGHT - _LEFT) * ((milliseconds - fast) / (slow - fast) if slow > fast else 0.5)

    def y(error: float) -> float:
        return _MARGIN + (_HEIGHT - 2 * _MARGIN) * (1 - error / most)

    def mark(point: PlacementPoint, colour: str, radius: int) -> str:
        title = f"{text.counted(point.back, 'group')} in float: {text.milliseconds(point.milliseconds)}"
        dot = f'<circle cx="{x(point.milliseconds):.2f}%" cy="{y(point.error):.1f}" r="{radius}" fill="{colour}"/>'
        return f"<g><title>{html.escape(title)}, error {text.error(point.error)}</title>{dot}</g>"

    # The plan that was taken may lie beside the line: a search decides by the score.
    taken = min(points, key=lambda point: abs(point.milliseconds - placement.predicted_ms))
    legend, top = svg_legend(
        [(f'<circle cx="7" cy="9" r="5" fill="{colour}"/>', name) for name, colour in _COLOURS.items()]
    )
    base = f'<line x1="{_LEFT}%" x2="100%" y1="{y(0):.1f}" y2="{y(0):.1f}" stroke="currentColor" stroke-opacity="0.3"/>'
    inner = [
        base,
        *(mark(point, _COLOURS["plan"], 4) for point in points),
        mark(taken, _COLOURS["taken"], 7),
        svg_text(f"{_LEFT + 2}%", _HEIGHT + 4, text.milliseconds(fast), "qz-value", "middle"),
        svg_text(f"{_RIGHT + 2}%", _HEIGHT + 4, text.milliseconds(slow), "qz-value", "middle"),
        svg_text(f"{_LEFT - 1.5}%", y(0) + 4, "0", "qz-value", "end"),
        svg_text(f"{_LEFT - 1.5}%", y(most) + 4, text.error(most), "qz-value", "end"),
    ]
    names = [
        svg_text(0, top + 13, "error that is left", "qz-value"),
        svg_text("55%", top + _HEIGHT + _NAME + 16, "predicted time", "qz-value", "middle"),
    ]
    frame = f'<svg x="0" y="{top + _NAME}" width="100%" height="{_HEIGHT}" overflow="visible">{"".join(inner)}</svg>'
    label = f"Error against predicted time of {text.counted(len(points), 'plan')}"
    return svg_picture(label, top + _HEIGHT + _NAME + 26, [*legend, *names, frame])
