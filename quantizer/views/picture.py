"""A picture that a notebook shows."""

from __future__ import annotations

import os

from quantizer.files import whole_file


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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to an ``.svg`` file.

        Raises:
            QuantizerError: the file cannot be written.
        """
        with whole_file(path) as part:
            part.write_text(self.svg, encoding="utf-8")
