"""Charts in SVG: axes, colours, and plots of points and lines on them.

The frame, the text and the legend of a picture.

The package writes its own SVG instead of using a plotting library: bars are in percent of the width and text is in
pixels, so that pictures are readable from a phone to a wide notebook, and text has the colour of the page.

The sensitivity ranking as bars, coloured by kind, with a lane beside them that shows the block of each group.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from quantizer.common.records import GroupSensitivity
from quantizer.report.text import error, error_words, shorten

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
_LEGEND_ROW = 20


def svg_text(x: float | str, y: float, content: str, css: str, anchor: str = "start") -> str:
    """Return a line of text; ``css`` is ``qz-name`` or ``qz-value``, optionally with ``qz-wide`` or ``qz-narrow``."""
    return f'<text class="{css}" x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(content)}</text>'


def svg_legend(entries: Sequence[tuple[str, str]], top: float = 0) -> tuple[list[str], float]:
    """Return a legend with two entries in a row."""
    parts = []
    for index, (sign, meaning) in enumerate(entries):
        x, y = 50 * (index % 2), top + _LEGEND_ROW * (index // 2)
        parts.append(f'<svg x="{x}%" y="{y}" overflow="visible" width="1" height="1">{sign}')
        parts.append(svg_text(19, 13, meaning, "qz-value") + "</svg>")
    return parts, top + _LEGEND_ROW * ((len(entries) + 1) // 2)


def svg_note(sentence: str) -> str:
    """Return a picture that shows only a sentence, for when there is nothing to draw."""
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


# Each has a contrast of at least 3:1 to white and to near-black pages (WCAG 1.4.11), and they differ for the common
# forms of colour blindness; a wide picture also writes the kind beside each bar.
_COLOURS = {"linear": "#2f7fd6", "matmul": "#c26a12", "residual_add": "#a35bd0", "conv": "#1f8f6a"}
_OTHER = "#7d8590"
_ROW = 31
_LANE, _GAP = 9, 2
"""The width of the lane, and of the gap between it and the bars, in percent."""


def sensitivity_bars(rows: Sequence[GroupSensitivity], *, measure: str | None, limit: int = 30) -> str:
    """Return horizontal bars, highest first, coloured by kind; a hollow bar is a group that fell back to float."""
    # NaN has no order: it comes last, so that the result does not depend on the order of the rows.
    ranked = sorted(rows, key=lambda row: (row.error != row.error, -row.error, row.group))[:limit]
    if not ranked:
        return svg_note("Sensitivity was not measured.")
    words, blocks = error_words(measure), blocks_in_order(rows)
    legend, top = _legend(words.caption, ranked, blocks)
    largest = max((row.error for row in ranked if 0 < row.error < float("inf")), default=1.0)
    height = len(ranked) * _ROW
    bars = "".join(_bar(row, index * _ROW, largest) for index, row in enumerate(ranked))
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
        f"<g><title>{html.escape(_title(row))}</title>"
        + _name(row, top + 11, 64, "qz-name qz-wide")
        + _name(row, top + 11, 34, "qz-name qz-narrow")
        + svg_text("100%", top + 11, f"{note}  {error(row.error)}", "qz-value qz-wide", anchor="end")
        + svg_text("100%", top + 11, f"{short}{error(row.error)}", "qz-value qz-narrow", anchor="end")
        + f'<rect class="qz-track" x="0" y="{top + 16}" width="100%" height="8" rx="2"/>'
        + f'<rect x="0" y="{top + 16}" width="{width}" height="8" rx="2" {_look(row.kind, row.fallback)}/></g>'
    )


def _title(row: GroupSensitivity) -> str:
    return f"{row.group} ({f'{row.kind}, float' if row.fallback else row.kind}): {error(row.error)}"


def _name(row: GroupSensitivity, y: float, length: int, css: str) -> str:
    """Return the group's name with its block in bold; each part is shortened by itself, so that both are legible."""
    rest = row.group.removeprefix(row.block)
    if not row.block or rest == row.group:
        return svg_text(0, y, shorten(row.group, length), css)
    block = row.block if len(row.group) <= length else shorten(row.block, length // 2)
    rest = html.escape(shorten(rest, length - len(block)))
    return f'<text class="{css}" x="0" y="{y}"><tspan font-weight="650">{html.escape(block)}</tspan>{rest}</text>'


def _lane(ranked: Sequence[GroupSensitivity], blocks: Sequence[str], top: float) -> str:
    """Return the lane: for each bar a mark whose place shows the block of the group in the order of the model."""
    height, width = len(ranked) * _ROW, 100 / len(blocks)
    marks = [
        f'<rect x="{blocks.index(row.block) * width:.2f}%" y="{index * _ROW + 2}" width="{width:.2f}%" height="22" '
        f'fill="{_colour(row.kind)}"><title>{html.escape(f"{row.block}: {_title(row)}")}</title></rect>'
        for index, row in enumerate(ranked)
    ]
    track = f'<rect class="qz-track" width="100%" height="{height}" rx="2"/>'
    return f'<svg x="0" y="{top}" width="{_LANE}%" height="{height}">{track}{"".join(marks)}</svg>'


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, _OTHER)


def _look(kind: str, hollow: bool) -> str:
    """Return the fill of a bar or swatch of ``kind``."""
    colour = _colour(kind)
    return f'fill="{colour}"' + (f' fill-opacity="0.15" stroke="{colour}" stroke-width="1.5"' if hollow else "")


def _legend(caption: str, ranked: Sequence[GroupSensitivity], blocks: Sequence[str]) -> tuple[list[str], float]:
    entries = [(_swatch(_look(kind, False)), kind) for kind in dict.fromkeys(row.kind for row in ranked)]
    if any(row.fallback for row in ranked):
        entries.append((_swatch(_look("", True)), "put back to float"))
    parts, end = svg_legend(entries, top=22)
    parts.append(svg_text(0, 13, caption, "qz-value"))
    if len(blocks) > 1:
        wide = (
            f"Marks on the left: its block, of {len(blocks)} from {shorten(blocks[0], 40)} to {shorten(blocks[-1], 40)}"
        )
        parts.append(svg_text(0, end + 13, wide, "qz-value qz-wide"))
        parts.append(svg_text(0, end + 13, f"Marks on the left: its block, of {len(blocks)}", "qz-value qz-narrow"))
        end += 20
    return parts, end + 12


def _swatch(look: str) -> str:
    return f'<rect x="1" y="3" width="11" height="11" rx="2" {look}/>'


def blocks_in_order(rows: Iterable[GroupSensitivity]) -> list[str]:
    """Return each block once, in the model's order."""
    return list(dict.fromkeys(row.block for row in sorted(rows, key=lambda row: (row.position, row.group))))
