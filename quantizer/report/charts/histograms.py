"""A histogram as a picture: log counts, a line at each candidate's amax, and below them the candidates' figures."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from quantizer.common.records import Histogram, RangeCandidate
from quantizer.report.charts.axes import BLUE, ORANGE, svg_picture, svg_text
from quantizer.report.text import decibels, percent, significant

_KEPT, _CLIPPED = BLUE, ORANGE
_HEIGHT = 110
_AXIS = 22
_ROW = 25


_FURTHER_DB = 3.0
"""From so much on another range is so much better for the values alone that the page says why it was not taken."""


_BY_OUTPUT = ": the range was chosen for the output of the whole model, which came out better with it"
_BY_CONFIGURATION = ": the configuration asked for this range; preset: balanced chooses by the output of the model"


def histogram_figure(histogram: Histogram, by_output: bool | None = None) -> str:
    """Return a ``<figure>`` with the operand's name, the histogram and its candidates, on one axis of magnitudes."""
    facts = (
        f"{sum(histogram.counts):,} values from {significant(histogram.minimum)} to {significant(histogram.maximum)}, "
        f"judged in {histogram.dtype}; log counts of magnitudes"
    )
    return (
        f'<figure style="margin:0 0 16px"><figcaption><code>{html.escape(histogram.name)}</code>'
        f'<div style="font-size:12px;opacity:.8;margin-bottom:6px">{html.escape(facts)}</div></figcaption>'
        f"{histogram_svg(histogram)}{_beside(histogram, by_output)}</figure>"
    )


def _beside(histogram: Histogram, by_output: bool | None) -> str:
    """Return a sentence if another range is much better for these values than the one that was chosen."""
    chosen = next((entry for entry in histogram.candidates if entry.chosen), None)
    best = max(histogram.candidates, key=lambda entry: entry.sqnr_db, default=None)
    if chosen is None or best is None or best.sqnr_db < chosen.sqnr_db + _FURTHER_DB:
        return ""
    said = f"{best.name} keeps {decibels(best.sqnr_db - chosen.sqnr_db)} dB more of these values alone"
    if by_output is not None:
        said += _BY_OUTPUT if by_output else _BY_CONFIGURATION
    return f'<p style="font-size:12.5px;margin:6px 0 0">{html.escape(said)}.</p>'


def histogram_svg(histogram: Histogram) -> str:
    """Return an ``<svg>`` element as wide as its container."""
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
    kept: list[str] = []
    clipped: list[str] = []
    for place, count in enumerate(histogram.counts):
        height = _HEIGHT * math.log1p(count) / largest
        bar = f"M{place} {_HEIGHT}v{-height:.1f}h1v{height:.1f}z"
        if count:
            # The first bin holds zeros, which no range clips.
            (clipped if place and place * histogram.width >= cut else kept).append(bar)
    return (
        f'<svg width="100%" height="{_HEIGHT}" viewBox="0 0 {len(histogram.counts)} {_HEIGHT}" '
        f'preserveAspectRatio="none"><path fill="{_KEPT}" d="{"".join(kept)}"/>'
        f'<path fill="{_CLIPPED}" d="{"".join(clipped)}"/></svg>'
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
    costs = f"amax {significant(entry.amax)}, clips {percent(entry.clipped)}, {decibels(entry.sqnr_db)} dB"
    weight, fade = (' font-weight="650"', "") if entry.chosen else ("", ' fill-opacity="0.5"')
    width = f"{100 * entry.amax / end:.2f}%"
    yield f"<g{weight}>" + svg_text(0, top + 11, name, "qz-name") + svg_text("100%", top + 11, costs, "qz-value", "end")
    yield f'<rect class="qz-track" x="0" y="{top + 15}" width="100%" height="4" rx="2"/>'
    yield f'<rect x="0" y="{top + 15}" width="{width}" height="4" rx="2" fill="{_KEPT}"{fade}/></g>'
