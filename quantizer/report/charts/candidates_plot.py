"""A choice of an engine as a picture: how near the outputs are to float, against how fast it is.

Engines in float are 100 dB and more from PyTorch's outputs, those in INT8 15 to 40: above 60 dB all are at the top.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from quantizer.report.candidate_record import Candidate
from quantizer.report.candidate_record import EngineChoice
from quantizer.report.charts.svg import svg_legend
from quantizer.report.charts.svg import svg_note
from quantizer.report.charts.svg import svg_picture
from quantizer.report.charts.svg import svg_text
from quantizer.report.tables import text

__all__ = ["candidates_svg"]

_COLOURS = {"quantized": "#2f7fd6", "float": "#c26a12"}
"""See ``pareto_plot.py``."""
_HEIGHT, _MARGIN, _LEFT, _RIGHT = 200, 24, 8, 94
_TOP_DB = 60.0
_TICKS = (0, 20, 40, 60)
_FLOATS = ("float32", "float16", "bfloat16")


def candidates_svg(choice: EngineChoice) -> str:
    """Return the candidates that ran, numbered, by how fast each is at the last shape and how near to float.

    Returns:
        An ``<svg>`` element as wide as its container; it shows a sentence if none ran.
    """
    ran = [candidate for candidate in choice.candidates if candidate.milliseconds]
    if not ran:
        return svg_note("No engine ran.")
    slowest = max(candidate.milliseconds[-1] for candidate in ran)
    fastest = min(candidate.milliseconds[-1] for candidate in ran)
    legend, top = svg_legend([(_dot("7", 9, colour), name) for name, colour in _COLOURS.items()])
    points = [_point(row, candidate, slowest, slowest / fastest) for row, candidate in enumerate(ran, start=1)]
    ends = ((0.0, 1.0), (1.0, slowest / fastest)) if slowest > fastest else ((0.5, 1.0),)
    ticks = [svg_text(_x(share), _HEIGHT + 4, text.times(speed), "qz-value", "middle") for share, speed in ends]
    inner = [*_grid(), *ticks, *points]
    names = [
        svg_text(0, top + 13, "dB", "qz-value"),
        svg_text("45%", top + _HEIGHT + 26, f"speed at {choice.shapes[-1]}, the slowest is 1", "qz-value", "middle"),
    ]
    frame = f'<svg x="0" y="{top + 10}" width="100%" height="{_HEIGHT}" overflow="visible">{"".join(inner)}</svg>'
    label = f"SQNR of the outputs against speed of {text.counted(len(ran), 'engine')}; {choice.headline}"
    return svg_picture(label, top + _HEIGHT + 36, [*legend, *names, frame])


def _x(share: float) -> str:
    return f"{_LEFT + 2 + (_RIGHT - _LEFT) * share:.2f}%"


def _y(decibels: float | None) -> float:
    share = 1.0 if decibels is None else min(max(decibels, 0.0), _TOP_DB) / _TOP_DB
    return round(_MARGIN + (_HEIGHT - 2 * _MARGIN) * (1 - share), 1)


def _grid() -> Sequence[str]:
    lines = []
    for tick in _TICKS:
        ends = f'x1="{_LEFT}%" x2="100%" y1="{_y(tick)}" y2="{_y(tick)}"'
        lines.append(f'<line {ends} stroke="currentColor" stroke-opacity="0.15"/>')
        shown = f"{tick}+" if tick == _TOP_DB else str(tick)
        lines.append(svg_text(f"{_LEFT - 1.5}%", _y(tick) + 4, shown, "qz-value", "end"))
    return lines


def _point(row: int, candidate: Candidate, slowest: float, most: float) -> str:
    speed = slowest / candidate.milliseconds[-1]
    x, y = _x((speed - 1) / (most - 1) if most > 1 else 0.5), _y(candidate.sqnr_db)
    colour = _COLOURS["float" if candidate.format in _FLOATS else "quantized"]
    ring = f'<circle cx="{x}" cy="{y}" r="9" fill="none" stroke="currentColor" stroke-width="2"/>'
    chosen = candidate.verdict == "chosen"
    title = f"{candidate.name}: {candidate.milliseconds[-1]:.2f} ms, {candidate.verdict}"
    # Numbers of rows: the names of two engines in float, which differ in little but time, would overlap.
    words = svg_text(x, y - 13, str(row), "qz-value", "middle")
    return f"<g><title>{html.escape(title)}</title>{ring if chosen else ''}{_dot(x, y, colour)}{words}</g>"


def _dot(x: str, y: float, colour: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>'
