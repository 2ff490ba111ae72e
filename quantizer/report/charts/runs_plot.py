"""Several runs as a picture: the score of each against the time of a batch, and the frontier of those not beaten."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quantizer.report import text
from quantizer.report.charts.axes import svg_legend, svg_note, svg_picture, svg_text

_FRONT, _FLOAT = "#2f7fd6", "#c26a12"
"""See ``pareto_plot.py``."""
_HEIGHT, _MARGIN, _LEFT, _WIDTH = 220, 26, 17, 72
_FILLED = f'fill="{_FRONT}"'
_HOLLOW = 'fill="currentColor" fill-opacity="0.08" stroke="currentColor" stroke-opacity="0.7" stroke-width="1.5"'
_DASHED = f'stroke="{_FLOAT}" stroke-width="2" stroke-dasharray="6 4"'


@dataclass(frozen=True, kw_only=True)
class RunPoint:
    """One run in the picture.

    Attributes:
        number: its number in the table beside the picture.
        name: its name.
        milliseconds: the median time of a batch.
        score: its score.
        front: whether no other run beats it in both.
    """

    number: int
    name: str
    milliseconds: float
    score: float
    front: bool


def runs_svg(
    points: Sequence[RunPoint], metric: str, floats: Mapping[str, float], *, higher_is_better: bool = True
) -> str:
    """Return the runs, numbered, by how fast and how good each is; the faster, the further to the right."""
    if not points:
        return svg_note("No run has both a score and a time.")
    slowest, fastest = max(one.milliseconds for one in points), min(one.milliseconds for one in points)
    scores = [*(one.score for one in points), *floats.values()]
    low, high = min(scores), max(scores)

    def x(milliseconds: float) -> str:
        share = (slowest - milliseconds) / (slowest - fastest) if slowest > fastest else 0.5
        return f"{_LEFT + 3 + _WIDTH * share:.2f}%"

    def y(score: float) -> float:
        share = (score - low) / (high - low) if high > low else 0.5
        return round(_MARGIN + (_HEIGHT - 2 * _MARGIN) * (1 - share), 1)

    signs = [(f'<circle cx="7" cy="9" r="4.5" {_FILLED}/>', "on the frontier")]
    signs += [(f'<circle cx="7" cy="9" r="4.5" {_HOLLOW}/>', "beaten in speed and score")]
    signs += [(f'<line x1="0" x2="15" y1="9" y2="9" {_DASHED}/>', "float")] if floats else []
    legend, top = svg_legend(signs)
    inner = [_level(score, y(score), _QUIET) for score in sorted({low, high})]
    inner += [_level(score, y(score), _DASHED) for score in sorted(set(floats.values()))]
    front = sorted((one for one in points if one.front), key=lambda one: -one.milliseconds)
    for one, two in pairwise(front):
        ends = f'x1="{x(one.milliseconds)}" y1="{y(one.score)}" x2="{x(two.milliseconds)}" y2="{y(two.score)}"'
        inner.append(f'<line {ends} stroke="{_FRONT}" stroke-width="2"/>')
    inner += [_dot(one, x(one.milliseconds), y(one.score)) for one in sorted(points, key=lambda one: one.front)]
    for milliseconds in sorted({slowest, fastest}):
        inner.append(svg_text(x(milliseconds), _HEIGHT + 4, text.milliseconds(milliseconds), "qz-value", "middle"))
    names = [
        svg_text(0, top + 13, metric if higher_is_better else f"{metric} (lower is better)", "qz-value"),
        svg_text("55%", top + _HEIGHT + 30, "time of a batch: faster to the right", "qz-value", "middle"),
    ]
    frame = f'<svg x="0" y="{top + 10}" width="100%" height="{_HEIGHT}" overflow="visible">{"".join(inner)}</svg>'
    label = f"{metric} against speed of {text.counted(len(points), 'run')}, {len(front)} of them on the frontier"
    return svg_picture(label, top + _HEIGHT + 38, [*legend, *names, frame])


_QUIET = 'stroke="currentColor" stroke-opacity="0.15"'


def _level(score: float, y: float, look: str) -> str:
    line = f'<line x1="{_LEFT}%" x2="100%" y1="{y}" y2="{y}" {look}/>'
    return line + svg_text(f"{_LEFT - 1.5}%", y + 4, text.score(score), "qz-value", "end")


def _dot(point: RunPoint, x: str, y: float) -> str:
    title = f"{point.name}: {text.score(point.score)}, {text.milliseconds(point.milliseconds)}"
    look = _FILLED if point.front else _HOLLOW
    number = svg_text(x, y - 9, str(point.number), "qz-value", "middle")
    return f'<g><title>{html.escape(title)}</title><circle cx="{x}" cy="{y}" r="5" {look}/>{number}</g>'
