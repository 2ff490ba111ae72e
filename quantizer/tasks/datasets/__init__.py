"""Data sets that a run can name, and ``load_examples``, which reads a part of one."""

from __future__ import annotations

from quantizer.tasks.datasets import builtin, examples, files, hub, search
from quantizer.tasks.datasets.examples import (
    Audio,
    Boxes,
    Choices,
    Depths,
    Documents,
    Example,
    Image,
    Masked,
    Pair,
    Plain,
    Query,
    Question,
    Rewritten,
    Speech,
    Text,
    Words,
    datasets,
    load_examples,
)
from quantizer.tasks.datasets.files import folder_holds, is_coco, read_images, read_recordings
from quantizer.tasks.datasets.text_files import read_texts, text_files

# quantizer.tasks.datasets is this module, so that it has the functions of the registry.
add = datasets.add
names = datasets.names

__all__ = [
    "Audio",
    "Boxes",
    "Choices",
    "Depths",
    "Documents",
    "Example",
    "Image",
    "Masked",
    "Pair",
    "Plain",
    "Query",
    "Question",
    "Rewritten",
    "Speech",
    "Text",
    "Words",
    "add",
    "builtin",
    "datasets",
    "files",
    "folder_holds",
    "is_coco",
    "hub",
    "load_examples",
    "names",
    "read_images",
    "read_recordings",
    "read_texts",
    "examples",
    "search",
    "text_files",
]
