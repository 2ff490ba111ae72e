"""The frame, legend and axes of SVG charts, and histograms.

Widths are in percent and text is in pixels, so that charts are readable from a phone to a wide notebook. Text has the
colour of the page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quantizer.report.text import decibels, percent, significant
from quantizer.utils.records import Histogram, RangeCandidate

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2f7fd6", "#c26a12", "#1f8f6a", "#a35bd0", "#7d8590"
"""Each has a contrast of at least 3:1 to white and to near-black pages (WCAG 1.4.11), and the first four differ for the
common forms of colour blindness."""
FILLED = f'fill="{BLUE}"'
HOLLOW = 'fill="currentColor" fill-opacity="0.08" stroke="currentColor" stroke-opacity="0.7" stroke-width="1.5"'
RING = 'fill="none" stroke="currentColor" stroke-width="2"'

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
_LEGEND_ROW = 20


def svg_text(x: float | str, y: float, content: str, css: str, anchor: str = "start") -> str:
    """Return a line of text; ``css`` is ``qz-name`` or ``qz-value``, optionally with ``qz-wide`` or ``qz-narrow``."""
    return f'<text class="{css}" x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(content)}</text>'


def svg_legend(entries: Sequence[tuple[str, str]], top: float = 0) -> tuple[list[str], float]:
    """Return a legend with two entries per row, and its bottom."""
    parts = []
    for index, (sign, meaning) in enumerate(entries):
        x, y = 50 * (index % 2), top + _LEGEND_ROW * (index // 2)
        parts.append(f'<svg x="{x}%" y="{y}" overflow="visible" width="1" height="1">{sign}')
        parts.append(svg_text(19, 13, meaning, "qz-value") + "</svg>")
    return parts, top + _LEGEND_ROW * ((len(entries) + 1) // 2)


def svg_note(sentence: str) -> str:
    """Return a chart with a sentence only, if there is nothing to draw."""
    return svg_picture(sentence, 24, [svg_text(0, 16, sentence, "qz-name")])


def svg_picture(label: str, height: float, parts: Sequence[str]) -> str:
    """Return an ``<svg>`` element as wide as its container; ``label`` is for screen readers."""
    style = (
        f".qz-bars{{display:block;width:100%;max-width:1100px;font-family:{_FONT}}}"
        ".qz-bars text{fill:currentColor;font-size:12px}"
        ".qz-bars .qz-value{font-size:11.5px;opacity:.85;font-variant-numeric:tabular-nums}"
        ".qz-bars .qz-track{fill:currentColor;opacity:.07}"
        ".qz-bars .qz-narrow{display:none}"
        "@media(max-width:700px){.qz-bars .qz-wide{display:none}.qz-bars .qz-narrow{display:inline}"
        ".qz-bars text,.qz-bars .qz-value{font-size:11px}}"
    )
    return (
        f'<svg class="qz-bars" role="img" aria-label="{html.escape(label)}" width="100%" height="{height}" '
        f'xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{"".join(parts)}</svg>'
    )


def svg_title(title: str, *parts: str) -> str:
    """Return parts of a chart with a common tooltip."""
    return f"<g><title>{html.escape(title)}</title>{''.join(parts)}</g>"


def svg_dot(x: str, y: float, radius: float, look: str) -> str:
    """Return a dot."""
    return f'<circle cx="{x}" cy="{y}" r="{radius:g}" {look}/>'


def dot_sign(look: str, radius: float = 4.5) -> str:
    """Return the dot of a legend."""
    return svg_dot("7", 9, radius, look)


def line_sign(look: str) -> str:
    """Return the line of a legend."""
    return f'<line x1="0" x2="15" y1="9" y2="9" {look}/>'


def line_look(colour: str, dashes: str = "") -> str:
    """Return the look of a line, optionally dashed."""
    return f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def quiet_look(opacity: float) -> str:
    """Return the look of a grid line."""
    return f'stroke="currentColor" stroke-opacity="{opacity:g}"'


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes of a plot: horizontal values in percent of the width, vertical values in pixels."""

    across: tuple[float, float]
    """Values at the left and at the right; if equal, all values are in the middle."""
    up: tuple[float, float]
    """Values at the bottom and at the top, after ``scale``."""
    ends: tuple[float, float]
    """Positions of the values at the left and at the right, in percent."""
    height: int
    """Height in pixels."""
    margin: int
    """Pixels above the top value and below the bottom value."""
    left: float = 17
    """Start of the grid lines, in percent."""
    gap: int = 10
    """Pixels between the legend and the plot, for the name of the vertical axis."""
    name_at: int = 20
    """Pixels from the plot to the name of the horizontal axis."""
    below: int = 28
    """Pixels from the plot to the bottom of the chart."""
    scale: Callable[[float], float] = float
    """Function applied to vertical values."""

    def x(self, value: float) -> str:
        """Return the position of a horizontal value in percent."""
        low, high = self.across
        share = (value - low) / (high - low) if high != low else 0.5
        return f"{self.ends[0] + (self.ends[1] - self.ends[0]) * share:.2f}%"

    def y(self, value: float) -> float:
        """Return the position of a vertical value in pixels from the top."""
        low, high = self.up
        share = (self.scale(value) - low) / (high - low) if high != low else 0.5
        return round(self.margin + (self.height - 2 * self.margin) * (1 - share), 1)

    def level(self, value: float, shown: str, look: str) -> str:
        """Return a horizontal line at a value, with its label unless empty."""
        y = self.y(value)
        line = f'<line x1="{self.left}%" x2="100%" y1="{y}" y2="{y}" {look}/>'
        return line + (svg_text(f"{self.left - 1.5}%", y + 4, shown, "qz-value", "end") if shown else "")

    def tick(self, value: float, shown: str, anchor: str = "middle", lower: int = 4) -> str:
        """Return the label of a horizontal value."""
        return svg_text(self.x(value), self.height + lower, shown, "qz-value", anchor)

    def path(self, points: Sequence[tuple[float, float]], more: str = "") -> list[str]:
        """Return lines between points."""
        places = [(self.x(value), self.y(other)) for value, other in points]
        return [
            f'<line x1="{x}" y1="{y}" x2="{to}" y2="{end}" {line_look(BLUE)}{more}/>'
            for (x, y), (to, end) in pairwise(places)
        ]

    def picture(
        self,
        label: str,
        legend: Iterable[tuple[str, str]],
        names: tuple[str, str],
        inner: Iterable[str],
        middle: str = "55%",
        more: int = 0,
    ) -> str:
        """Return the chart with the names of both axes; ``more`` pixels are added below the plot for labels."""
        signs, top = svg_legend(list(legend))
        end = top + self.gap + self.height
        return svg_picture(
            label,
            end + self.below,
            [
                *signs,
                svg_text(0, top + 13, names[0], "qz-value"),
                svg_text(middle, end + self.name_at, names[1], "qz-value", "middle"),
                f'<svg x="0" y="{top + self.gap}" width="100%" height="{self.height + more}" overflow="visible">'
                f"{''.join(inner)}</svg>",
            ],
        )


