"""Data sets that a run can name, one module each, and ``load_rows``, which reads a part of one."""

from __future__ import annotations

from quantizer.tasks.datasets import choices
from quantizer.tasks.datasets import conll
from quantizer.tasks.datasets import squad_json
from quantizer.tasks.datasets import sst2
from quantizer.tasks.datasets import stsb
from quantizer.tasks.datasets import text_csv
from quantizer.tasks.datasets import vader
from quantizer.tasks.datasets.files import coco_json
from quantizer.tasks.datasets.files import hf
from quantizer.tasks.datasets.files import image_depths
from quantizer.tasks.datasets.files import image_masks
from quantizer.tasks.datasets.files import labelled_csv
from quantizer.tasks.datasets.files import labelled_folder
from quantizer.tasks.datasets.files import text_pairs
from quantizer.tasks.datasets.files import transcripts
from quantizer.tasks.datasets.files.paths import folder_holds
from quantizer.tasks.datasets.files.paths import read_images
from quantizer.tasks.datasets.files.paths import read_recordings
from quantizer.tasks.datasets.load import load_rows
from quantizer.tasks.datasets.rows import Audio
from quantizer.tasks.datasets.rows import Boxes
from quantizer.tasks.datasets.rows import Choices
from quantizer.tasks.datasets.rows import Depths
from quantizer.tasks.datasets.rows import Image
from quantizer.tasks.datasets.rows import Masked
from quantizer.tasks.datasets.rows import Pair
from quantizer.tasks.datasets.rows import Plain
from quantizer.tasks.datasets.rows import Question
from quantizer.tasks.datasets.rows import Rewritten
from quantizer.tasks.datasets.rows import Row
from quantizer.tasks.datasets.rows import Speech
from quantizer.tasks.datasets.rows import Text
from quantizer.tasks.datasets.rows import Words
from quantizer.tasks.datasets.rows import datasets
from quantizer.tasks.datasets.texts import read_texts
from quantizer.tasks.datasets.texts import text_files

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
