"""A picture that a notebook shows."""

from __future__ import annotations

__all__ = ["Picture"]


class Picture:
    """An SVG picture.

    Attributes:
        svg: one ``<svg>`` element.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def __repr__(self) -> str:
        return "a picture: a notebook shows it, .save(path) writes it as SVG"

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str) -> None:
        """Write the picture to an ``.svg`` file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)
