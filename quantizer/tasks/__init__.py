"""Models, data sets and metrics that a run can name: see ``load_model``, ``load_rows`` and ``build_task``."""

from __future__ import annotations

from quantizer.tasks import classification as embedding_classification
from quantizer.tasks import classification as image_classification
from quantizer.tasks import classification as sequence_classification
from quantizer.tasks import sentence_similarity
from quantizer.tasks.audio import audio_classification, speech_recognition
from quantizer.tasks.audio.audio_inputs import Recordings
from quantizer.tasks.checkpoints.sources import resolve_source, save_processor
from quantizer.tasks.datasets import (
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
    folder_holds,
    load_rows,
    read_images,
    read_recordings,
    read_texts,
    text_files,
)
from quantizer.tasks.image_inputs import read_image
from quantizer.tasks.images import depth_estimation, object_detection, segmentation, zero_shot
from quantizer.tasks.inputs import Batch, Feed, Sample, batch_shape, rows_at
from quantizer.tasks.models import (
    load_image_processor,
    load_model,
    load_processor,
    load_tokenizer,
    read_checkpoint,
    require_labels,
)
from quantizer.tasks.outputs import first_output
from quantizer.tasks.seq2seq import speech_to_text, text_to_text
from quantizer.tasks.task import Predictions, Progress, Run, Task, build_task, tasks
from quantizer.tasks.tokens import fill_mask, multiple_choice, question_answering, text_generation, token_classification
from quantizer.tasks.tokens import text_generation as generation_with_past

__all__ = [
    # rows
    "Audio",
    "Boxes",
    "Choices",
    "Depths",
    "Image",
    "Masked",
    "Pair",
    "Plain",
    "Question",
    "Recordings",
    "Rewritten",
    "Row",
    "Speech",
    "Text",
    "Words",
    "datasets",
    "folder_holds",
    "load_rows",
    "read_image",
    "read_images",
    "read_recordings",
    "read_texts",
    "text_files",
    # models
    "load_image_processor",
    "load_model",
    "load_processor",
    "load_tokenizer",
    "read_checkpoint",
    "require_labels",
    "resolve_source",
    "save_processor",
    # tasks
    "Batch",
    "Feed",
    "Predictions",
    "Progress",
    "Run",
    "Sample",
    "Task",
    "batch_shape",
    "build_task",
    "first_output",
    "rows_at",
    "tasks",
    # modules, one task each
    "audio_classification",
    "depth_estimation",
    "embedding_classification",
    "fill_mask",
    "generation_with_past",
    "image_classification",
    "multiple_choice",
    "question_answering",
    "object_detection",
    "segmentation",
    "sentence_similarity",
    "sequence_classification",
    "speech_recognition",
    "speech_to_text",
    "text_generation",
    "text_to_text",
    "token_classification",
    "zero_shot",
]
