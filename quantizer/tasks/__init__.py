"""Models, data sets and metrics that a run can name: see ``load_model``, ``load_rows`` and ``build_task``."""

from __future__ import annotations

from quantizer.tasks import embedding_classification
from quantizer.tasks import image_classification
from quantizer.tasks import sentence_similarity
from quantizer.tasks import sequence_classification
from quantizer.tasks.audio import audio_classification
from quantizer.tasks.audio import speech_recognition
from quantizer.tasks.audio.audio_inputs import Recordings
from quantizer.tasks.checkpoints.timm_models import save_processor
from quantizer.tasks.datasets import Audio
from quantizer.tasks.datasets import Boxes
from quantizer.tasks.datasets import Choices
from quantizer.tasks.datasets import Depths
from quantizer.tasks.datasets import Image
from quantizer.tasks.datasets import Masked
from quantizer.tasks.datasets import Pair
from quantizer.tasks.datasets import Plain
from quantizer.tasks.datasets import Question
from quantizer.tasks.datasets import Rewritten
from quantizer.tasks.datasets import Row
from quantizer.tasks.datasets import Speech
from quantizer.tasks.datasets import Text
from quantizer.tasks.datasets import Words
from quantizer.tasks.datasets import datasets
from quantizer.tasks.datasets import folder_holds
from quantizer.tasks.datasets import load_rows
from quantizer.tasks.datasets import read_images
from quantizer.tasks.datasets import read_recordings
from quantizer.tasks.datasets import read_texts
from quantizer.tasks.datasets import text_files
from quantizer.tasks.image_inputs import read_image
from quantizer.tasks.images import depth_estimation
from quantizer.tasks.images import object_detection
from quantizer.tasks.images import segmentation
from quantizer.tasks.images import zero_shot
from quantizer.tasks.inputs import Feed
from quantizer.tasks.inputs import Sample
from quantizer.tasks.inputs import batch_shape
from quantizer.tasks.inputs import rows_at
from quantizer.tasks.models import load_image_processor
from quantizer.tasks.models import load_model
from quantizer.tasks.models import load_processor
from quantizer.tasks.models import load_tokenizer
from quantizer.tasks.models import read_checkpoint
from quantizer.tasks.models import require_labels
from quantizer.tasks.models import resolve_source
from quantizer.tasks.outputs import first_output
from quantizer.tasks.seq2seq import speech_to_text
from quantizer.tasks.seq2seq import text_to_text
from quantizer.tasks.task import Batch
from quantizer.tasks.task import Predictions
from quantizer.tasks.task import Progress
from quantizer.tasks.task import Run
from quantizer.tasks.task import Task
from quantizer.tasks.task import build_task
from quantizer.tasks.task import tasks
from quantizer.tasks.tokens import fill_mask
from quantizer.tasks.tokens import generation_with_past
from quantizer.tasks.tokens import multiple_choice
from quantizer.tasks.tokens import question_answering
from quantizer.tasks.tokens import text_generation
from quantizer.tasks.tokens import token_classification

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
