"""A training as two pictures over its steps: the loss, and the score with lines for the float model and for PTQ."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from quantizer.report.charts.axes import svg_legend, svg_note, svg_picture, svg_text
from quantizer.report.record import TrainingRun
from quantizer.report.text import counted, plain

# All colours have a contrast of at least 3:1 to white and to near-black pages (WCAG 1.4.11), and differ for the common
# forms of colour blindness.
_LINE, _FLOAT, _PTQ = "#2f7fd6", "#1f8f6a", "#c26a12"
_HEIGHT, _MARGIN, _LEFT, _RIGHT = 180, 12, 14, 98
_POINTS = 200
"""The largest number of points of a curve; a longer one is drawn as means of neighbouring steps."""
_LARGEST = 1e300
"""The largest magnitude that is drawn: the difference of two values must be finite."""


class _Axes:
    """The axes of steps and values."""

    def __init__(self, steps: int, values: Sequence[float]) -> None:
        self._steps = max(steps, 1)
        drawn = [_drawable(value) for value in values]
        low, high = min(drawn), max(drawn)
        room = (high - low) * 0.08 or abs(high) * 0.01 or 1.0
        self.low, self.high = low - room, high + room

    def x(self, step: float) -> str:
        return f"{_LEFT + (_RIGHT - _LEFT) * step / self._steps:.2f}%"

    def y(self, value: float) -> float:
        share = (_drawable(value) - self.low) / (self.high - self.low)
        return round(_MARGIN + (_HEIGHT - 2 * _MARGIN) * (1 - share), 1)

    def grid(self) -> Iterator[str]:
        """Yield lines at round values, with their labels, and the labels of the first and the last step."""
        size = 10.0 ** math.floor(math.log10(self.high - self.low))
        unit = next(size * share for share in (0.1, 0.2, 0.5, 1, 2) if (self.high - self.low) / (size * share) <= 5)
        for number in range(math.ceil(self.low / unit), math.floor(self.high / unit) + 1):
            y = self.y(number * unit)
            yield f'<line x1="{_LEFT}%" x2="100%" y1="{y}" y2="{y}" stroke="currentColor" stroke-opacity="0.12"/>'
            yield svg_text(f"{_LEFT - 1.5}%", y + 4, f"{round(number * unit, 12):g}", "qz-value", "end")
        for step, anchor in ((0, "start"), (self._steps, "end")):
            yield svg_text(self.x(step), _HEIGHT + 6, f"{step:,}", "qz-value", anchor)


def _drawable(value: float) -> float:
    """Return the value, limited so that differences of values are finite; NaN becomes 0."""
    return 0.0 if math.isnan(value) else max(-_LARGEST, min(_LARGEST, value))


def loss_svg(training: TrainingRun) -> str:
    """Return the curve of the loss over the steps."""
    if not training.losses:
        return svg_note("No step was made.")
    stride = math.ceil(len(training.losses) / _POINTS)
    parts = [training.losses[at : at + stride] for at in range(0, len(training.losses), stride)]
    points = [(at * stride + (len(part) + 1) / 2, sum(part) / len(part)) for at, part in enumerate(parts)]
    axes = _Axes(training.planned, [0.0, *(loss for _, loss in points)])
    label = f"Loss over {counted(len(training.losses), 'step')}: from {plain(points[0][1])} to {plain(points[-1][1])}"
    return _picture(label, "loss", [], [*axes.grid(), *_curve(points, axes)])


def score_svg(training: TrainingRun) -> str:
    """Return the scores on the tuning rows, with lines at those of the float model and of PTQ."""
    points = [(float(entry.step), entry.score) for entry in training.scores]
    axes = _Axes(training.planned, [training.float_score, *(score for _, score in points)])
    lines = [("float", training.float_score, _FLOAT, "2 3"), ("PTQ", points[0][1], _PTQ, "7 4")]
    legend = [
        (
            f'<line x1="0" x2="15" y1="9" y2="9" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>',
            f"{name}: {plain(value)}",
        )
        for name, value, colour, dashes in lines
    ]
    levels = [
        f'<line x1="{_LEFT}%" x2="100%" y1="{axes.y(value)}" y2="{axes.y(value)}" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dashes}"/>'
        for _, value, colour, dashes in lines
    ]
    best = next((entry for entry in training.scores if entry.best), None)
    marks = [
        f'<circle cx="{axes.x(entry.step)}" cy="{axes.y(entry.score)}" r="4.5" fill="{_LINE}">'
        f"<title>{html.escape(f'after {entry.step} steps: {plain(entry.score)}')}</title></circle>"
        for entry in training.scores
    ]
    if best is not None:
        legend.append(
            (f'<circle cx="7" cy="9" r="6.5" {_RING}/>', f"kept: {plain(best.score)} after {best.step} steps")
        )
        marks.append(f'<circle cx="{axes.x(best.step)}" cy="{axes.y(best.score)}" r="8.5" {_RING}/>')
    label = (
        f"{training.metric} on the tuning rows over the training: {plain(points[0][1])} before it, "
        f"{plain(points[-1][1])} at its end, {plain(training.float_score)} in float"
    )
    return _picture(label, training.metric, legend, [*axes.grid(), *levels, *_curve(points, axes), *marks])


def training_caption(training: TrainingRun) -> str:
    """Return a summary of the training in a line."""
    made = f"{len(training.losses):,} of {counted(training.planned, 'step')}"
    ended = f", stopped: {training.stopped}" if training.stopped else ""
    best = next((entry for entry in training.scores if entry.best), None)
    kept = "" if best is None else f"; kept is what there was after {counted(best.step, 'step')}"
    return f"{made}{ended}{kept}"


_RING = 'fill="none" stroke="currentColor" stroke-width="2"'


def _curve(points: Sequence[tuple[float, float]], axes: _Axes) -> Iterator[str]:
    for (first, one), (second, two) in pairwise(points):
        ends = f'x1="{axes.x(first)}" y1="{axes.y(one)}" x2="{axes.x(second)}" y2="{axes.y(two)}"'
        yield f'<line {ends} stroke="{_LINE}" stroke-width="2" stroke-linecap="round"/>'


def _picture(label: str, name: str, legend: Sequence[tuple[str, str]], inner: Sequence[str]) -> str:
    parts, top = svg_legend(list(legend))
    end = top + _HEIGHT + 14
    names = [
        svg_text(0, top + 13, name, "qz-value"),
        svg_text(f"{(_LEFT + _RIGHT) / 2}%", end + 12, "steps", "qz-value", "middle"),
    ]
    frame = f'<svg x="0" y="{top + 14}" width="100%" height="{_HEIGHT + 24}" overflow="visible">{"".join(inner)}</svg>'
    return svg_picture(label, end + 22, [*parts, *names, frame])
