"""The tasks that are measured, each with a checkpoint and its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import random_checkpoints
from common import MINILM, SHARED
from data import cranfield, cranfield_texts
from spoken import spoken
from task_data import (
    COLOURS,
    animals_csv,
    made_choices,
    made_depths,
    made_images,
    made_masks,
    made_objects,
    made_pairs,
    made_sounds,
    made_speech,
    made_texts,
    squad,
    wikitext,
)
from whisper_base import whisper_base

__all__ = ["CASES", "Case"]

Maker = Callable[[Path], None]
Rows = dict[str, Any]


def _of(name: str, path: str, rows: int | None = None) -> Callable[[Path], Rows]:
    """Samples of a file of real data."""
    return lambda _: {"name": name, "path": str(SHARED / path)} | ({} if rows is None else {"samples": rows})


def _made(name: str, write: Callable[..., Path], *part: str, rows: int | None = None) -> Callable[[Path], Rows]:
    """Samples of a file that is written first."""
    return lambda folder: (
        {"name": name, "path": str(write(folder, *part))} | ({} if rows is None else {"samples": rows})
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task with a checkpoint.

    Attributes:
        task: its name.
        model: what the checkpoint is, in words.
        source: the checkpoint, or a function that writes it into a folder.
        calibration: its rows, from a folder in which they may be written.
        evaluation: the rows of the score; None: the task has none.
        real: whether weights and rows are real ones, so that the score means something.
        data: more of the section ``data``.
        max_length: tokens of a row.
        labels: the names to choose among, of a task that takes them.
        seconds: of a recording.
        shape: of the latency: samples in a batch, and tokens.
        convertible: whether ``convert`` takes the task.
        new_tokens: the most that are written, of a task that writes; None: the default.
    """

    task: str
    model: str
    source: str | Maker
    calibration: Callable[[Path], Rows]
    evaluation: Callable[[Path], Rows] | None = None
    real: bool = True
    data: Callable[[Path], dict[str, Rows]] = lambda _: {}
    max_length: int = 128
    labels: tuple[str, ...] = ()
    seconds: float | None = None
    shape: tuple[int, int] = (8, 128)
    convertible: bool = True
    new_tokens: int | None = None


_MASKS = _made("image-masks", made_masks)
_IMAGES = _made("image-folder", made_images)
_CHOICES = _made("choices-jsonl", made_choices)
_SOUNDS = _made("audio-folder", made_sounds)
_SPEECH = _made("transcripts", made_speech)
_OBJECTS = _made("coco-json", made_objects)