_KEPT, _CLIPPED = BLUE, ORANGE
_HEIGHT = 110
_AXIS = 22
_ROW = 25


_FURTHER_DB = 3.0
"""The page explains a choice if another range has an SQNR that is higher by this many dB."""


_BY_OUTPUT = ": the chosen range gave a better output of the whole model"
_BY_CONFIGURATION = ": the configuration sets this range; preset: balanced chooses ranges by the output of the model"


def histogram_figure(histogram: Histogram, by_output: bool | None = None) -> str:
    """Return a ``<figure>`` with the operand's name, the histogram and its candidate ranges."""
    facts = (
        f"{sum(histogram.counts):,} values from {significant(histogram.minimum)} to {significant(histogram.maximum)}, "
        f"format {histogram.dtype}; logarithmic counts of magnitudes"
    )
    return (
        f'<figure style="margin:0 0 16px"><figcaption><code>{html.escape(histogram.name)}</code>'
        f'<div style="font-size:12px;opacity:.8;margin-bottom:6px">{html.escape(facts)}</div></figcaption>'
        f"{histogram_svg(histogram)}{_beside(histogram, by_output)}</figure>"
    )


def _beside(histogram: Histogram, by_output: bool | None) -> str:
    """Return a sentence if another range has a much higher SQNR for these values; empty otherwise."""
    chosen = next((entry for entry in histogram.candidates if entry.chosen), None)
    best = max(histogram.candidates, key=lambda entry: entry.sqnr_db, default=None)
    if chosen is None or best is None or best.sqnr_db < chosen.sqnr_db + _FURTHER_DB:
        return ""
    sentence = f"{best.name} has an SQNR of these values that is {decibels(best.sqnr_db - chosen.sqnr_db)} dB higher"
    if by_output is not None:
        sentence += _BY_OUTPUT if by_output else _BY_CONFIGURATION
    return f'<p style="font-size:12.5px;margin:6px 0 0">{html.escape(sentence)}.</p>'


