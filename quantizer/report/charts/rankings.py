"""The sensitivity ranking as bars and as a heat map.

Bars are coloured by kind; marks beside them show the block of each group. Cells of the heat map have one hue, whose
opacity grows with the logarithm of the summed errors, so that the order is visible with any kind of colour vision. An
opacity of at most 0.8 keeps text readable on light and dark pages.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantizer.report.charts.axes import BLUE, GREEN, GREY, ORANGE, PURPLE, svg_legend, svg_note, svg_picture, svg_text
from quantizer.report.text import MISSING, error, error_words, shorten
from quantizer.utils.records import GroupSensitivity

# Wide charts also write the kind beside each bar.
_COLOURS = {"linear": BLUE, "matmul": ORANGE, "residual_add": PURPLE, "conv": GREEN}
_BAR_ROW = 31
_LANE, _GAP = 9, 2
"""The width of the lane, and of the gap between it and the bars, in percent."""


def sensitivity_bars(rows: Sequence[GroupSensitivity], *, measure: str | None, limit: int = 30) -> str:
    """Return horizontal bars, highest first, coloured by kind; hollow bars are groups in float."""
    # NaN comes last, so that the order of rows does not matter.
    ranked = sorted(rows, key=lambda row: (row.error != row.error, -row.error, row.group))[:limit]
    if not ranked:
        return svg_note("Sensitivity was not measured.")
    words, blocks = error_words(measure), blocks_in_order(rows)
    legend, top = _bar_legend(words.caption, ranked, blocks)
    largest = max((row.error for row in ranked if 0 < row.error < float("inf")), default=1.0)
    height = len(ranked) * _BAR_ROW
    bars = "".join(_bar(row, index * _BAR_ROW, largest) for index, row in enumerate(ranked))
    start = _LANE + _GAP if len(blocks) > 1 else 0
    lane = [_lane(ranked, blocks, top)] if len(blocks) > 1 else []
    label = (
        f"{words.heading} with one group quantized at a time: {len(ranked)} of {len(rows)} "
        f"groups; largest {ranked[0].group}, {error(ranked[0].error)}"
    )
    frame = f'<svg x="{start}%" y="{top}" width="{100 - start}%" height="{height}">{bars}</svg>'
    return svg_picture(label, top + height, [*legend, *lane, frame])


def _bar(row: GroupSensitivity, top: float, largest: float) -> str:
    share = min(max(row.error, 0.0) / largest, 1.0) if row.error == row.error else 0.0
    note = f"{row.kind}, float" if row.fallback else row.kind
    short = "float  " if row.fallback else ""
    width = f"{max(share * 100, 0.3):.2f}%"
    return (
        f"<g><title>{html.escape(_bar_title(row))}</title>"
        + _bar_name(row, top + 11, 64, "qz-name qz-wide")
        + _bar_name(row, top + 11, 34, "qz-name qz-narrow")
        + svg_text("100%", top + 11, f"{note}  {error(row.error)}", "qz-value qz-wide", anchor="end")
        + svg_text("100%", top + 11, f"{short}{error(row.error)}", "qz-value qz-narrow", anchor="end")
        + f'<rect class="qz-track" x="0" y="{top + 16}" width="100%" height="8" rx="2"/>'
        + f'<rect x="0" y="{top + 16}" width="{width}" height="8" rx="2" {_look(row.kind, row.fallback)}/></g>'
    )


def _bar_title(row: GroupSensitivity) -> str:
    return f"{row.group} ({f'{row.kind}, float' if row.fallback else row.kind}): {error(row.error)}"


def _bar_name(row: GroupSensitivity, y: float, length: int, css: str) -> str:
    """Return the group's name with its block in bold; both parts are shortened separately."""
    tail = row.group.removeprefix(row.block)
    if not row.block or tail == row.group:
        return svg_text(0, y, shorten(row.group, length), css)
    block = row.block if len(row.group) <= length else shorten(row.block, length // 2)
    tail = html.escape(shorten(tail, length - len(block)))
    return f'<text class="{css}" x="0" y="{y}"><tspan font-weight="650">{html.escape(block)}</tspan>{tail}</text>'


def _lane(ranked: Sequence[GroupSensitivity], blocks: Sequence[str], top: float) -> str:
    """Return marks whose positions show the block of each group in model order."""
    height, width = len(ranked) * _BAR_ROW, 100 / len(blocks)
    marks = [
        f'<rect x="{blocks.index(row.block) * width:.2f}%" y="{index * _BAR_ROW + 2}" width="{width:.2f}%" height="22" '
        f'fill="{_colour(row.kind)}"><title>{html.escape(f"{row.block}: {_bar_title(row)}")}</title></rect>'
        for index, row in enumerate(ranked)
    ]
    track = f'<rect class="qz-track" width="100%" height="{height}" rx="2"/>'
    return f'<svg x="0" y="{top}" width="{_LANE}%" height="{height}">{track}{"".join(marks)}</svg>'


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, GREY)