CASES = (
    Case(
        task="sequence-classification",
        model="MiniLM fine-tuned on SST-2",
        source=str(SHARED / "models/minilm-sst2"),
        calibration=_of("sst2-text", "data/sst2/stsa.binary.train", 128),
        evaluation=_of("sst2-text", "data/sst2/stsa.binary.dev"),
    ),
    Case(
        task="sentence-similarity",
        model="all-MiniLM-L6-v2, STS-B",
        source=MINILM,
        calibration=_of("stsb-csv", "data/stsb/stsb-en-train.csv", 128),
        evaluation=_of("stsb-csv", "data/stsb/stsb-en-dev.csv"),
    ),
    Case(
        task="retrieval",
        model="all-MiniLM-L6-v2, Cranfield",
        source=MINILM,
        calibration=_made("texts", cranfield_texts, rows=128),
        evaluation=_made("trec", cranfield),
        max_length=256,
    ),
    Case(
        task="embedding-classification",
        model="all-MiniLM-L6-v2 and a linear head, SST-2",
        source=MINILM,
        calibration=_of("sst2-text", "data/sst2/stsa.binary.train", 128),
        evaluation=_of("sst2-text", "data/sst2/stsa.binary.dev"),
        data=lambda folder: {"head": _of("sst2-text", "data/sst2/stsa.binary.train", 2000)(folder)},
        convertible=False,
    ),
    Case(
        task="token-classification",
        model="MiniLM fine-tuned on WNUT-17",
        source=checkpoints.named_entities,
        calibration=_of("conll", "data/wnut17/wnut17train.conll", 128),
        evaluation=_of("conll", "data/wnut17/emerging.dev.conll"),
    ),
    Case(
        task="question-answering",
        model="MiniLM, 4 epochs on 481 questions of SQuAD",
        source=checkpoints.questions,
        calibration=_made("squad-json", squad, "training", rows=128),
        evaluation=_made("squad-json", squad, "evaluation"),
        max_length=192,
    ),
    Case(
        task="text-generation",
        model="SmolLM2-135M, WikiText-2",
        source=checkpoints.smollm2,
        calibration=_made("text-lines", wikitext, "calibration", rows=32),
        evaluation=_made("text-lines", wikitext, "evaluation"),
        shape=(1, 128),
    ),
    Case(
        task="text-generation-with-past",
        model="SmolLM2-135M, WikiText-2",
        source=checkpoints.smollm2,
        calibration=_made("text-lines", wikitext, "calibration", rows=32),
        evaluation=_made("text-lines", wikitext, "evaluation"),
        shape=(1, 128),
    ),
    Case(
        task="image-classification",
        model="DINOv2-small and a linear head, animal or object in the ImageNet sample",
        source=checkpoints.animal_or_object,
        calibration=_made("image-csv", animals_csv, "training", rows=64),
        evaluation=_made("image-csv", animals_csv, "evaluation"),
        shape=(4, 0),
    ),
    Case(
        task="image-feature-extraction",
        model="DINOv2-small, animals and objects in the ImageNet sample",
        source=str(SHARED / "models/dinov2-small"),
        calibration=_made("image-csv", animals_csv, "training", rows=64),
        evaluation=_made("image-csv", animals_csv, "evaluation"),
        shape=(4, 0),
    ),
    Case(
        task="speech-to-text",
        model="Whisper base, sentences of STS-B read by eSpeak NG",
        source=whisper_base,
        calibration=_made("transcripts", spoken, "calibration", rows=16),
        evaluation=_made("transcripts", spoken, "evaluation"),
        shape=(2, 0),
    ),
    Case(
        task="text-to-text",
        model="T5 of 2 layers",
        source=random_checkpoints.texts_to_texts,
        calibration=_made("text-pairs", made_pairs, rows=32),
        evaluation=_made("text-pairs", made_pairs),
        real=False,
        shape=(4, 32),
        new_tokens=16,
    ),
    Case(
        task="fill-mask",
        model="BERT of 2 layers",
        source=random_checkpoints.fill_mask,
        calibration=_made("text-lines", made_texts, rows=32),
        evaluation=_made("text-lines", made_texts),
        real=False,
        shape=(8, 32),
    ),
    Case(
        task="semantic-segmentation",
        model="Segformer of 4 blocks",
        source=random_checkpoints.segmentation,
        calibration=_MASKS,
        evaluation=_MASKS,
        real=False,
        shape=(4, 0),
    ),
    Case(
        task="object-detection",
        model="YOLOS of 2 layers",
        source=random_checkpoints.detection,
        calibration=_OBJECTS,
        evaluation=_OBJECTS,
        real=False,
        shape=(4, 0),
    ),
    Case(
        task="depth-estimation",
        model="GLPN of 4 blocks",
        source=random_checkpoints.depth,
        calibration=_IMAGES,
        evaluation=_made("image-depths", made_depths),
        real=False,
        shape=(4, 0),
    ),
    Case(
        task="multiple-choice",
        model="BERT of 2 layers",
        source=random_checkpoints.choices,
        calibration=_CHOICES,
        evaluation=_CHOICES,
        real=False,
        shape=(8, 64),
    ),
    Case(
        task="zero-shot-image-classification",
        model="CLIP of 2 layers",
        source=random_checkpoints.images_and_texts,
        calibration=_IMAGES,
        evaluation=_IMAGES,
        real=False,
        labels=COLOURS,
        shape=(4, 0),
    ),
    Case(
        task="audio-classification",
        model="Wav2Vec2 of 2 layers",
        source=random_checkpoints.sounds,
        calibration=_SOUNDS,
        evaluation=_SOUNDS,
        real=False,
        seconds=1,
        shape=(4, 0),
    ),
    Case(
        task="automatic-speech-recognition",
        model="Wav2Vec2 of 2 layers, CTC",
        source=random_checkpoints.speech,
        calibration=_SPEECH,
        evaluation=_SPEECH,
        real=False,
        seconds=1,
        shape=(4, 0),
    ),
)
