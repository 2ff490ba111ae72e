"""The frame, the text and the legend of a picture.

The package writes its own SVG instead of using a plotting library: bars are in percent of the width and text is in
pixels, so that pictures are readable from a phone to a wide notebook, and text has the colour of the page.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
_LEGEND_ROW = 20


def svg_text(x: float | str, y: float, content: str, css: str, anchor: str = "start") -> str:
    """Return a line of text; ``css`` is ``qz-name`` or ``qz-value``, optionally with ``qz-wide`` or ``qz-narrow``."""
    return f'<text class="{css}" x="{x}" y="{y}" text-anchor="{anchor}">{html.escape(content)}</text>'


def svg_legend(entries: Sequence[tuple[str, str]], top: float = 0) -> tuple[list[str], float]:
    """Return a legend with two entries in a row.

    Args:
        entries: for each entry the markup of its sign, within a square of 14 pixels, and its meaning.
        top: the top of the legend, in pixels.

    Returns:
        The elements of the legend, and its bottom in pixels.
    """
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