def _look(kind: str, hollow: bool) -> str:
    """Return the fill of a bar or swatch of ``kind``."""
    colour = _colour(kind)
    return f'fill="{colour}"' + (f' fill-opacity="0.15" stroke="{colour}" stroke-width="1.5"' if hollow else "")


def _bar_legend(caption: str, ranked: Sequence[GroupSensitivity], blocks: Sequence[str]) -> tuple[list[str], float]:
    entries = [(_swatch(_look(kind, False)), kind) for kind in dict.fromkeys(row.kind for row in ranked)]
    if any(row.fallback for row in ranked):
        entries.append((_swatch(_look("", True)), "kept in float"))
    parts, end = svg_legend(entries, top=22)
    parts.append(svg_text(0, 13, caption, "qz-value"))
    if len(blocks) > 1:
        wide = f"Marks on the left: block, from {shorten(blocks[0], 40)} to {shorten(blocks[-1], 40)}"
        parts.append(svg_text(0, end + 13, wide, "qz-value qz-wide"))
        parts.append(svg_text(0, end + 13, f"Marks on the left: block, of {len(blocks)}", "qz-value qz-narrow"))
        end += 20
    return parts, end + 12


def _swatch(look: str) -> str:
    return f'<rect x="1" y="3" width="11" height="11" rx="2" {look}/>'


def blocks_in_order(rows: Iterable[GroupSensitivity]) -> list[str]:
    """Return each block once, in model order."""
    return list(dict.fromkeys(row.block for row in sorted(rows, key=lambda row: (row.position, row.group))))


_HUE = "#d55e00"
_FAINT, _FULL = 0.06, 0.8
_DECADES = 3
"""Decades of the colour scale; smaller sums have its lowest colour, to keep contrast among the others."""
_STEPS = 5
_KINDS = ("embedding", "conv", "linear", "matmul", "residual_add")
_SEVERAL = "several kinds"
_NAMED = 8
"""The most groups that the tooltip of a cell names."""

# In percent of the width, and in pixels.
_LEFT, _RIGHT = 22, 80
_SHARE_LEFT, _SHARE_RIGHT = 82, 90
_ROW, _HEAD = 26, 58

_Cells = Mapping[tuple[str, str], Sequence[GroupSensitivity]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """The colour scale, which maps sums of errors to opacities."""

    low: float
    high: float

    def strength(self, value: float) -> float:
        if not value > 0:  # NaN, or no worse than float
            return 0.0
        span = math.log(self.high / self.low)
        share = math.log(min(max(value, self.low), self.high) / self.low) / span if span > 0 else 1.0
        return _FAINT + (_FULL - _FAINT) * share

    def steps(self) -> list[float]:
        if self.low == self.high:
            return [self.high]
        return [self.low * (self.high / self.low) ** (step / (_STEPS - 1)) for step in range(_STEPS)]


def sensitivity_heatmap(rows: Sequence[GroupSensitivity], *, measure: str | None) -> str:
    """Return a heat map with a row per block and a column per kind of site.

    Residual adds have a column per operand.
    """
    if not rows:
        return svg_note("Sensitivity was not measured.")
    gathered: dict[tuple[str, str], list[GroupSensitivity]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.position, row.group)):
        gathered[row.block, _column(row)].append(row)
    words, blocks = error_words(measure), blocks_in_order(rows)
    columns = sorted({column for _, column in gathered}, key=_place)
    sums = {place: _sum(members) for place, members in gathered.items()}
    scale, clipped = _scale(list(sums.values()))
    width = (_RIGHT - _LEFT) / len(columns)
    parts = [svg_text(0, 13, words.caption, "qz-value")]
    parts += [_heading(column, _LEFT + width * (at + 0.5), len(columns)) for at, column in enumerate(columns)]
    wide, narrow = _short(blocks, 22), _short(blocks, 11)
    for at, block in enumerate(blocks):
        top = _HEAD + at * _ROW
        parts.append(_label(block, wide[at], narrow[at], top))
        for number, column in enumerate(columns):
            if (block, column) in gathered:
                parts.append(_cell(gathered[block, column], column, _LEFT + width * number, top, width, scale))
    end = _HEAD + len(blocks) * _ROW
    parts += _shares(sums, blocks, columns, width)
    parts += _colour_scale(scale, clipped, end + 30)
    marks, bottom = svg_legend(_marks(gathered), end + 72)
    worst = max(sums, key=lambda place: (sums[place] == sums[place], sums[place]))
    label = (
        f"{words.heading}, summed by {len(blocks)} blocks and {len(columns)} kinds of site; "
        f"largest {worst[0]}, {worst[1]}, {error(sums[worst])}"
    )
    return svg_picture(label, bottom, [*parts, *marks])


