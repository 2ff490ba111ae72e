"""Data sets that a run can name, one module each, and ``load_rows``, which reads a part of one."""

from __future__ import annotations

from quantizer.tasks.datasets import choices, conll, squad_json, sst2, stsb, text_csv, vader
from quantizer.tasks.datasets.files import (
    coco_json,
    hf,
    image_depths,
    image_masks,
    labelled_csv,
    labelled_folder,
    text_pairs,
    transcripts,
)
from quantizer.tasks.datasets.files.paths import folder_holds, read_images, read_recordings
from quantizer.tasks.datasets.load import load_rows
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
)
from quantizer.tasks.datasets.texts import read_texts, text_files

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
    "choices",
    "coco_json",
    "conll",
    "datasets",
    "folder_holds",
    "hf",
    "image_depths",
    "image_masks",
    "labelled_csv",
    "labelled_folder",
    "load_rows",
    "read_images",
    "read_recordings",
    "read_texts",
    "squad_json",
    "sst2",
    "stsb",
    "text_csv",
    "text_files",
    "text_pairs",
    "transcripts",
    "vader",
]
