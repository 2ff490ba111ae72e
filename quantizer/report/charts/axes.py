"""The frame, the text, the legend and the axes of a picture in SVG.

The package writes its own SVG instead of using a plotting library: widths are in percent and text is in pixels, so that
pictures are readable from a phone to a wide notebook, and text has the colour of the page.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


def svg_title(title: str, *parts: str) -> str:
    """Return parts of a picture that belong together, with the text that a pointer on them shows."""
    return f"<g><title>{html.escape(title)}</title>{''.join(parts)}</g>"


def svg_dot(x: str, y: float, radius: float, look: str) -> str:
    """Return a dot."""
    return f'<circle cx="{x}" cy="{y}" r="{radius:g}" {look}/>'


def dot_sign(look: str, radius: float = 4.5) -> str:
    """Return a dot of a legend."""
    return svg_dot("7", 9, radius, look)


def line_sign(look: str) -> str:
    """Return a line of a legend."""
    return f'<line x1="0" x2="15" y1="9" y2="9" {look}/>'


def line_look(colour: str, dashes: str = "") -> str:
    """Return the look of a line, perhaps with dashes."""
    return f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dashes}"' if dashes else "")


def quiet_look(opacity: float) -> str:
    """Return the look of a line of the grid."""
    return f'stroke="currentColor" stroke-opacity="{opacity:g}"'


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes of a plot: values across in percent of its width, values up in pixels of its height."""

    across: tuple[float, float]
    """The values at the left and at the right; all are in the middle if both are the same."""
    up: tuple[float, float]
    """The values at the bottom and at the top, likewise, as ``scale`` gives them."""
    ends: tuple[float, float]
    """Where the values at the left and at the right are, in percent."""
    height: int
    """Height in pixels."""
    margin: int
    """Pixels above the value at the top, and below that at the bottom."""
    left: float = 17
    """Where the lines of the grid begin, in percent."""
    gap: int = 10
    """Pixels between the legend and the plot, where the name of the values up stands."""
    name_at: int = 20
    """Pixels from the plot to the name of the values across."""
    below: int = 28
    """Pixels from the plot to the end of the picture."""
    scale: Callable[[float], float] = float
    """A function that values up are drawn by."""

    def x(self, value: float) -> str:
        """Return where a value across is."""
        low, high = self.across
        share = (value - low) / (high - low) if high != low else 0.5
        return f"{self.ends[0] + (self.ends[1] - self.ends[0]) * share:.2f}%"

    def y(self, value: float) -> float:
        """Return where a value up is, in pixels from the top."""
        low, high = self.up
        share = (self.scale(value) - low) / (high - low) if high != low else 0.5
        return round(self.margin + (self.height - 2 * self.margin) * (1 - share), 1)

    def level(self, value: float, shown: str, look: str) -> str:
        """Return a line across at a value up, with its text; without one if that is empty."""
        y = self.y(value)
        line = f'<line x1="{self.left}%" x2="100%" y1="{y}" y2="{y}" {look}/>'
        return line + (svg_text(f"{self.left - 1.5}%", y + 4, shown, "qz-value", "end") if shown else "")

    def tick(self, value: float, shown: str, anchor: str = "middle", lower: int = 4) -> str:
        """Return the text of a value across."""
        return svg_text(self.x(value), self.height + lower, shown, "qz-value", anchor)

    def path(self, points: Sequence[tuple[float, float]], more: str = "") -> list[str]:
        """Return lines from point to point."""
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
        """Return the picture, with the names of both axes; ``more`` pixels of the plot are for its own labels."""
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