def _column(row: GroupSensitivity) -> str:
    """Return the column of a group: its kind, for residual adds with the operand."""
    if "," in row.kind:
        return _SEVERAL
    operand = row.group.removeprefix(f"{row.sites[0]}.") if len(row.sites) == 1 else row.group
    return row.kind if row.kind != "residual_add" or operand == row.group else f"{row.kind} {operand}"


def _place(column: str) -> tuple[int, str]:
    """Return a sort key: known kinds come first, in one order for all models."""
    kind = column.split(" ")[0]
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS), column


def _sum(rows: Sequence[GroupSensitivity]) -> float:
    errors = [row.error for row in rows]
    # fsum does not depend on the order, but raises if there are both inf and -inf.
    return math.fsum(errors) if all(map(math.isfinite, errors)) else sum(errors)


def _scale(sums: Sequence[float]) -> tuple[_Scale, bool]:
    """Return the colour scale of all cells, and whether any sum is below it."""
    positive = [value for value in sums if 0 < value < math.inf]
    high = max(positive, default=1.0)
    least = min(positive, default=1.0)
    low = max(least, high / 10**_DECADES)
    return _Scale(low=low, high=high), least < low


def _heading(column: str, middle: float, columns: int) -> str:
    first, _, second = column.partition(" ")
    parts = []
    # The number of characters that fit at the smallest widths of the two layouts: 700 and 320 pixels.
    for css, length in (("qz-wide", 62 // columns), ("qz-narrow", 26 // columns)):
        short = first if len(first) <= length else f"{first[: max(length - 1, 3)]}."
        parts.append(svg_text(f"{middle:.2f}%", _HEAD - (21 if second else 8), short, f"qz-value {css}", "middle"))
        if second:
            parts.append(svg_text(f"{middle:.2f}%", _HEAD - 8, second, f"qz-value {css}", "middle"))
    return f"<g><title>{html.escape(column)}</title>{''.join(parts)}</g>"


def _short(blocks: Sequence[str], length: int) -> list[str]:
    """Return names of at most ``length`` characters: the last segments, or both ends if these are not unique."""
    tails = [_tail(block, length) for block in blocks]
    return tails if len(set(tails)) == len(blocks) else [shorten(block, length) for block in blocks]


def _tail(block: str, length: int) -> str:
    while len(block) > length and "." in block:
        block = block.partition(".")[2]
    return shorten(block, length)


def _label(block: str, wide: str, narrow: str, top: float) -> str:
    return (
        f"<g><title>{html.escape(block)}</title>{svg_text(0, top + 17, wide, 'qz-name qz-wide')}"
        f"{svg_text(0, top + 17, narrow, 'qz-name qz-narrow')}</g>"
    )


def _cell(rows: Sequence[GroupSensitivity], column: str, left: float, top: float, width: float, scale: _Scale) -> str:
    total, back = _sum(rows), sum(row.fallback for row in rows)
    title = [f"{rows[0].block}, {column}: {error(total)}"]
    if back:
        title[0] += f", {back} of {len(rows)} kept in float"
    title += [f"{row.group}: {error(row.error)}{', float' if row.fallback else ''}" for row in rows[:_NAMED]]
    title += [f"and {len(rows) - _NAMED} more"] if len(rows) > _NAMED else []
    fill = f'fill="{_HUE}" fill-opacity="{scale.strength(total):.3f}"'
    place = f'x="{left + 0.2:.2f}%" y="{top + 1}" width="{width - 0.4:.2f}%" height="{_ROW - 2}" rx="2"'
    middle = f"{left + width / 2:.2f}%"
    return (
        f"<g><title>{html.escape(chr(10).join(title))}</title><rect {place} {fill}{_mark(back, len(rows))}/>"
        f"{svg_text(middle, top + 17, error(total), 'qz-name qz-wide', 'middle')}</g>"
    )


def _mark(back: int, groups: int) -> str:
    """Return the outline of a cell with ``back`` groups in float: solid for all groups, dashed for some."""
    broken = ' stroke-dasharray="4 3"' if back < groups else ""
    return f' stroke="currentColor" stroke-width="2"{broken}' if back else ""


def _marks(cells: _Cells) -> list[tuple[str, str]]:
    """Return the entries of the legend for the outlines in use."""
    back = [(sum(row.fallback for row in rows), len(rows)) for rows in cells.values()]
    square = '<rect x="1" y="3" width="12" height="11" rx="2" fill="none"'
    entries = []
    if any(count == groups for count, groups in back):
        entries.append((f"{square}{_mark(1, 1)}/>", "kept in float"))
    if any(0 < count < groups for count, groups in back):
        entries.append((f"{square}{_mark(1, 2)}/>", "some kept in float"))
    return entries


def _shares(
    sums: Mapping[tuple[str, str], float], blocks: Sequence[str], columns: Sequence[str], width: float
) -> list[str]:
    """Return the share of each block (bars on the right) and of each column (figures below) in all errors."""
    everything = math.fsum(value for value in sums.values() if 0 < value < math.inf)
    if everything == 0:
        return []

    def share(at: int, name: str) -> float | None:
        errors = [value for place, value in sums.items() if place[at] == name]
        if not all(map(math.isfinite, errors)):
            return None
        return math.fsum(value for value in errors if value > 0) / everything

    parts = [svg_text("100%", _HEAD - 8, "share", "qz-value", "end")]
    of_blocks = [share(0, block) for block in blocks]
    largest = max(filter(None, of_blocks), default=1.0)
    for number, value in enumerate(of_blocks):
        top = _HEAD + number * _ROW
        bar = (_SHARE_RIGHT - _SHARE_LEFT) * (value or 0) / largest
        look = f'x="{_SHARE_LEFT}%" y="{top + 8}" height="10" rx="2" fill="currentColor" fill-opacity="0.55"'
        parts.append(f'<rect {look} width="{bar:.2f}%"/>')
        parts.append(svg_text("100%", top + 17, _whole(value), "qz-value", "end"))
    below = _HEAD + len(blocks) * _ROW + 14
    parts.append(svg_text(0, below, "share", "qz-value"))
    for number, column in enumerate(columns):
        middle = f"{_LEFT + width * (number + 0.5):.2f}%"
        parts.append(svg_text(middle, below, _whole(share(1, column)), "qz-value", "middle"))
    return parts


def _whole(share: float | None) -> str:
    """Return a share in whole percent."""
    if share is None:
        return MISSING
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else "<1%"


def _colour_scale(scale: _Scale, clipped: bool, top: float) -> list[str]:
    """Return the legend of the colour scale: swatches with their sums."""
    steps = scale.steps()
    width = (_RIGHT - _LEFT) / _STEPS
    parts = [svg_text(0, top + 11, "log scale", "qz-value")]
    for number, value in enumerate(steps):
        left = _LEFT + width * number
        look = f'fill="{_HUE}" fill-opacity="{scale.strength(value):.3f}"'
        parts.append(f'<rect x="{left:.2f}%" y="{top}" width="{width:.2f}%" height="14" {look}/>')
        words = f"≤ {error(value)}" if clipped and number == 0 else error(value)
        parts.append(svg_text(f"{left + width / 2:.2f}%", top + 28, words, "qz-value qz-wide", "middle"))
        parts.append(svg_text(f"{left + width / 2:.2f}%", top + 28, f"{value:.0e}", "qz-value qz-narrow", "middle"))
    return parts
