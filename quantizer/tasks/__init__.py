"""Models, data sets and metrics that a run can name: see ``load_model``, ``load_examples`` and ``build_task``."""

from __future__ import annotations

from quantizer.tasks import (
    audio,
    classification,
    datasets,
    depth_estimation,
    fill_mask,
    multiple_choice,
    object_detection,
    question_answering,
    segmentation,
    sentence_similarity,
    text_generation,
    token_classification,
    zero_shot,
)
from quantizer.tasks.audio import Recordings
from quantizer.tasks.checkpoints import resolve_source, save_processor
from quantizer.tasks.datasets import (
    Audio,
    Boxes,
    Choices,
    Depths,
    Example,
    Image,
    Masked,
    Pair,
    Plain,
    Question,
    Rewritten,
    Speech,
    Text,
    Words,
    folder_holds,
    load_examples,
    read_images,
    read_recordings,
    read_texts,
    text_files,
)
from quantizer.tasks.image_inputs import read_image
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
from quantizer.tasks.seq2seq import tasks as seq2seq_tasks
from quantizer.tasks.task import Predictions, Progress, Run, Task, build_task, tasks

__all__ = [
    # examples
    "Audio",
    "Boxes",
    "Choices",
    "Depths",
    "Example",
    "Image",
    "Masked",
    "Pair",
    "Plain",
    "Question",
    "Recordings",
    "Rewritten",
    "Speech",
    "Text",
    "Words",
    "datasets",
    "folder_holds",
    "load_examples",
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
    # modules with tasks, which importing them registers
    "audio",
    "classification",
    "depth_estimation",
    "fill_mask",
    "multiple_choice",
    "object_detection",
    "question_answering",
    "segmentation",
    "sentence_similarity",
    "seq2seq_tasks",
    "text_generation",
    "token_classification",
    "zero_shot",
]
