"""Data sets that a run can name, one module each, and ``load_rows``, which reads a part of one."""

from __future__ import annotations

from quantizer.tasks.datasets import builtin as sst2
from quantizer.tasks.datasets import builtin as stsb
from quantizer.tasks.datasets import builtin as vader
from quantizer.tasks.datasets import rows as choices
from quantizer.tasks.datasets import text_files as conll
from quantizer.tasks.datasets import text_files as squad_json
from quantizer.tasks.datasets import text_files as text_csv
from quantizer.tasks.datasets import text_files as text_pairs
from quantizer.tasks.datasets.files import hf
from quantizer.tasks.datasets.files import image_files as coco_json
from quantizer.tasks.datasets.files import image_files as image_depths
from quantizer.tasks.datasets.files import image_files as image_masks
from quantizer.tasks.datasets.files import labelled as labelled_csv
from quantizer.tasks.datasets.files import labelled as labelled_folder
from quantizer.tasks.datasets.files import labelled as transcripts
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
