"""A choice of an engine as a picture: how near it is to float, against how fast it is.

How near is the difference in score to the float model where all have one, and otherwise the SQNR of the outputs.
Engines in float are 100 dB and more from PyTorch's outputs, those in INT8 15 to 40: above 60 dB all are at the top.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from quantizer.report import text
from quantizer.report.charts.axes import svg_legend, svg_note, svg_picture, svg_text
from quantizer.report.record import Candidate, EngineChoice

_COLOURS = {"quantized": "#2f7fd6", "float": "#c26a12"}
"""See ``pareto_plot.py``."""
_HEIGHT, _MARGIN, _LEFT, _RIGHT = 200, 24, 17, 92
_NAME = 22
"""Room for the name of the axis, in pixels, above what is drawn."""
_TOP_DB = 60.0
_NEAR, _LETTER = 0.05, 16
"""Points so near in x, a share of the width, and y, in pixels, would have their numbers one over the other."""


def candidates_svg(choice: EngineChoice) -> str:
    """Return the candidates that ran, numbered, by how fast each is over its shapes and how near to float."""
    ran = [candidate for candidate in choice.candidates if candidate.milliseconds]
    if not ran:
        return svg_note("No engine ran.")
    ratios = [candidate.times_of(ran[0]) for candidate in ran]
    slowest, most = max(ratios), max(ratios) / min(ratios)
    axis = _Axis.of(ran)
    legend, top = svg_legend([(_dot("7", 9, colour), name) for name, colour in _COLOURS.items()])
    shares = [(slowest / ratio - 1) / (most - 1) if most > 1 else 0.5 for ratio in ratios]
    heights = [axis.of_candidate(one) for one in ran]
    labels = _labels(list(zip(shares, heights, strict=True)))
    points = [
        _point(label, one, _x(share), height, choice.shapes)
        for label, one, share, height in zip(labels, ran, shares, heights, strict=True)
    ]
    ends = ((0.0, 1.0), (1.0, most)) if most > 1 else ((0.5, 1.0),)
    ticks = [svg_text(_x(share), _HEIGHT + 4, text.times(speed), "qz-value", "middle") for share, speed in ends]
    inner = [*axis.grid(), *ticks, *points]
    where = f"at {choice.shapes[0]}" if len(choice.shapes) == 1 else "in the mean over the shapes"
    names = [
        svg_text(0, top + 13, axis.name, "qz-value"),
        svg_text("55%", top + _HEIGHT + _NAME + 16, f"speed {where}, the slowest is 1", "qz-value", "middle"),
    ]
    frame = f'<svg x="0" y="{top + _NAME}" width="100%" height="{_HEIGHT}" overflow="visible">{"".join(inner)}</svg>'
    label = f"{axis.meaning} against speed of {text.counted(len(ran), 'engine')}; {choice.headline}"
    return svg_picture(label, top + _HEIGHT + _NAME + 26, [*legend, *names, frame])


@dataclass(frozen=True)
class _Axis:
    """An axis of how near an engine is to float, upwards."""

    name: str
    meaning: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    @classmethod
    def of(cls, ran: Sequence[Candidate]) -> _Axis:
        """Return the axis for what is known of all engines that ran."""
        found = [candidate.score_difference for candidate in ran]
        scored = [0.0, *(difference for difference in found if difference is not None)]
        if len(scored) <= len(ran):
            ticks = tuple((float(tick), str(tick)) for tick in (0, 20, 40))
            return cls("dB", "SQNR of the outputs", 0.0, _TOP_DB, (*ticks, (_TOP_DB, f"{_TOP_DB:g}+")))
        low, high = min(scored), max(scored)
        ticks = tuple((value, text.signed(value) if value else "0") for value in sorted({low, 0.0, high}))
        if low == high:
            low, high = -1.0, 1.0
        return cls("score to float", "Score less that of the float model", low, high, ticks)

    def of_candidate(self, candidate: Candidate) -> float:
        """Return the height of an engine; outputs without any difference to float are at the top."""
        if self.name == "dB":
            return self.height(_TOP_DB if candidate.sqnr_db is None else candidate.sqnr_db)
        return self.height(candidate.score_difference or 0.0)

    def height(self, value: float) -> float:
        """Return where a value is, in pixels from the top."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(_MARGIN + (_HEIGHT - 2 * _MARGIN) * (1 - share), 1)

    def grid(self) -> Sequence[str]:
        """Return a line for each tick, with its value."""
        lines = []
        for value, shown in self.ticks:
            y = self.height(value)
            ends = f'x1="{_LEFT}%" x2="100%" y1="{y}" y2="{y}"'
            lines.append(f'<line {ends} stroke="currentColor" stroke-opacity="0.15"/>')
            lines.append(svg_text(f"{_LEFT - 1.5}%", y + 4, shown, "qz-value", "end"))
        return lines


def _x(share: float) -> str:
    return f"{_LEFT + 2 + (_RIGHT - _LEFT) * share:.2f}%"


def _labels(places: Sequence[tuple[float, float]]) -> list[str]:
    """Return the number of each engine by its place; those that lie together have all numbers at the first of them."""
    together: list[list[int]] = []
    for row, (share, height) in enumerate(places):
        near = (
            group
            for group in together
            if abs(share - places[group[0]][0]) < _NEAR and abs(height - places[group[0]][1]) < _LETTER
        )
        found = next(near, None)
        if found is None:
            together.append([row])
        else:
            found.append(row)
    said = {group[0]: ", ".join(str(row + 1) for row in group) for group in together}
    return [said.get(row, "") for row in range(len(places))]


def _point(label: str, candidate: Candidate, x: str, y: float, shapes: Sequence[str]) -> str:
    colour = _COLOURS["float" if candidate.is_float else "quantized"]
    ring = f'<circle cx="{x}" cy="{y}" r="9" fill="none" stroke="currentColor" stroke-width="2"/>'
    chosen = candidate.verdict == "chosen"
    times = candidate.milliseconds
    title = f"{candidate.name}: {times[-1]:.2f} ms at {shapes[len(times) - 1]}, {candidate.verdict}"
    # Numbers of rows: the names of two engines in float, which differ in little but time, would overlap.
    words = svg_text(x, y - 13, label, "qz-value", "middle") if label else ""
    return f"<g><title>{html.escape(title)}</title>{ring if chosen else ''}{_dot(x, y, colour)}{words}</g>"


def _dot(x: str, y: float, colour: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>'
