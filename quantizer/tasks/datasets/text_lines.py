"""The data set ``text-lines``: texts without labels, for models that fill in words or go on."""

from __future__ import annotations

from pathlib import Path

from quantizer.tasks.datasets.rows import Plain
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.datasets.rows import datasets
from quantizer.tasks.datasets.rows import refuse_options
from quantizer.tasks.datasets.rows import require_file
from quantizer.tasks.datasets.texts import read_texts

__all__ = ["read_text_lines"]


@datasets.add("text-lines")
def read_text_lines(path: Path | None, split: str | None, subset: str | None) -> list[Row]:
    """Return the texts of a file; see ``read_texts``.

    Raises:
        TaskError: the file does not exist, is malformed, or has no text.
    """
    refuse_options("text-lines", split=split, subset=subset)
    return [Plain(text) for text in read_texts(require_file("text-lines", path))]