def histogram_svg(histogram: Histogram) -> str:
    """Return the histogram and its candidate ranges as an ``<svg>`` element."""
    end = histogram.width * len(histogram.counts)
    cut = next((entry.amax for entry in histogram.candidates if entry.chosen), end)
    lines = [_line(entry, end) for entry in histogram.candidates]
    top = _HEIGHT + _AXIS
    rows = [part for row, entry in enumerate(histogram.candidates) for part in _row(entry, top + row * _ROW, end)]
    label = f"Histogram of {histogram.name} with {len(histogram.candidates)} candidates for its range"
    height = top + len(histogram.candidates) * _ROW
    return svg_picture(label, height, [_bars(histogram, cut), *lines, *_axis(end), *rows])


def _bars(histogram: Histogram, cut: float) -> str:
    """Return one path for the bars within the range and one for those beyond it, in units of bins."""
    largest = math.log1p(max(histogram.counts))
    within: list[str] = []
    beyond: list[str] = []
    for place, count in enumerate(histogram.counts):
        height = _HEIGHT * math.log1p(count) / largest
        bar = f"M{place} {_HEIGHT}v{-height:.1f}h1v{height:.1f}z"
        if count:
            # No range clips zeros, which are in the first bin.
            (beyond if place and place * histogram.width >= cut else within).append(bar)
    return (
        f'<svg width="100%" height="{_HEIGHT}" viewBox="0 0 {len(histogram.counts)} {_HEIGHT}" '
        f'preserveAspectRatio="none"><path fill="{_KEPT}" d="{"".join(within)}"/>'
        f'<path fill="{_CLIPPED}" d="{"".join(beyond)}"/></svg>'
    )


def _line(entry: RangeCandidate, end: float) -> str:
    look = 'stroke-width="2"' if entry.chosen else 'stroke-opacity="0.45" stroke-dasharray="3 3"'
    x = f"{100 * entry.amax / end:.2f}%"
    return f'<line x1="{x}" x2="{x}" y1="0" y2="{_HEIGHT}" stroke="currentColor" {look}/>'


def _axis(end: float) -> Iterator[str]:
    yield f'<line x1="0" x2="100%" y1="{_HEIGHT}" y2="{_HEIGHT}" stroke="currentColor" stroke-opacity="0.4"/>'
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        yield svg_text(f"{100 * share:g}%", _HEIGHT + 14, significant(end * share, 3), "qz-value", anchor)


def _row(entry: RangeCandidate, top: float, end: float) -> Iterator[str]:
    name = f"{entry.name}, chosen" if entry.chosen else entry.name
    costs = f"amax {significant(entry.amax)}, clips {percent(entry.clipped)}, SQNR {decibels(entry.sqnr_db)} dB"
    weight, fade = (' font-weight="650"', "") if entry.chosen else ("", ' fill-opacity="0.5"')
    width = f"{100 * entry.amax / end:.2f}%"
    yield f"<g{weight}>" + svg_text(0, top + 11, name, "qz-name") + svg_text("100%", top + 11, costs, "qz-value", "end")
    yield f'<rect class="qz-track" x="0" y="{top + 15}" width="100%" height="4" rx="2"/>'
    yield f'<rect x="0" y="{top + 15}" width="{width}" height="4" rx="2" fill="{_KEPT}"{fade}/></g>'
