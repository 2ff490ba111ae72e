"""Data sets that a run can name, and ``load_rows``, which reads a part of one."""

from __future__ import annotations

from quantizer.tasks.datasets import builtin, files, hub, rows
from quantizer.tasks.datasets.files import folder_holds, read_images, read_recordings
from quantizer.tasks.datasets.rows import (
    Audio,
    Boxes,
    Choices,
    Depths,
    Image,
    Masked,
    Pair,
    Plain,
    Question,
    Rewritten,
    Row,
    Speech,
    Text,
    Words,
    datasets,
    load_rows,
)
from quantizer.tasks.datasets.text_files import read_texts, text_files

__all__ = [
    "Audio",
    "Boxes",
    "Choices",
    "Depths",
    "Image",
    "Masked",
    "Pair",
    "Plain",
    "Question",
    "Rewritten",
    "Row",
    "Speech",
    "Text",
    "Words",
    "builtin",
    "datasets",
    "files",
    "folder_holds",
    "hub",
    "load_rows",
    "read_images",
    "read_recordings",
    "read_texts",
    "rows",
    "text_files",
]
