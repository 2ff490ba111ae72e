"""Checkpoints for the tasks: heads of MiniLM fine-tuned in minutes, and models from packages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import data
import torch
import torch.nn.functional as F
from common import SHARED
from task_data import animals, squad
from transformers import (
    AutoImageProcessor,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Dinov2ForImageClassification,
)

from quantizer.tasks import Question, Words, load_examples, read_image

__all__ = [
    "animal_or_object",
    "named_entities",
    "questions",
    "smollm2",
]

Item = TypeVar("Item")

_SST2 = SHARED / "models/minilm-sst2"
_DINOV2 = SHARED / "models/dinov2-small"


def _batches(items: Sequence[Item], size: int, epochs: int) -> Iterator[list[Item]]:
    for epoch in range(epochs):
        mixed = list(items)
        random.Random(epoch).shuffle(mixed)
        for start in range(0, len(mixed) - size + 1, size):
            yield mixed[start : start + size]


def _trained(model: Any, rate: float, batches: Iterator[dict[str, torch.Tensor]]) -> Any:
    """The model after one step of AdamW for each batch, which holds the labels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def named_entities(folder: Path) -> None:
    """MiniLM on WNUT-17: 3 epochs, the tag of a word at its first token."""
    rows = [
        row
        for row in load_examples("conll", path=str(SHARED / "data/wnut17/wnut17train.conll"))
        if isinstance(row, Words)
    ]
    tags = sorted({tag for row in rows for tag in row.tags} - {"O"})
    tags = ["O", *tags]
    tokenizer = AutoTokenizer.from_pretrained(_SST2)
    model = AutoModelForTokenClassification.from_pretrained(
        _SST2,
        num_labels=len(tags),
        id2label=dict(enumerate(tags)),
        label2id={tag: at for at, tag in enumerate(tags)},
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
    )

    def batch(chunk: list[Words]) -> dict[str, torch.Tensor]:
        words = [list(row.words) for row in chunk]
        made = tokenizer(
            words, is_split_into_words=True, truncation=True, max_length=96, padding=True, return_tensors="pt"
        )
        labels = torch.full(made["input_ids"].shape, -100)
        for at, row in enumerate(chunk):
            before = None
            for token, word in enumerate(made.word_ids(at)):
                if word is not None and word != before:
                    labels[at, token] = tags.index(row.tags[word])
                before = word
        return {**made, "labels": labels}

    _trained(model, 1e-4, (batch(chunk) for chunk in _batches(rows, 32, 3))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def questions(folder: Path) -> None:
    """MiniLM on 481 questions of SQuAD: 4 epochs, which teach it little."""
    rows = [
        row
        for row in load_examples("squad-json", path=str(squad(folder.parent, "training")))
        if isinstance(row, Question)
    ]
    tokenizer = AutoTokenizer.from_pretrained(_SST2)
    model = AutoModelForQuestionAnswering.from_pretrained(_SST2, dtype=torch.float32)

    def batch(chunk: list[Question]) -> dict[str, torch.Tensor]:
        made = tokenizer(
            [row.question for row in chunk],
            [row.context for row in chunk],
            truncation="longest_first",
            max_length=256,
            padding=True,
            return_tensors="pt",
            return_offsets_mapping=True,
        )
        offsets = made.pop("offset_mapping")
        first, last = torch.zeros(len(chunk), dtype=torch.long), torch.zeros(len(chunk), dtype=torch.long)
        for at, row in enumerate(chunk):
            answer, start = row.answers[0]
            for token, part in enumerate(made.sequence_ids(at)):
                low, high = offsets[at, token].tolist()
                if part == 1 and low <= start < high:
                    first[at] = token
                if part == 1 and low < start + len(answer) <= high:
                    last[at] = token
        return {**made, "start_positions": first, "end_positions": last}

    _trained(model, 2e-4, (batch(chunk) for chunk in _batches(rows, 16, 4))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def animal_or_object(folder: Path) -> None:
    """DINOv2-small with a linear head, fitted on half of the ImageNet sample: animal or not."""
    processor = AutoImageProcessor.from_pretrained(_DINOV2)
    names = {0: "object", 1: "animal"}
    model = Dinov2ForImageClassification.from_pretrained(
        _DINOV2, dtype=torch.float32, id2label=names, label2id={name: at for at, name in names.items()}
    ).eval()
    found: list[torch.Tensor] = []
    hook = model.classifier.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    rows = list(animals("training"))
    with torch.no_grad():
        for start in range(0, len(rows), 10):
            images = [read_image(path) for path, _ in rows[start : start + 10]]
            model(**processor(images, return_tensors="pt"))
    hook.remove()
    features, labels = torch.cat(found), torch.tensor([label for _, label in rows])
    head = model.classifier
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        error = F.cross_entropy(head(features), labels) + 1e-3 * head.weight.square().sum()
        error.backward()
        return error

    optimizer.step(loss)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def smollm2(folder: Path) -> None:
    """SmolLM2-135M of its package, as a checkpoint of floats: transformers saves no model that it read from GGUF."""
    read, tokenizer = data.smollm2()
    of_file = ("quantization_config", "dtype", "_name_or_path")
    config = type(read.config)(**{name: value for name, value in read.config.to_dict().items() if name not in of_file})
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
